"""The policy against plain transformers and PEFT: same numbers, same gradients, same bytes."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from peft import PeftModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from broker.adapters import adapter_config, write_adapter_directory
from broker.errors import AdapterError, ModelError, ObjectCorrupt, RunConflict, RunFailed
from broker.runspec import OBJECTIVES, AlgorithmSection, LoraSection, OptimizerSection
from broker.trajectories import Row
from learner.attention import TILE, block_mask
from learner.flops import row_flops
from learner.memory import advice
from learner.model import Policy
from learner.packing import TokenSequence, pack, tiles
from learner.truth import compare, tolerance_of, verdict
from tests.tiny import build_tiny_model

TEMPERATURE = 0.8
ALGORITHM = AlgorithmSection(objective="dapo")
OBJECTIVE_NAMES = list(OBJECTIVES)


def algorithm_of(objective: str, **changes: Any) -> AlgorithmSection:
    teacher = {"teacher": "t"} if objective == "distillation" else {}
    return AlgorithmSection(objective=objective, **teacher, **changes)  # type: ignore[arg-type]


def make(model: Path, **changes: Any) -> Policy:
    settings: dict[str, Any] = {
        "model_name": "tiny",
        "lora": LoraSection(rank=4, alpha=8),
        "optimizer": OptimizerSection(lr=1e-2, max_grad_norm=1e6, weight_decay=0.01),
        "temperature": TEMPERATURE,
    }
    return Policy(model, **(settings | changes))


def sequences(seed: int = 0, groups: int = 3, size: int = 4, reply: int = 40) -> list[TokenSequence]:
    """Groups with shared prompts and replies of unequal length, some with an environment turn in their midst."""
    random = np.random.default_rng(seed)
    made = []
    for group in range(groups):
        prompt = random.integers(3, 259, random.integers(5, 60))
        for member in range(size):
            tokens = random.integers(3, 259, random.integers(1, reply + 1))
            ids = np.concatenate([prompt, tokens]).astype(np.int32)
            trained = np.arange(len(ids)) >= len(prompt)
            if member == 0:
                trained[len(prompt) + 3 : len(prompt) + 6] = False
            behaviour = np.where(trained, random.normal(-4, 1, len(ids)), 0).astype(np.float32)
            made.append(TokenSequence(ids, behaviour, trained, float(random.normal()), f"g{group}"))
    return made


def step(
    policy: Policy, batch: list[TokenSequence], budget: int = 512, algorithm: AlgorithmSection = ALGORITHM
) -> dict[str, torch.Tensor]:
    """Make a training step; return the gradient it used."""
    gradients: dict[str, torch.Tensor] = {}

    def keep(label: str) -> None:
        if label == "after_backward":
            gradients.update({name: p.grad.clone() for name, p in policy._weights.items() if p.grad is not None})

    policy.train_step(batch, token_budget=budget, algorithm=algorithm, progress=keep)
    return gradients


def trained_policy(model: Path, **changes: Any) -> Policy:
    policy = make(model, **changes)
    for seed in (100, 101):
        step(policy, sequences(seed))
    return policy


def plain_model(model: Path, adapter: bytes, directory: Path) -> PeftModel:
    write_adapter_directory(adapter, directory)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, str(directory), is_trainable=True).eval()


def plain_logprobs(model: Any, ids: np.ndarray[Any, Any], trained: np.ndarray[Any, Any]) -> torch.Tensor:
    tokens = torch.from_numpy(ids.astype(np.int64))
    logprobs = (model(input_ids=tokens[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    chosen: torch.Tensor = logprobs[:-1].gather(1, tokens[1:, None])[:, 0]
    return chosen[torch.from_numpy(trained[1:])]


def rows_of(batch: list[TokenSequence]) -> list[Row]:
    return [Row.of(s.token_ids, s.behaviour, s.trained, np.where(s.trained, 1, -1)) for s in batch]


def test_a_packed_step_has_the_loss_and_gradient_of_one_sequence_at_a_time(tiny_model: Path, tmp_path: Path) -> None:
    policy = trained_policy(tiny_model)
    batch = sequences(seed=1, size=8, reply=90)
    packing = pack(batch, 512)
    assert packing.saved_tokens > 100
    assert any(len(tile.keys) > len(tile.queries) for row in packing.rows for tile in tiles(row, TILE))
    model = plain_model(tiny_model, policy.adapter_bytes(), tmp_path).double()
    count = sum(int(s.trained.sum()) for s in batch)
    loss = torch.zeros((), dtype=torch.float64)
    for s in batch:
        ratio = (plain_logprobs(model, s.token_ids, s.trained) - torch.from_numpy(s.behaviour[s.trained])).exp()
        assert ALGORITHM.clip_low is not None and ALGORITHM.clip_high is not None
        clipped = ratio.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
        loss = loss - torch.minimum(ratio * s.advantage, clipped * s.advantage).sum() / count
    loss.backward()  # type: ignore[no-untyped-call]
    expected = {n.replace(".default.", "."): p.grad for n, p in model.named_parameters() if p.requires_grad}

    gradients = step(policy, batch)
    ours = trained_policy(tiny_model).train_step(batch, token_budget=512, algorithm=ALGORITHM).loss
    assert ours == pytest.approx(loss.item(), rel=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert expected[name].abs().max() > 0
        torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-3, atol=1e-6)


def forked_turns(depth: int = 3) -> list[TokenSequence]:
    """An agent's conversation that forks after every turn: a prefix tree `depth` levels below the prompt."""
    random = np.random.default_rng(11)

    def grow(history: list[int], trained: list[bool], level: int) -> list[tuple[list[int], list[bool]]]:
        said = random.integers(3, 259, int(random.integers(6, 40))).tolist()
        reply = random.integers(3, 259, int(random.integers(4, 300 if level == 2 else 30))).tolist()
        ids, mask = [*history, *said, *reply], [*trained, *[False] * len(said), *[True] * len(reply)]
        if level == depth:
            return [(ids, mask)]
        return [found for _ in range(2) for found in grow(ids, mask, level + 1)]

    made = []
    for ids, mask in [*grow([], [], 0), *grow([], [], 0)]:
        trained = np.asarray(mask)
        behaviour = np.where(trained, random.normal(-4, 1, len(ids)), 0).astype(np.float32)
        made.append(TokenSequence(np.asarray(ids, np.int32), behaviour, trained, float(random.normal()), "agent"))
    return made


@pytest.mark.parametrize("budget", [100_000, 700])
def test_deep_prefix_trees_give_the_numbers_and_gradient_of_one_sequence_at_a_time(taught: Policy, budget: int) -> None:
    batch = forked_turns()
    packing = pack(batch, budget)
    assert packing.saved_tokens > packing.computed_tokens / 4
    assert max(len(segment) for row in packing.rows for segment in row.segments if segment.parent is not None) > TILE
    results = []
    for given, tokens in (([replace(s, group=f"{i}") for i, s in enumerate(batch)], 64), (batch, budget)):
        taught.load_adapter_bytes(TRAINED[0])
        results.append((taught.score(rows_of(given)), step(taught, given, budget=tokens)))
    for alone, packed in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(packed, alone, atol=2e-5)
    for name, gradient in results[0][1].items():
        difference = (results[1][1][name] - gradient).norm() / gradient.norm()
        assert difference < 1e-4, (name, difference)


def test_flex_attention_sees_what_the_tiles_see(taught: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards only: FlexAttention has no backward pass on a CPU."""
    taught.load_adapter_bytes(TRAINED[0])
    batch = rows_of(forked_turns())
    tiles_say = taught.score(batch)
    monkeypatch.setattr("learner.device_row.row_attention", lambda row, device, dtype: block_mask(row, device))
    for flex, tile in zip(taught.score(batch), tiles_say, strict=True):
        np.testing.assert_allclose(flex, tile, atol=2e-5)


class LargestLogits(TorchDispatchMode):
    """Watches how many numbers the largest new tensor over the vocabulary has."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == self.vocabulary:
                self.numbers = max(self.numbers, value.numel())
        return result


def test_no_logits_are_held_for_a_whole_row(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of many trained tokens makes no tensor of their number times the vocabulary, forwards or backwards."""
    policy, batch = make(tiny_model), sequences(seed=12, groups=8, size=4, reply=90)
    logits = 259 * sum(int(s.trained.sum()) for s in batch)
    largest = []
    for at_once in (1 << 24, 40 * 259):
        monkeypatch.setattr("learner.logprobs.LOGITS_AT_ONCE", at_once)
        with LargestLogits(259) as watched:
            policy.train_step(batch, token_budget=100_000, algorithm=ALGORITHM)
        largest.append(watched.numbers)
    assert largest == [logits, 40 * 259]


TRAINED: list[bytes] = []


@pytest.fixture(scope="module")
def taught(tiny_model: Path) -> Policy:
    """A trained policy with a teacher; its adapter is kept in TRAINED."""
    policy = trained_policy(tiny_model, teacher_dir=tiny_model)
    TRAINED[:] = [policy.adapter_bytes()]
    return policy


@pytest.mark.parametrize("normalisation", ["token", "sequence", "constant"])
@pytest.mark.parametrize("objective", OBJECTIVE_NAMES)
def test_the_gradient_does_not_depend_on_how_a_step_is_packed(
    taught: Policy, objective: str, normalisation: str
) -> None:
    """However many rows, shared prompts or none: for every objective and normalisation, with the KL."""
    algorithm = algorithm_of(objective, normalisation=normalisation, normalisation_length=50, kl_coef=0.1)
    batch = [replace(s, staleness=np.arange(len(s.token_ids)) % 4) for s in sequences(seed=2, groups=2)]
    alone = [replace(s, group=f"alone{index}") for index, s in enumerate(batch)]
    results = []
    for given, budget in ((batch, 100_000), (batch, 64), (batch, 150), (alone, 64)):
        taught.load_adapter_bytes(TRAINED[0])
        results.append(step(taught, given, budget=budget, algorithm=algorithm))
    for gradients in results[1:]:
        for name, gradient in gradients.items():
            difference = (gradient - results[0][name]).norm() / results[0][name].norm()
            assert difference < 1e-4, (name, difference)


def test_the_reference_of_the_kl_is_the_base_with_the_adapter_switched_off(tiny_model: Path) -> None:
    policy, batch = trained_policy(tiny_model), sequences(seed=3)
    current, base = policy.score(rows_of(batch)), policy.score(rows_of(batch), None)
    behaviour = [np.where(s.trained, 0, 0).astype(np.float32) for s in batch]
    for values, s, score in zip(behaviour, batch, current, strict=True):
        values[s.trained] = score
    given = [replace(s, behaviour=values, advantage=1.0) for s, values in zip(batch, behaviour, strict=True)]
    d = np.concatenate(current) - np.concatenate(base)
    assert np.abs(d).max() > 0.1
    algorithm = AlgorithmSection(objective="importance_sampling", kl_coef=0.5)
    stats = policy.train_step(given, token_budget=200, algorithm=algorithm)
    assert stats.kl == pytest.approx(float((np.exp(-d) - 1 + d).mean()), rel=1e-3)
    assert stats.loss == pytest.approx(-1 + 0.5 * stats.kl, rel=1e-4)


def test_distillation_pulls_the_policy_towards_its_teacher(tiny_model: Path, tmp_path: Path) -> None:
    teacher = build_tiny_model(tmp_path / "teacher", seed=1)
    policy = make(tiny_model, teacher_dir=teacher, optimizer=OptimizerSection(lr=1e-3))
    batch = [replace(s, advantage=0.0) for s in sequences(seed=4, groups=2)]
    own = [replace(s, behaviour=s.behaviour.copy()) for s in batch]
    for s, score in zip(own, policy.score(rows_of(own)), strict=True):
        s.behaviour[s.trained] = score
    stats = policy.train_step(own, token_budget=200, algorithm=algorithm_of("distillation"))
    assert stats.stepped
    expected = make(teacher).score(rows_of(own))
    difference = np.concatenate(policy.score(rows_of(own))) - np.concatenate([s.behaviour[s.trained] for s in own])
    wanted = np.concatenate(expected) - np.concatenate([s.behaviour[s.trained] for s in own])
    assert (difference * wanted).sum() > 0, "what the teacher likes better became likelier"


def test_a_teacher_with_other_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="64 tokens, the model 259"):
        make(tiny_model, teacher_dir=save(tmp_path, "Qwen2", **SMALL))


def test_gradient_checkpointing_computes_layers_again_and_changes_nothing(tiny_model: Path) -> None:
    plain = trained_policy(tiny_model)
    settings = OptimizerSection(lr=1e-2, max_grad_norm=1e6, weight_decay=0.01, gradient_checkpointing=True)
    frugal = make(tiny_model, optimizer=settings)
    frugal.load_adapter_bytes(plain.adapter_bytes())
    calls = []
    for policy in (plain, frugal):
        count = [0]
        for layer in policy._decoder.layers:  # type: ignore[union-attr]
            layer.mlp.register_forward_pre_hook(lambda *_, count=count: count.__setitem__(0, count[0] + 1))
        calls.append(count)
    batch = sequences(seed=2, groups=2)
    expected, found = step(plain, batch, budget=100_000), step(frugal, batch, budget=100_000)
    assert (calls[0][0], calls[1][0]) == (2, 4)
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name])


def test_the_next_row_is_made_ready_while_one_is_computed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each forward pass waits until the preparation of the next row has begun; none does in vain."""
    policy = make(tiny_model)
    batch = sequences(seed=3, groups=4)
    rows = len(pack(batch, 150).rows)
    assert rows > 2
    begun: list[threading.Event] = [threading.Event() for _ in range(rows)]
    prepare, forward = policy._prepare, policy._forward
    prepared, computed = iter(begun), iter([*begun[1:], None])

    def watched_prepare(row: Any) -> Any:
        next(prepared).set()
        return prepare(row)

    def watched_forward(row: Any) -> Any:
        following = next(computed)
        assert following is None or following.wait(30)
        return forward(row)

    monkeypatch.setattr(policy, "_prepare", watched_prepare)
    monkeypatch.setattr(policy, "_forward", watched_forward)
    assert policy.train_step(batch, token_budget=150, algorithm=ALGORITHM).stepped


def test_two_policies_with_one_seed_train_to_the_same_bytes(tiny_model: Path) -> None:
    first, second = (trained_policy(tiny_model) for _ in range(2))
    assert first.adapter_bytes() == second.adapter_bytes()
    assert first.optimizer_bytes() == second.optimizer_bytes()


def test_model_flops_are_those_that_torch_counts(tiny_model: Path) -> None:
    """Against torch's own counter, which sees no fused attention, and of the plain one masked pairs too."""
    policy = make(tiny_model)
    batch = sequences(seed=1, groups=1, size=1, reply=20)
    (row,) = pack(batch, 1000).rows
    counted = []
    for kernels in ([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], [SDPBackend.MATH]):
        policy.train_step(batch, token_budget=1000, algorithm=ALGORITHM)  # the device's peak is measured once
        with FlopCounterMode(display=False) as counter, sdpa_kernel(kernels):
            policy.train_step(batch, token_budget=1000, algorithm=ALGORITHM)
        counted.append(counter.get_total_flops())
    linear = row_flops(replace(policy._shape, attention=0), row)
    # The first layer's input needs no gradient.
    assert linear == pytest.approx(counted[0], rel=0.1)
    pairs, all_pairs = np.sum(row.position_ids + 1), len(row) ** 2
    assert (row_flops(policy._shape, row) - linear) * all_pairs / pairs == pytest.approx(
        counted[1] - counted[0], rel=0.1
    )


def test_a_step_tells_what_share_of_the_device_it_used(tiny_model: Path) -> None:
    stats = make(tiny_model).train_step(sequences(), token_budget=1000, algorithm=ALGORITHM)
    assert 0 < stats.mfu < 1
    assert stats.peak_memory > 0


def test_running_out_of_memory_says_what_to_do(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make(tiny_model)

    def fail(row: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(policy, "_forward", fail)
    with pytest.raises(RunFailed, match=r"optimizer\.token_budget"):
        policy.train_step(sequences(), token_budget=1000, algorithm=ALGORITHM)


@pytest.mark.parametrize(
    ("checkpointing", "share", "word"),
    [(False, 0.95, "= true"), (False, 0.5, None), (True, 0.3, "= false"), (True, 0.7, None), (True, 0.95, None)],
)
def test_checkpointing_is_advised_only_when_memory_demands_it(
    checkpointing: bool, share: float, word: str | None
) -> None:
    said = advice(checkpointing=checkpointing, peak=int(share * 1000), available=1000)
    assert (word in said) if said is not None and word is not None else said is word


def test_scores_equal_a_plain_forward_pass(tiny_model: Path, tmp_path: Path) -> None:
    policy = trained_policy(tiny_model)
    adapter = policy.adapter_bytes()
    batch = sequences(seed=3)
    step(policy, sequences(seed=4))
    model = plain_model(tiny_model, adapter, tmp_path / "then")
    now = plain_model(tiny_model, policy.adapter_bytes(), tmp_path / "now")
    with torch.no_grad():
        for s, then_score, now_score in zip(
            batch, policy.score(rows_of(batch), adapter), policy.score(rows_of(batch)), strict=True
        ):
            np.testing.assert_allclose(then_score, plain_logprobs(model, s.token_ids, s.trained), atol=1e-5)
            np.testing.assert_allclose(now_score, plain_logprobs(now, s.token_ids, s.trained), atol=1e-5)
        base = model.unload()
        for s, score in zip(batch, policy.score(rows_of(batch), None), strict=True):
            assert score.dtype == np.float32
            np.testing.assert_allclose(score, plain_logprobs(base, s.token_ids, s.trained), atol=1e-5)


def test_a_base_models_score_is_an_adapterless_policys(tiny_model: Path) -> None:
    fresh, batch = make(tiny_model), rows_of(sequences())
    for current, base in zip(fresh.score(batch), fresh.score(batch, None), strict=True):
        np.testing.assert_allclose(current, base, atol=1e-6)


def test_scoring_leaves_the_weights_and_the_training_as_they_were(tiny_model: Path) -> None:
    scored, undisturbed = trained_policy(tiny_model), trained_policy(tiny_model)
    before = scored.adapter_bytes()
    for adapter in (None, make(tiny_model).adapter_bytes(), "current"):
        scored.score(rows_of(sequences()), adapter)
        assert scored.adapter_bytes() == before
    with pytest.raises(AdapterError):
        scored.score(rows_of(sequences()), b"nonsense")
    step(scored, sequences(seed=5))
    step(undisturbed, sequences(seed=5))
    assert scored.adapter_bytes() == undisturbed.adapter_bytes()
    assert scored.adapter_bytes() != before


def test_adapter_bytes_are_what_peft_saves_and_the_same_each_time(tiny_model: Path, tmp_path: Path) -> None:
    policy = trained_policy(tiny_model)
    data = policy.adapter_bytes()
    assert data == policy.adapter_bytes() == trained_policy(tiny_model).adapter_bytes()
    policy._peft.save_pretrained(str(tmp_path / "peft"))
    saved = safetensors.torch.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    ours = safetensors.torch.load(data)
    assert ours.keys() == saved.keys()
    assert all(torch.equal(ours[name], saved[name]) and ours[name].dtype == torch.float32 for name in ours)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert sorted(config.pop("target_modules")) == adapter_config(data)["target_modules"]
    assert config.pop("base_model_name_or_path") != "tiny"
    assert config.items() <= adapter_config(data).items()
    assert str(tiny_model) not in data.decode("latin-1")
    assert adapter_config(data)["base_model_name_or_path"] == "tiny"


def test_peft_loads_the_adapter_directory_with_the_same_logits(tiny_model: Path, tmp_path: Path) -> None:
    policy = trained_policy(tiny_model)
    data = policy.adapter_bytes()
    model = plain_model(tiny_model, data, tmp_path)
    written = (tmp_path / "adapter_model.safetensors").read_bytes()
    assert hashlib.sha256(written).digest() == hashlib.sha256(data).digest()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, policy._peft(ids).logits, rtol=1e-4, atol=1e-4)


def test_loading_an_adapter_restores_it_bit_for_bit(tiny_model: Path) -> None:
    policy = trained_policy(tiny_model)
    data = policy.adapter_bytes()
    other = make(tiny_model, seed=7)
    assert other.adapter_bytes() != data
    other.load_adapter_bytes(data)
    assert other.adapter_bytes() == data


def test_a_resumed_policy_goes_on_bit_for_bit(tiny_model: Path) -> None:
    settings = {"optimizer": OptimizerSection(lr=1e-2, warmup_steps=5)}
    undisturbed = make(tiny_model, **settings)
    adapter = optimizer = b""
    for seed in range(4):
        if seed == 2:
            adapter, optimizer = undisturbed.adapter_bytes(), undisturbed.optimizer_bytes()
        step(undisturbed, sequences(seed))
    drawn = torch.rand(3)

    resumed = make(tiny_model, seed=99, **settings)
    resumed.load_adapter_bytes(adapter)
    resumed.load_optimizer_bytes(optimizer)
    assert resumed.step == 2
    assert resumed.lr == pytest.approx(1e-2 * 3 / 5)
    assert resumed.optimizer_bytes() == optimizer
    for seed in (2, 3):
        step(resumed, sequences(seed))
    assert resumed.adapter_bytes() == undisturbed.adapter_bytes()
    assert resumed.step == undisturbed.step == 4
    assert torch.equal(torch.rand(3), drawn)


def test_the_optimizer_of_an_untrained_policy_can_be_saved(tiny_model: Path) -> None:
    fresh, trained = make(tiny_model), trained_policy(tiny_model)
    data = fresh.optimizer_bytes()
    trained.load_optimizer_bytes(data)
    assert trained.step == 0
    assert trained.optimizer_bytes() == data


def test_state_that_does_not_fit_is_refused(tiny_model: Path) -> None:
    policy, wider = trained_policy(tiny_model), trained_policy(tiny_model, lora=LoraSection(rank=8, alpha=8))
    fewer = trained_policy(tiny_model, lora=LoraSection(rank=4, alpha=8, targets=["q_proj"]))
    before = policy.adapter_bytes(), policy.optimizer_bytes()
    with pytest.raises(AdapterError, match="rank 4"):
        policy.load_adapter_bytes(wider.adapter_bytes())
    with pytest.raises(AdapterError, match="missing"):
        policy.load_adapter_bytes(fewer.adapter_bytes())
    with pytest.raises(RunConflict, match="shape"):
        policy.load_optimizer_bytes(wider.optimizer_bytes())
    with pytest.raises(RunConflict, match="unexpected"):
        fewer.load_optimizer_bytes(policy.optimizer_bytes())
    for nonsense in (b"", b"nonsense", policy.adapter_bytes()):
        with pytest.raises(ObjectCorrupt):
            policy.load_optimizer_bytes(nonsense)
    assert (policy.adapter_bytes(), policy.optimizer_bytes()) == before


def blob(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


LORA = {"adapter_config": json.dumps({"peft_type": "LORA"})}
TENSOR = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def test_a_small_blob_by_hand_is_an_adapter() -> None:
    assert adapter_config(blob({"__metadata__": LORA, "w": TENSOR}, b"1234")) == {"peft_type": "LORA"}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 20,
        (5).to_bytes(8, "little") + b"{]{]{",
        blob([]),
        blob({"__metadata__": LORA}),
        blob({"__metadata__": 3, "w": TENSOR}, b"1234"),
        blob({"w": TENSOR}, b"1234"),
        blob({"__metadata__": LORA, "w": TENSOR}, b"123"),
        blob({"__metadata__": LORA, "w": TENSOR}, b"12345"),
        blob({"__metadata__": LORA, "w": {"dtype": "F32"}}, b"1234"),
        blob({"__metadata__": LORA, "w": 7}, b"1234"),
        blob({"__metadata__": LORA, "w": TENSOR | {"data_offsets": ["0", 4]}}, b"1234"),
        blob({"__metadata__": {"adapter_config": "{"}, "w": TENSOR}, b"1234"),
        blob({"__metadata__": {"adapter_config": "[]"}, "w": TENSOR}, b"1234"),
        blob({"__metadata__": {"adapter_config": '{"peft_type": "IA3"}'}, "w": TENSOR}, b"1234"),
    ],
)
def test_nonsense_is_no_adapter(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(AdapterError):
        write_adapter_directory(data, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_without_any_advantage_nothing_is_stepped_but_measured(tiny_model: Path) -> None:
    policy = trained_policy(tiny_model)
    before = policy.adapter_bytes(), policy.optimizer_bytes()
    flat = [TokenSequence(s.token_ids, s.behaviour, s.trained, advantage=0.0, group=s.group) for s in sequences(seed=6)]
    stats = policy.train_step(flat, token_budget=256, algorithm=ALGORITHM)
    assert not stats.stepped
    assert stats.grad_norm == 0
    assert stats.entropy > 0
    assert stats.k3 > 0
    assert (policy.adapter_bytes(), policy.optimizer_bytes()) == before
    assert policy.train_step([], token_budget=256, algorithm=ALGORITHM).trained_tokens == 0


def test_on_policy_statistics_say_so(tiny_model: Path) -> None:
    policy = trained_policy(tiny_model)
    batch = []
    for s, score in zip(sequences(), policy.score(rows_of(sequences())), strict=True):
        behaviour = s.behaviour.copy()
        behaviour[s.trained] = score
        batch.append(TokenSequence(s.token_ids, behaviour, s.trained, s.advantage, s.group))
    stats = policy.train_step(batch, token_budget=256, algorithm=ALGORITHM)
    assert stats.stepped
    assert stats.ratio_mean == pytest.approx(1, abs=1e-4)
    assert stats.k1 == pytest.approx(0, abs=1e-4)
    assert stats.k3 == pytest.approx(0, abs=1e-6)
    assert stats.clip_low_fraction == stats.clip_high_fraction == 0
    assert stats.trained_tokens == sum(int(s.trained.sum()) for s in batch)
    assert 0 < stats.packed_fill <= 1
    assert 0 < stats.entropy < math.log(259)
    assert set(stats.seconds) == {"pack", "forward", "backward", "optimizer"}


def test_a_step_raises_the_logprobs_of_what_was_rewarded(tiny_model: Path) -> None:
    policy, pair = make(tiny_model), sequences(groups=1, size=2)
    batch = [
        TokenSequence(s.token_ids, s.behaviour, s.trained, advantage, "g")
        for s, advantage in zip(pair, (1.0, -1.0), strict=True)
    ]
    before = policy.score(rows_of(batch))
    step(policy, batch)
    after = policy.score(rows_of(batch))
    assert after[0].mean() > before[0].mean()
    assert after[1].mean() < before[1].mean()


def test_progress_is_told_before_and_after_the_optimizer(tiny_model: Path) -> None:
    policy, seen = make(tiny_model), []
    policy.train_step(
        sequences(),
        token_budget=256,
        algorithm=ALGORITHM,
        progress=lambda label: seen.append((label, policy.step)),
    )
    assert seen == [("after_backward", 0), ("after_optimizer", 1)]


def test_a_gradient_that_is_not_finite_stops_the_run_with_the_weights_intact(tiny_model: Path) -> None:
    policy = trained_policy(tiny_model)
    before = policy.adapter_bytes(), policy.optimizer_bytes()
    broken = [
        TokenSequence(s.token_ids, s.behaviour, s.trained, advantage=math.nan, group=s.group) for s in sequences()
    ]
    with pytest.raises(RunFailed, match="norm is nan"):
        policy.train_step(broken, token_budget=256, algorithm=ALGORITHM)
    assert (policy.adapter_bytes(), policy.optimizer_bytes()) == before


def test_the_truth_check_sees_a_base_or_a_previous_version_served_as_the_adapter(tiny_model: Path) -> None:
    policy = trained_policy(tiny_model, optimizer=OptimizerSection(lr=1e-3))
    previous = policy.adapter_bytes()
    step(policy, sequences(seed=8))
    rows = rows_of(sequences(seed=9))
    served = [(3, "honest")] * 6 + [(3, "wrong")] * 6
    honest = policy.score(rows)
    for wrong in (policy.score(rows, None), policy.score(rows, previous)):
        report = compare(honest[:6] + wrong[6:], policy.score(rows, policy.adapter_bytes()), served)
        reason = verdict(report, tolerance_of(ALGORITHM, policy.dtype_name), policy.dtype_name)
        assert reason is not None
        assert "replica wrong" in reason
        assert "replica honest" not in reason
    assert verdict(compare(honest, policy.score(rows), served), tolerance_of(ALGORITHM, "float32"), "float32") is None


@pytest.mark.parametrize("targets", [["q_proj", "nowhere"], ["lm_head"], ["proj"]])
def test_a_target_that_does_not_exist_is_refused(tiny_model: Path, targets: list[str]) -> None:
    with pytest.raises(ModelError, match="q_proj"):
        make(tiny_model, lora=LoraSection(targets=targets))


def test_only_the_named_targets_get_an_adapter(tiny_model: Path) -> None:
    policy = make(tiny_model, lora=LoraSection(targets=["q_proj", "self_attn.v_proj"]))
    assert {name.split(".")[-3] for name in policy._weights} == {"q_proj", "v_proj"}


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        make(tmp_path)


SMALL = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 0}


def save(directory: Path, name: str, **config: Any) -> Path:
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    built = model(getattr(transformers, f"{name}Config")(**config))
    for parameter in built.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    built.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Mistral", "Gemma", "Phi3", "Olmo2"])
def test_other_models_are_trained_on_packed_rows_too(name: str, tmp_path: Path) -> None:
    policy = make(save(tmp_path, name, **SMALL))
    ids = [np.array([1, 2, 3, *reply], dtype=np.int32) for reply in ([4, 5, 6], [7, 8], [9, 10, 11, 12])]
    batch = [TokenSequence(i, np.zeros(len(i), np.float32), np.arange(len(i)) >= 3, 1.0, "g") for i in ids]
    assert policy.train_step(batch, token_budget=64, algorithm=ALGORITHM).stepped


def test_gpt2_is_trained_on_packed_rows_too(tmp_path: Path) -> None:
    model = save(tmp_path, "GPT2", vocab_size=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    assert len(make(model)._weights) == 16


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be trained on packed rows"):
        make(save(tmp_path, "Granite", logits_scaling=8.0, **{k: v for k, v in SMALL.items() if k != "head_dim"}))


def test_a_sequence_longer_than_the_sliding_window_is_refused(tmp_path: Path) -> None:
    policy = make(save(tmp_path, "Mistral", sliding_window=16, **SMALL))
    ids = np.arange(20, dtype=np.int32)
    with pytest.raises(ModelError, match="sliding window"):
        policy.score([Row.of(ids, np.zeros(20), ids > 3, np.where(ids > 3, 0, -1))])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU's defaults")
def test_the_base_is_float32_on_a_cpu_and_the_adapter_float32_everywhere(tiny_model: Path) -> None:
    assert make(tiny_model).dtype_name == "float32"
    policy = make(tiny_model, dtype="bfloat16")
    assert policy.dtype_name == "bfloat16"
    assert all(parameter.dtype == torch.float32 for parameter in policy._weights.values())
    stats = policy.train_step(sequences(), token_budget=256, algorithm=ALGORITHM)
    assert stats.stepped
    assert math.isfinite(stats.loss)
