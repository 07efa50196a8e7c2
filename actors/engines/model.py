"""The base model as the embedded engine runs it: a transformers model over flat batches with ragged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from actors.engines.attention import ATTENTION, Part, PromptPart, Step, ragged_attention
from actors.engines.lora import AdapterReader, Adapters
from actors.engines.rows import CacheShape
from broker.errors import ModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PROOF_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.05}
"""How far, relative to their norm, our logits may lie from the model's own at the start. Wrong attention is off by
tens of percent; half precision rounds differently with every kernel."""

FEW_ROWS = range(6, 65)
"""For how many rows a linear layer multiplies from the left (`FewRowsLinear`), from timings with weights that do not
fit into the CPU's caches."""


class PolicyModel:
    """A causal language model, its adapters, and one method: the logits of a step.

    Raises ModelError when the directory holds no model of that kind, or one whose attention cannot run over flat
    batches: at start a short prompt goes both ways, and the logits must agree.
    """

    def __init__(self, directory: Path, *, dtype: str, adapter_slots: int) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if dtype != "auto" and dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r}: expected auto or one of {', '.join(DTYPES)}")
        default = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self.dtype = DTYPES.get(dtype, default)
        self._model = self._load(directory)
        config = self._model.config.get_text_config()
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise ModelError(
                f"{directory}: rotary embeddings of type {rope} depend on the batch; expected a fixed type"
            )
        self.vocabulary = int(self._model.get_output_embeddings().weight.shape[0])
        self.context = int(getattr(config, "max_position_embeddings", None) or 2048)
        self.adapters = Adapters(self._model, adapter_slots)
        self.reader = AdapterReader(self._model, self.device, self.dtype)
        try:
            self.shape = self._measure()
            self._prove(directory)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"{directory}: {type(self._model).__name__} cannot run in the embedded engine: {error}"
            ) from error

    def logits(self, step: Step) -> Tensor:
        """The logits [len(step.keep), vocabulary] of one forward over the step's tokens."""
        self.adapters.segments = step.segments
        output = self._model(
            input_ids=torch.tensor([step.token_ids], device=self.device),
            position_ids=torch.tensor([step.positions], device=self.device),
            use_cache=False,
            logits_to_keep=torch.tensor(step.keep, dtype=torch.long, device=self.device),
            step=step,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _load(self, directory: Path) -> Any:
        import transformers
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(ATTENTION, ragged_attention)
        transformers.utils.logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=self.dtype, attn_implementation=ATTENTION, local_files_only=True
            )
        except Exception as error:
            raise ModelError(f"{directory} cannot be loaded as a causal language model: {error}") from error
        model.requires_grad_(False).eval().to(self.device)
        if self.device.type == "cpu":
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.__class__ = FewRowsLinear
        return model

    def _measure(self) -> CacheShape:
        """What each layer hands to attention, from a forward over one token."""
        probe = _Probe()
        self.logits(Step([0], [0], [probe], [], [0]))
        sizes = {size for pair in probe.shapes for size in pair}
        if probe.layers != list(range(len(probe.layers))) or len(sizes) != 1:
            raise ModelError(
                f"{type(self._model).__name__}: every layer must attend with as many keys and values of the same size; "
                f"found {sorted(sizes)} (heads, size) in layers {probe.layers}"
            )
        kv_heads, head_dim = probe.shapes[0][0]
        return CacheShape(len(probe.layers), kv_heads, head_dim, self.dtype, self.device)

    def _prove(self, directory: Path) -> None:
        """Compare a prompt in two chunks over flat batches with the model's own forward."""
        tokens = [index * 7 % self.vocabulary for index in range(1, 13)]
        cache, cut = self.shape.tokens(len(tokens)), 7
        ours = []
        for start, end in ((0, cut), (cut, len(tokens))):
            count = end - start
            part = PromptPart(cache, start, count, slice(0, count))
            ours.append(self.logits(Step(tokens[start:end], list(range(start, end)), [part], [], list(range(count)))))
        self._model.set_attn_implementation("sdpa")
        theirs = self._model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0]
        self._model.set_attn_implementation(ATTENTION)
        distance = float((torch.cat(ours).float() - theirs.float()).norm() / theirs.float().norm())
        if not distance < PROOF_TOLERANCE[self.dtype]:
            raise ModelError(
                f"{directory}: over flat batches {type(self._model).__name__} gives other logits than by itself "
                f"(off by {distance:.2%}); the embedded engine cannot serve it"
            )


class _Probe(Part):
    """Notes what the layers hand to attention, and attends to nothing."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, out: Tensor, scaling: float, window: int | None
    ) -> None:
        self.layers.append(layer)
        self.shapes.append((tuple(key.shape[1:]), tuple(value.shape[1:])))
        out.zero_()


class FewRowsLinear(nn.Linear):
    """A linear layer that multiplies from the left, `weight @ input.T`, when the batch has few rows.

    For the rows of a decode step the CPU's matrix product is up to a third faster that way around.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        if rows not in FEW_ROWS:
            return super().forward(input)
        output = (self.weight @ input.reshape(rows, -1).T).T.contiguous()
        if self.bias is not None:
            output += self.bias
        return output.view(*input.shape[:-1], -1)
