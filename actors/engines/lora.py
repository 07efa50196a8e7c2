"""LoRA adapters: read by PEFT, applied to the tokens of many adapters in one forward.

PEFT decides what an adapter directory means: it parses the configuration, matches the target modules and works out
ranks and scaling, on a copy of the model without weights (the "meta" device), so that reading one neither touches
the serving model nor waits for it. Only the application is written here. PEFT's own for mixed batches
(`adapter_names`) chooses by row of the batch and gathers; our batch is one flat row of tokens sorted by adapter, so
each adapter's tokens are a slice: one small product down, one up, added in place. For an adapter that serves the
whole batch that is `x @ A @ B` and nothing else.
"""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from broker.errors import AdapterError

UNSUPPORTED = (
    "modules_to_save",
    "trainable_token_indices",
    "target_parameters",
    "layer_replication",
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
)
"""Fields of a PEFT configuration that change more than `x @ A @ B`: an adapter that sets one is refused."""

SLOT = "slot"
"""What adapters are called inside PEFT, whose module names allow fewer characters than our adapter names."""


@dataclass(frozen=True, slots=True)
class Target:
    """One adapted module, as PEFT lays it out: A is [rank, in_features], B is [out_features, rank]."""

    rank: int
    in_features: int
    out_features: int
    scaling: float


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter ready to apply: for each module A transposed [in, rank] and scaling times B transposed [rank, out]."""

    pairs: dict[str, tuple[Tensor, Tensor]]


class AdapterReader:
    """Reads PEFT directories made for one base model. Safe to call from any thread."""

    def __init__(self, model: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._config = model.config
        self._class = type(model)
        head = model.get_output_embeddings()
        self._output = {name for name, module in model.named_modules() if module is head}
        self._device, self._dtype = device, dtype
        self._layouts: dict[str, dict[str, Target]] = {}
        self._lock = threading.Lock()

    def read(self, directory: Path) -> AdapterWeights:
        """Read `directory` (adapter_config.json, adapter_model.safetensors). Raises AdapterError."""
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            if not (directory / name).is_file():
                raise AdapterError(f"{directory} is no PEFT adapter: it has no {name}")
        try:
            layout = self._layout(directory)
            return AdapterWeights(self._pairs(directory, layout))
        except AdapterError:
            raise
        except Exception as error:
            raise AdapterError(f"PEFT cannot read the adapter in {directory}: {error}") from error

    def _layout(self, directory: Path) -> dict[str, Target]:
        """The modules that the configuration adapts, from PEFT itself; kept, for a run's versions share it."""
        from peft import PeftConfig

        with self._lock:
            key = json.dumps(json.loads((directory / "adapter_config.json").read_text()), sort_keys=True)
            if key not in self._layouts:
                config = PeftConfig.from_pretrained(str(directory))
                self._refuse_unsupported(directory, config)
                self._layouts[key] = self._inject(directory, config)
            return self._layouts[key]

    def _refuse_unsupported(self, directory: Path, config: Any) -> None:
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind != "LORA":
            raise AdapterError(f"{directory} holds a {kind} adapter; the embedded engine serves plain LoRA only")
        found = [name for name in UNSUPPORTED if getattr(config, name, None)]
        if config.bias != "none":
            found.append(f"bias={config.bias!r}")
        if found:
            raise AdapterError(
                f"the adapter in {directory} sets {', '.join(found)}; the embedded engine serves plain LoRA only. "
                "Train without, or merge it into the base model"
            )

    def _inject(self, directory: Path, config: Any) -> dict[str, Target]:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer

        config.inference_mode, config.init_lora_weights = True, True
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            skeleton = self._class(self._config)
            inject_adapter_in_model(config, skeleton, SLOT)
        layout: dict[str, Target] = {}
        for name, layer in skeleton.named_modules():
            if not isinstance(layer, LoraLayer):
                continue
            if not isinstance(layer, Linear) or layer.lora_variant or name in self._output:
                raise AdapterError(
                    f"the adapter in {directory} adapts {name} ({type(layer.base_layer).__name__}); the embedded "
                    "engine serves plain LoRA on the linear layers inside the model only"
                )
            down, up = layer.lora_A[SLOT].weight, layer.lora_B[SLOT].weight
            layout[name] = Target(down.shape[0], down.shape[1], up.shape[0], float(layer.scaling[SLOT]))
        return layout

    def _pairs(self, directory: Path, layout: dict[str, Target]) -> dict[str, tuple[Tensor, Tensor]]:
        from peft import load_peft_weights

        weights: dict[str, Tensor] = dict(load_peft_weights(str(directory), device="cpu"))
        pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, target in layout.items():
            found = [weights.pop(f"base_model.model.{name}.lora_{side}.weight", None) for side in "AB"]
            down, up = found
            if down is None or up is None:
                raise AdapterError(f"the adapter in {directory} has no weights for {name}, which its config adapts")
            expected = ((target.rank, target.in_features), (target.out_features, target.rank))
            shapes = (tuple(down.shape), tuple(up.shape))
            if shapes != expected:
                raise AdapterError(f"the adapter in {directory}: {name} needs shapes {expected}, it has {shapes}")
            if not (down.isfinite().all() and up.isfinite().all()):
                raise AdapterError(f"the adapter in {directory}: {name} holds values that are not finite")
            pairs[name] = (self._place(down.float().T), self._place(up.float().T * target.scaling))
        if weights:
            raise AdapterError(
                f"the adapter in {directory} holds weights that its config does not adapt in this base model, such as "
                f"{min(weights)}; is it made for another model?"
            )
        return pairs

    def _place(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, self._dtype).contiguous()


class Adapters:
    """The adapters that a model applies, by forward hooks on the modules they adapt. At most `slots` of them."""

    def __init__(self, model: nn.Module, slots: int) -> None:
        self.slots = slots
        self.segments: Sequence[tuple[int, int, str | None]] = ()
        """(first token, end, adapter) of the forward that comes next."""
        self._modules = dict(model.named_modules())
        self._installed: dict[str, AdapterWeights] = {}
        self._by_module: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._installed)

    def __contains__(self, name: str | None) -> bool:
        return name is None or name in self._installed

    def install(self, name: str, weights: AdapterWeights) -> None:
        """Serve `weights` as `name` from the next forward on. Does nothing when `name` is served already."""
        if name in self._installed:
            return
        if len(self._installed) >= self.slots:
            raise AdapterError(
                f"no slot left for adapter {name}: all {self.slots} are taken ({', '.join(self._installed)}). "
                "Unload one, or give the engine more slots"
            )
        self._installed[name] = weights
        for module, pair in weights.pairs.items():
            if module not in self._by_module:
                self._by_module[module] = {}
                self._modules[module].register_forward_hook(self._hook(self._by_module[module]))
            self._by_module[module][name] = pair

    def remove(self, name: str) -> None:
        """Forget `name`; unknown names are ignored."""
        if self._installed.pop(name, None) is not None:
            for pairs in self._by_module.values():
                pairs.pop(name, None)

    def _hook(self, pairs: dict[str, tuple[Tensor, Tensor]]) -> Any:
        def add_lora(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            for start, end, name in self.segments:
                if name is not None and (pair := pairs.get(name)) is not None:
                    down, up = pair
                    output[0, start:end].addmm_(args[0][0, start:end] @ down, up)

        return add_lora
