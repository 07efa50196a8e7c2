"""The policy: a frozen base model, one LoRA adapter, its optimizer.

It trains on packed rows, scores rows under any version, and turns adapter and optimizer into bytes and back, bit for
bit. It knows nothing of runs, brokers or stores.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from broker.adapters import CONFIG_KEY, adapter_config
from broker.errors import AdapterError, ModelError, ObjectCorrupt, RunConflict, RunFailed
from broker.messages import Floats, Ids
from broker.runspec import AlgorithmSection, LoraSection, OptimizerSection
from broker.trajectories import Row
from learner.attention import IMPLEMENTATION
from learner.device_row import DeviceRow
from learner.flops import Shape, peak_flops, row_flops
from learner.logprobs import token_logprobs
from learner.memory import advice, available_bytes, peak_bytes
from learner.objectives.loss import Sums, row_loss
from learner.objectives.normalisation import token_weights
from learner.objectives.tokens import Tokens
from learner.packing import PackedRow, Packing, TokenSequence, pack
from learner.sharding import Shards

log = logging.getLogger(__name__)

STATE_KEY = "optimizer_state"
"""The metadata key of the optimizer's blob that holds what is no tensor."""

MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for each parameter."""

ADVISE_AT = 3
"""The optimizer step after which memory has been seen at its fullest, and advice about it is given."""

PROOF_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest mean difference in logprob between a packed and a plain pass: far above rounding, far below a wrong mask."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one step did. Means are over the trained tokens."""

    loss: float
    grad_norm: float
    """Before clipping."""
    ratio_mean: float
    clip_low_fraction: float
    clip_high_fraction: float
    k1: float
    k3: float
    """Two estimates of KL(behaviour || current), in nats."""
    entropy: float
    """In nats, of the distribution that is sampled from (after temperature)."""
    lr: float
    stepped: bool
    """False when no sequence had an advantage: the weights are as they were."""
    trained_tokens: int
    computed_tokens: int
    packed_fill: float
    seconds: dict[str, float]
    """pack, forward, backward, optimizer"""
    kl: float = 0.0
    """The estimate of KL(current || reference) that the loss uses, in nats; 0 without one."""
    mfu: float = 0.0
    """Model FLOPs over what the device could have done in the passes' time; 0 when nothing is stepped."""
    peak_memory: int = 0
    """The most bytes that were in use so far."""


class Policy:
    """One base model and the adapter that is trained on it.

    `model_name` is written into the adapter's configuration; it is the name that other machines know, not a path.
    `temperature` divides the logits everywhere, as in the engine. `dtype` is the base's; the adapter is always
    float32. `seed` seeds torch, and with it the adapter's first weights. `teacher_dir` is the model that the objective
    "distillation" learns from. With `shards` the policy is one of several processes on a node that compute together;
    all make the same calls, in the same order.

    Raises ModelError when a model cannot be loaded, lacks a target module, has other tokens than its teacher, or
    computes in a way that packed rows do not reproduce.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        model_name: str,
        lora: LoraSection,
        optimizer: OptimizerSection,
        temperature: float,
        dtype: str = "auto",
        seed: int = 0,
        threads: int | None = None,
        teacher_dir: Path | None = None,
        shards: Shards | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._shards = shards
        here = "cuda" if torch.cuda.is_available() else "cpu"
        self.device = torch.device(here) if shards is None else shards.device
        self.dtype = _dtype(dtype, self.device)
        self.temperature = temperature
        self.step = 0
        """Optimizer steps made."""
        self._settings = optimizer
        self._model_name = model_name
        base = _load_base(model_dir, self.dtype).to(self.device)
        self._window = _sliding_window(base, model_dir)
        targets = _check_targets(base, lora.targets)
        torch.manual_seed(seed)
        self._peft: PeftModel = get_peft_model(
            base,
            LoraConfig(
                task_type="CAUSAL_LM",
                r=lora.rank,
                lora_alpha=lora.alpha,
                target_modules=targets,
                lora_dropout=0.0,
                bias="none",
            ),
        )
        # Dropout in the base (GPT-2 has some) would make the current policy another one than the engine's.
        self._peft.eval()
        self._causal: PreTrainedModel = self._peft.base_model.model
        self._decoder: nn.Module = self._causal.get_decoder()
        self._head: nn.Linear = self._causal.get_output_embeddings()
        self._teacher = self._load_teacher(teacher_dir) if teacher_dir is not None else None
        self._weights: dict[str, nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in self._peft.named_parameters()
            if parameter.requires_grad
        }
        self._shape = Shape.of(self._decoder, self._head)
        if optimizer.gradient_checkpointing:
            _checkpoint_layers(self._causal)
        if shards is not None:
            shards.spread(_layers(self._decoder, model_dir), list(self._weights.values()))
        self._optimizer = torch.optim.AdamW(
            self._weights.values(),
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
        )
        self._prove_packing(model_dir)

    @property
    def dtype_name(self) -> Literal["float32", "bfloat16"]:
        """The base's type, as the configuration writes it."""
        return "float32" if self.dtype == torch.float32 else "bfloat16"

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        warmup = self._settings.warmup_steps
        return self._settings.lr * min(1.0, (self.step + 1) / warmup) if warmup else self._settings.lr

    # ------------------------------------------------------------------------------------------------------ training

    def train_step(
        self,
        sequences: Sequence[TokenSequence],
        *,
        token_budget: int,
        algorithm: AlgorithmSection,
        progress: Callable[[str], None] = lambda label: None,
    ) -> StepStats:
        """One optimizer step on `sequences`, packed into rows of at most `token_budget` tokens.

        The gradient is that of the whole step's loss, however it is packed. When all advantages are zero nothing is
        stepped; the statistics are computed all the same. `progress` is called with "after_backward" and
        "after_optimizer".

        Raises RunFailed when the gradient is not finite; the weights are then as they were before the step.
        """
        began = self._clock()
        packing = self._pack(weighed(sequences, algorithm), token_budget)
        seconds = {"pack": self._clock() - began, "forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        signal = packing.trained_tokens > 0 and (
            not algorithm.needs_signal or any(sequence.advantage != 0.0 for sequence in sequences)
        )
        loss = torch.zeros((), device=self.device)
        entropy = torch.zeros((), device=self.device)
        sums = Sums.none(self.device)
        self._optimizer.zero_grad(set_to_none=True)
        rows = packing.rows if self._shards is None else self._shards.own(packing.rows)
        # A process without a row of its own computes along with the others, for nothing.
        for row, counts in zip(
            self._prepared([packing.rows[0] if row is None else row for row in rows]),
            [row is not None for row in rows],
            strict=True,
        ):
            began = self._clock()
            with self._out_of_memory():
                reference = self._reference(row) if algorithm.kl_coef else None
            with torch.set_grad_enabled(signal), self._out_of_memory():
                logprobs, row_entropy = self._forward(row)
                part, row_sums = row_loss(self._tokens(row, logprobs), row.weight, algorithm, reference=reference)
                part = part if counts else 0.0 * part
            seconds["forward"] += self._clock() - began
            if signal:
                began = self._clock()
                with self._out_of_memory():
                    part.backward()  # type: ignore[no-untyped-call]
                seconds["backward"] += self._clock() - began
            if counts:
                loss += part.detach()
                entropy += row_entropy.sum()
                sums += row_sums
        if self._shards is not None:
            sums = self._add_up(self._shards, loss, entropy, sums)
        progress("after_backward")
        began = self._clock()
        lr, grad_norm = self.lr, 0.0
        if signal:
            grad_norm = self._step(lr)
        seconds["optimizer"] = self._clock() - began
        progress("after_optimizer")

        if self.step == ADVISE_AT and (problem := self.advice()):
            log.warning("%s", problem)

        def mean(total: Tensor) -> float:
            return total.item() / max(1, packing.trained_tokens)

        return StepStats(
            loss=loss.item(),
            grad_norm=grad_norm,
            ratio_mean=mean(sums.ratio),
            clip_low_fraction=mean(sums.clipped_low),
            clip_high_fraction=mean(sums.clipped_high),
            k1=mean(sums.k1),
            k3=mean(sums.k3),
            kl=mean(sums.kl),
            entropy=mean(entropy),
            lr=lr,
            stepped=signal,
            trained_tokens=packing.trained_tokens,
            computed_tokens=packing.computed_tokens,
            packed_fill=packing.fill,
            mfu=self._mfu(packing, seconds) if signal else 0.0,
            peak_memory=peak_bytes(self.device),
            seconds=seconds,
        )

    def _step(self, lr: float) -> float:
        """Clip, step, forget the gradient. Returns its norm before clipping."""
        norm = nn.utils.clip_grad_norm_(list(self._weights.values()), self._settings.max_grad_norm).item()
        if not np.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise RunFailed(
                f"step {self.step}: the gradient's norm is {norm}. Lower optimizer.lr, or use run.dtype float32; "
                "the last committed step is intact"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return norm

    def _add_up(self, shards: Shards, loss: Tensor, entropy: Tensor, sums: Sums) -> Sums:
        """Make gradient, loss and sums those of all processes' rows. Returns the sums."""
        own = [getattr(sums, field.name).to(torch.float32) for field in fields(sums)]
        gradients = [parameter.grad for parameter in self._weights.values() if parameter.grad is not None]
        shards.add_up([*gradients, loss, entropy, *own])
        return Sums(*own)

    def _mfu(self, packing: Packing, seconds: dict[str, float]) -> float:
        flops = sum(row_flops(self._shape, row) for row in packing.rows)
        flops /= self._shards.size if self._shards is not None else 1
        spent = max(1e-9, seconds["forward"] + seconds["backward"])
        return flops / spent / peak_flops(self.device, self.dtype)

    def advice(self) -> str | None:
        """What about memory a person should change, after some steps; None when all is well."""
        return advice(
            checkpointing=self._settings.gradient_checkpointing,
            peak=peak_bytes(self.device),
            available=available_bytes(self.device),
        )

    @contextmanager
    def _out_of_memory(self) -> Iterator[None]:
        """Say what to do about it."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise RunFailed(
                f"step {self.step}: the device has too little memory for rows of {self._settings.token_budget} tokens. "
                "Lower optimizer.token_budget, or set optimizer.gradient_checkpointing = true; the last committed step "
                f"is intact ({error})"
            ) from error

    def _prepared(self, rows: Sequence[PackedRow]) -> Iterator[DeviceRow]:
        """Rows on the device, each made ready while the one before is computed."""
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as ahead:
            waiting = deque(ahead.submit(self._prepare, row) for row in rows[:1])
            for following in [*rows[1:], None]:
                row = waiting.popleft().result() if waiting else None
                if following is not None:
                    waiting.append(ahead.submit(self._prepare, following))
                if row is not None:
                    yield row

    def _pack(self, sequences: Sequence[TokenSequence], token_budget: int) -> Packing:
        packing = pack(sequences, token_budget)
        longest = max((int(row.position_ids.max()) + 1 for row in packing.rows), default=0)
        if self._window is not None and longest > self._window:
            raise ModelError(
                f"a sequence of {longest} tokens is longer than the model's sliding window of {self._window}, which "
                "packed rows do not follow. Lower sampling.max_new_tokens"
            )
        return packing

    def _prepare(self, row: PackedRow) -> DeviceRow:
        return DeviceRow.of(row, self.device, self.dtype)

    def _forward(self, row: DeviceRow) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies of a row's trained tokens, float32 [m] each."""
        return self._logprobs(row, self._decoder, self._head)

    def _logprobs(self, row: DeviceRow, decoder: nn.Module, head: nn.Linear) -> tuple[Tensor, Tensor]:
        hidden: Tensor = decoder(
            input_ids=row.token_ids[None], position_ids=row.position_ids[None], use_cache=False, row=row.attention
        ).last_hidden_state
        return token_logprobs(hidden[0].index_select(0, row.predictor), head, row.target, self.temperature)

    def _tokens(self, row: DeviceRow, logprobs: Tensor) -> Tokens:
        """A row's trained tokens, as objectives take them."""
        return Tokens(
            logprobs=logprobs,
            behaviour=row.behaviour,
            advantages=row.advantage,
            staleness=row.staleness,
            sequence=row.sequence,
            teacher=self._teacher_logprobs(row),
        )

    def _reference(self, row: DeviceRow) -> Tensor:
        """Logprobs of a row's trained tokens under the base model: the adapter is switched off, nothing is copied."""
        with torch.no_grad(), self._peft.disable_adapter():
            return self._forward(row)[0]

    def _teacher_logprobs(self, row: DeviceRow) -> Tensor | None:
        if self._teacher is None:
            return None
        with torch.no_grad():
            return self._logprobs(row, self._teacher.get_decoder(), self._teacher.get_output_embeddings())[0]

    def _load_teacher(self, directory: Path) -> PreTrainedModel:
        teacher = _load_base(directory, self.dtype).to(self.device).eval().requires_grad_(False)
        ours, theirs = self._head.weight.shape[0], teacher.get_output_embeddings().weight.shape[0]
        if ours != theirs:
            raise ModelError(
                f"algorithm.teacher: {directory} has {theirs} tokens, the model {ours}. Distillation compares token by "
                "token: choose a teacher with the same tokenizer"
            )
        return teacher

    def _clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    # ------------------------------------------------------------------------------------------------------- scoring

    def score(self, rows: Sequence[Row], adapter: bytes | Literal["current"] | None = "current") -> list[Floats]:
        """Logprobs of each row's trained tokens, float32 [trained tokens], under the given weights.

        `adapter` is a version's blob, None for the base model, or "current". The current weights are not touched.
        Raises AdapterError when the blob does not fit this model.
        """
        sequences = [TokenSequence(row.ids, row.behaviour, row.trained, advantage=0.0, group="score") for row in rows]
        scores = [np.zeros(len(row), dtype=np.float32) for row in rows]
        with torch.no_grad(), self._under(adapter):
            packed_rows = self._pack(sequences, self._settings.token_budget).rows
            for packed, prepared in zip(packed_rows, self._prepared(packed_rows), strict=True):
                logprobs = self._forward(prepared)[0].cpu().numpy()
                for index in np.unique(packed.sequence):
                    own = packed.sequence == index
                    scores[index][packed.offset[own]] = logprobs[own]
        return [score[row.trained] for score, row in zip(scores, rows, strict=True)]

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        return int(self._head.weight.shape[0])

    def next_logprobs(self, prompts: Sequence[Ids], adapter: bytes | None) -> npt.NDArray[np.float32]:
        """Logprobs of every token that may follow each prompt, float32 [prompts, vocabulary].

        `adapter` is a version's blob, None for the base model. Raises AdapterError when the blob does not fit.
        """
        found = []
        with torch.no_grad(), self._under(adapter):
            for prompt in prompts:
                tokens = torch.tensor(prompt, device=self.device, dtype=torch.int64)
                logits = self._causal(input_ids=tokens[None], use_cache=False).logits[0, -1].float()
                found.append((logits / self.temperature).log_softmax(-1).cpu().numpy())
        return np.stack(found)

    @contextmanager
    def _under(self, adapter: bytes | Literal["current"] | None) -> Iterator[None]:
        """Compute under other weights. The current tensors are set aside, not copied, and put back as they were."""
        if adapter == "current":
            yield
            return
        if adapter is None:
            with self._peft.disable_adapter():
                yield
            return
        other = self._read_adapter(adapter)
        current = {name: parameter.data for name, parameter in self._weights.items()}
        try:
            for name, parameter in self._weights.items():
                parameter.data = other[name].to(self.device)
            yield
        finally:
            for name, parameter in self._weights.items():
                parameter.data = current[name]

    def _prove_packing(self, model_dir: Path) -> None:
        """Raise ModelError unless two packed replies get the logprobs that the model itself gives them one by one.

        Catches what would else train silently wrong: a model that ignores our attention, transforms its logits after
        the head, or carries state from token to token.
        """
        # Not the first ids: those are control tokens, whose logprobs bfloat16 rounds by more than a wrong mask changes.
        drawn = np.random.default_rng(0).integers(self._head.weight.shape[0], size=10).astype(np.int32)
        prompt, replies = drawn[:4], (drawn[4:7], drawn[7:])
        ids = [np.concatenate([prompt, reply]) for reply in replies]
        mask = np.arange(7) >= 4
        rows = [Row.of(each, np.zeros(7), mask, np.where(mask, 0, -1)) for each in ids]
        worst = 0.0
        with torch.no_grad():
            for each, scored in zip(ids, self.score(rows), strict=True):
                tokens = torch.from_numpy(each).to(self.device, torch.int64)
                logits = self._causal(input_ids=tokens[None], use_cache=False).logits[0].float() / self.temperature
                plain = logits.log_softmax(-1)[3:-1].gather(1, tokens[4:, None])[:, 0].cpu().numpy()
                worst = max(worst, float(np.abs(plain - scored).mean()))
        if not worst <= PROOF_TOLERANCE[self.dtype]:
            raise ModelError(
                f"{model_dir} ({type(self._causal).__name__}) cannot be trained on packed rows: its own logprobs "
                f"differ from ours by {worst:.2g}. Its attention does not go through transformers' attention "
                "interface, or it transforms its logits after the head; use another model"
            )

    # ------------------------------------------------------------------------------------------------ state as bytes

    def adapter_bytes(self) -> bytes:
        """The adapter as one safetensors blob (see `broker.adapters`). The same weights give the same bytes."""
        config = self._peft.peft_config["default"].to_dict()
        config |= {"base_model_name_or_path": self._model_name, "inference_mode": True}
        plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self._weights.items()}
        return _save(tensors, {CONFIG_KEY: json.dumps(plain, indent=2, sort_keys=True)})

    def random_adapter_bytes(self, scale: float, seed: int) -> bytes:
        """An adapter in this one's shape: B is drawn with standard deviation `scale`, A so that A x is of x's size.

        The weights and torch's random state stay as they are.
        """
        generator = torch.Generator().manual_seed(seed)
        current = {name: parameter.data for name, parameter in self._weights.items()}
        try:
            for name, parameter in self._weights.items():
                size = parameter.shape[-1] ** -0.5 if "lora_A" in name else scale
                parameter.data = torch.randn(parameter.shape, generator=generator) * size
            return self.adapter_bytes()
        finally:
            for name, parameter in self._weights.items():
                parameter.data = current[name]

    def load_adapter_bytes(self, data: bytes) -> None:
        """Make a blob's weights the current ones, bit for bit. Raises AdapterError when they do not fit."""
        tensors = self._read_adapter(data)
        with torch.no_grad():
            for name, parameter in self._weights.items():
                parameter.copy_(tensors[name])

    def _read_adapter(self, data: bytes) -> dict[str, Tensor]:
        config = adapter_config(data)
        ours = self._peft.peft_config["default"]
        if (config.get("r"), config.get("lora_alpha")) != (ours.r, ours.lora_alpha):
            raise AdapterError(
                f"expected an adapter of rank {ours.r} and alpha {ours.lora_alpha}, got rank {config.get('r')} and "
                f"alpha {config.get('lora_alpha')}"
            )
        tensors: dict[str, Tensor] = safetensors.torch.load(data)
        if problem := _misfit(tensors, {name: parameter.shape for name, parameter in self._weights.items()}):
            raise AdapterError(f"the adapter does not fit the model: {problem}")
        return tensors

    def optimizer_bytes(self) -> bytes:
        """AdamW's moments, the place in the schedule and torch's random state, as one safetensors blob."""
        tensors = {
            f"{name}.{moment}": self._optimizer.state[parameter][moment].cpu().contiguous()
            for name, parameter in self._weights.items()
            if parameter in self._optimizer.state
            for moment in MOMENTS
        }
        tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            tensors["random.cuda"] = torch.cuda.get_rng_state()
        return _save(tensors, {STATE_KEY: json.dumps({"step": self.step})})

    def load_optimizer_bytes(self, data: bytes) -> None:
        """Go on where `optimizer_bytes` stood, bit for bit.

        Raises ObjectCorrupt when `data` is no such blob, and RunConflict when it belongs to another adapter shape.
        """
        try:
            tensors: dict[str, Tensor] = safetensors.torch.load(data)
            length = int.from_bytes(data[:8], "little")
            state: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][STATE_KEY])
            step = int(state["step"])
            random = {name: tensors.pop(f"random.{name}") for name in ("cpu", "cuda") if f"random.{name}" in tensors}
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ObjectCorrupt(f"the optimizer's state cannot be read: {error!r}") from error
        known = {name for name in self._weights if f"{name}.step" in tensors} if tensors else set()
        shapes = {
            f"{name}.{moment}": torch.Size([]) if moment == "step" else self._weights[name].shape
            for name in known
            for moment in MOMENTS
        }
        if problem := _misfit(tensors, shapes):
            raise RunConflict(f"the optimizer's state does not fit the adapter: {problem}. Start with --restart")
        self._optimizer.state.clear()
        for name in self._weights:
            if name in known:
                self._optimizer.state[self._weights[name]] = {
                    moment: tensors[f"{name}.{moment}"].clone().to("cpu" if moment == "step" else self.device)
                    for moment in MOMENTS
                }
        self.step = step
        torch.set_rng_state(random["cpu"])
        if self.device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"])


def weighed(sequences: Sequence[TokenSequence], algorithm: AlgorithmSection) -> list[TokenSequence]:
    """The sequences of a whole step, each with what one of its tokens counts in the step's loss."""
    weights = token_weights(
        [int(sequence.trained.sum()) for sequence in sequences],
        [sequence.episode or f"#{index}" for index, sequence in enumerate(sequences)],
        algorithm.normalisation or "token",
        algorithm.normalisation_length,
    )
    return [
        replace(sequence, weight=sequence.weight * float(weight))
        for sequence, weight in zip(sequences, weights, strict=True)
    ]


def _dtype(name: str, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU and float32 on a CPU, unless the configuration says which."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _load_base(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation=IMPLEMENTATION, local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelError(f"{model_dir} cannot be loaded as a causal language model: {error}") from error


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Keep only each layer's input, and compute the layer again for the backward pass.

    `transformers` does so for layers in training mode; only the layers themselves are put in it, so that no dropout is.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _layers(decoder: nn.Module, model_dir: Path) -> nn.ModuleList:
    """The decoder's layers. Raises ModelError when it keeps them under no known name."""
    for name in ("layers", "h", "blocks"):
        if isinstance(found := getattr(decoder, name, None), nn.ModuleList):
            return found
    raise ModelError(f"{model_dir}: the layers of {type(decoder).__name__} are not known, so they cannot be sharded")


def _sliding_window(base: PreTrainedModel, model_dir: Path) -> int | None:
    """The longest sequence that no sliding window touches. Raises ModelError for layers that carry a state."""
    config = base.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise ModelError(
            f"{model_dir} has layers of the kind {sorted(strange)}; packed rows need attention layers only"
        )
    window: int | None = getattr(config, "sliding_window", None)
    return window if not kinds or "sliding_attention" in kinds else None


def _check_targets(base: PreTrainedModel, targets: Sequence[str]) -> str | list[str]:
    """What PEFT is to adapt. Raises ModelError for a name that no linear layer has, and for the head."""
    if not targets:
        return "all-linear"
    head = base.get_output_embeddings()
    linear = [
        name
        for name, module in base.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D") and module is not head
    ]
    if missing := [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in linear)]:
        raise ModelError(
            f"lora.targets: {', '.join(missing)} is no linear layer of the model (the head cannot be adapted). "
            f"Expected some of {', '.join(sorted({name.rsplit('.', 1)[-1] for name in linear}))}, or an empty list "
            "for all of them"
        )
    return list(targets)


def _misfit(tensors: dict[str, Tensor], shapes: dict[str, torch.Size]) -> str | None:
    """How `tensors` differ from the expected names and shapes; None when they fit."""
    if surplus := sorted(tensors.keys() - shapes.keys()):
        return f"unexpected tensor {surplus[0]} ({len(surplus)} such)"
    if missing := sorted(shapes.keys() - tensors.keys()):
        return f"tensor {missing[0]} is missing ({len(missing)} such)"
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            return f"{name} has the shape {list(tensors[name].shape)}, expected {list(shape)}"
    return None


def _save(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    data: bytes = safetensors.torch.save(tensors, metadata=metadata)
    return data
