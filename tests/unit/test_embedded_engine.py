"""The embedded engine answers exactly what the model alone would, whatever else shares its batch."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from actors.engines import create_embedded
from actors.engines.base import Generation, Sampling
from actors.engines.batcher import Batcher, Sequence
from actors.engines.embedded import UNHEALTHY_AFTER, EmbeddedEngine
from actors.engines.lora import AdapterReader
from actors.engines.model import FewRowsLinear, PolicyModel
from actors.engines.prefixes import PrefixStore
from actors.engines.sampler import sample
from broker.errors import (
    AdapterError,
    AdapterNotLoaded,
    GenerationError,
    ModelError,
    PromptTooLong,
)
from tests.tiny import EOS, build_tiny_model

Tokens = npt.NDArray[np.int32]

VOCABULARY = 259
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
ADAPTERS: list[str | None] = [None, "plain", "patterned"]
NUMBERS = itertools.count()


# The model, two adapters with large random weights, and what transformers and PEFT make of them.


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other cost a tiny model more than they bring, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("engine") / "model")


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    patterned: dict[str, Any] = {
        "target_modules": ["q_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    }
    return {
        "plain": save_adapter(tiny, root / "plain", seed=1, target_modules="all-linear"),
        "patterned": save_adapter(tiny, root / "patterned", seed=2, **patterned),
    }


def save_adapter(model_dir: Path, directory: Path, *, seed: int, std: float = 0.3, **config: Any) -> Path:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    wrapped = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | config))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=std)
    wrapped.save_pretrained(directory)
    return directory


class Reference:
    """transformers and PEFT by themselves: one sequence at a time, nothing cached."""

    def __init__(self, model_dir: Path, adapters: dict[str, Path]) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self.models: dict[str | None, Any] = {}
        for name, directory in [(None, None), *adapters.items()]:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None
            self.models[name] = model if directory is None else PeftModel.from_pretrained(model, directory).eval()

    def logprobs(self, result: Generation, prompt: Tokens, temperature: float = 1.0) -> Tokens:
        """What `result.logprobs` should be, from one forward over the prompt and the continuation."""
        ids = torch.from_numpy(np.concatenate([prompt, result.token_ids])).long()[None]
        with torch.no_grad():
            scores = self.models[result.adapter](ids).logits[0, len(prompt) - 1 : -1].float() / temperature
        picked = scores.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        return np.asarray(picked)

    def greedy(self, adapter: str | None, prompt: Tokens, new_tokens: int) -> list[int]:
        ids = torch.from_numpy(prompt).long()[None]
        with torch.no_grad():
            output = self.models[adapter].generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return list(output[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def reference(tiny: Path, adapters: dict[str, Path]) -> Reference:
    return Reference(tiny, adapters)


@asynccontextmanager
async def serving(model_dir: Path, adapters: dict[str, Path] | None = None, **options: Any) -> AsyncIterator[Any]:
    engine = EmbeddedEngine(model_dir, **{"threads": 1} | options)
    await engine.start()
    try:
        for name, directory in (adapters or {}).items():
            await engine.load_adapter(name, directory)
        yield engine
    finally:
        await engine.close()


@pytest.fixture
def batcher(tiny: Path, adapters: dict[str, Path]) -> Batcher:
    """A batcher that the test ticks itself, with both adapters and chunks of 16 prompt tokens."""
    return make_batcher(tiny, adapters)


def make_batcher(model_dir: Path, adapters: dict[str, Path], **options: Any) -> Batcher:
    model = PolicyModel(model_dir, dtype="float32", adapter_slots=4)
    batcher = Batcher(model, **{"max_batch": 64, "cache_tokens": 8192, "chunk": 16} | options)
    for name, directory in adapters.items():
        batcher.install(name, model.reader.read(directory))
    return batcher


def submit(batcher: Batcher, prompt: Tokens, sampling: Sampling, adapter: str | None = None) -> Sequence:
    sequence = Sequence(f"request-{next(NUMBERS)}", adapter, prompt, sampling.max_new_tokens, sampling)
    batcher.submit(sequence)
    return sequence


def finish(batcher: Batcher, *sequences: Sequence) -> list[Generation]:
    """Tick until `sequences` have ended."""
    for _ in range(1000):
        if all(sequence.future.done() for sequence in sequences):
            return [sequence.future.result() for sequence in sequences]
        batcher.tick()
    raise AssertionError("1000 ticks did not end the sequences")


async def until(condition: Callable[[], Awaitable[bool]], deadline: float = 20.0) -> None:
    end = time.monotonic() + deadline
    while not await condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.001)


def prompt_of(length: int, seed: int = 0) -> Tokens:
    return np.random.default_rng((length, seed)).integers(3, VOCABULARY, length, dtype=np.int32)


# Exactness.


async def test_greedy_output_equals_generate_for_base_and_adapters_in_one_batch(
    tiny: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    requests = [(name, prompt_of(length)) for length in (1, 5, 17, 40) for name in ADAPTERS]
    async with serving(tiny, adapters) as engine:
        results = await asyncio.gather(
            *(engine.generate(f"{index}", name, prompt, GREEDY) for index, (name, prompt) in enumerate(requests))
        )
    outputs = [result.token_ids.tolist() for result in results]
    assert outputs == [reference.greedy(name, prompt, 12) for name, prompt in requests]
    assert len({tuple(output) for output in outputs[-3:]}) == 3, "the adapters must change what is sampled"


async def test_logprobs_equal_a_full_forward_pass_for_base_and_adapters_in_one_batch(
    tiny: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    requests = [(name, prompt_of(length, seed=1)) for length in (2, 9, 33) for name in ADAPTERS]
    sampling = Sampling(max_new_tokens=20, temperature=0.7)
    async with serving(tiny, adapters) as engine:
        results = await asyncio.gather(
            *(engine.generate(f"{index}", name, prompt, sampling) for index, (name, prompt) in enumerate(requests))
        )
    for result, (name, prompt) in zip(results, requests, strict=True):
        assert result.adapter == name
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, prompt, 0.7), atol=1e-4)
        wrong = Generation(result.token_ids, result.logprobs, "length", "plain" if name is None else None, 0)
        assert np.abs(result.logprobs - reference.logprobs(wrong, prompt, 0.7)).max() > 0.1


def test_requests_that_join_and_leave_mid_flight_keep_their_logprobs(batcher: Batcher, reference: Reference) -> None:
    sequences: list[Sequence] = []
    for index in range(24):
        sampling = Sampling(max_new_tokens=3 + 7 * index % 40, temperature=1.3)
        sequences.append(submit(batcher, prompt_of(1 + 5 * index % 50, seed=index), sampling, ADAPTERS[index % 3]))
        for _ in range(index % 3):
            batcher.tick()
    assert batcher.active > 1, "nothing overlapped"
    for sequence, result in zip(sequences, finish(batcher, *sequences), strict=True):
        assert len(result.token_ids) == sequence.limit
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, sequence.prompt, 1.3), atol=1e-4)


def test_rows_that_outgrow_their_band_keep_their_logprobs(batcher: Batcher, reference: Reference) -> None:
    sequences = [
        submit(batcher, prompt_of(length, seed=5), Sampling(max_new_tokens=new), "plain")
        for length, new in ((90, 80), (100, 200), (3, 150), (120, 30), (200, 100))
    ]
    for sequence, result in zip(sequences, finish(batcher, *sequences), strict=True):
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, sequence.prompt), atol=1e-4)


def test_a_long_prompt_is_computed_in_chunks_beside_running_requests(batcher: Batcher, reference: Reference) -> None:
    running = submit(batcher, prompt_of(4), Sampling(max_new_tokens=30))
    batcher.tick()
    long = submit(batcher, prompt_of(100), GREEDY, "patterned")
    for ticks in range(1, 7):
        batcher.tick()
        assert (len(running.tokens), len(long.tokens)) == (1 + ticks, 0)
    batcher.tick()
    assert len(long.tokens) == 1, "100 tokens in chunks of 16 take 7 steps"
    for sequence, result in zip((running, long), finish(batcher, running, long), strict=True):
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, sequence.prompt), atol=1e-4)


def test_a_sliding_window_is_respected(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        sliding_window=12,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = MistralForCausalLM(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path / "windowed")
    config.sliding_window = None
    batcher = make_batcher(tmp_path / "windowed", {})
    sequence = submit(batcher, prompt_of(40), Sampling(max_new_tokens=20))
    (result,) = finish(batcher, sequence)
    reference = Reference(tmp_path / "windowed", {})
    np.testing.assert_allclose(result.logprobs, reference.logprobs(result, sequence.prompt), atol=1e-4)
    unlimited = AutoModelForCausalLM.from_pretrained(tmp_path / "windowed", sliding_window=None).eval()
    reference.models[None] = unlimited
    assert np.abs(result.logprobs - reference.logprobs(result, sequence.prompt)).max() > 0.01


@pytest.mark.parametrize("rows", [1, 6, 64, 65])
def test_the_linear_layer_for_few_rows_computes_what_a_linear_layer_does(rows: int) -> None:
    layer = torch.nn.Linear(48, 80)
    tokens = torch.randn(1, rows, 48, generator=torch.Generator().manual_seed(0))
    expected = layer(tokens)
    layer.__class__ = FewRowsLinear
    torch.testing.assert_close(layer(tokens), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
async def test_a_real_model_answers_exactly_in_a_mixed_batch(tmp_path: Path) -> None:
    from broker.models import resolve

    model_dir = resolve("smollm2-135m-instruct").directory
    adapters = {
        "one": save_adapter(model_dir, tmp_path / "one", seed=1, std=0.05, target_modules="all-linear"),
        "two": save_adapter(model_dir, tmp_path / "two", seed=2, std=0.05, target_modules=["q_proj", "v_proj"]),
    }
    reference = Reference(model_dir, adapters)
    names = [None, "one", "two"]
    random = np.random.default_rng(0)
    prompts = [random.integers(100, 40000, length, dtype=np.int32) for length in (7, 60, 23)]
    async with serving(model_dir, adapters) as engine:
        pairs = await asyncio.gather(
            *(engine.generate(f"greedy-{name}", name, prompts[0], GREEDY) for name in names),
            *(
                engine.generate(f"{name}-{index}", name, prompt, Sampling(max_new_tokens=8))
                for index, prompt in enumerate(prompts)
                for name in names
            ),
        )
    for result in pairs[:3]:
        assert result.token_ids.tolist() == reference.greedy(result.adapter, prompts[0], 12)
    for index, result in enumerate(pairs[3:]):
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, prompts[index // 3]), atol=1e-4)


# Sampling.


@pytest.mark.parametrize("rules", [{}, {"temperature": 0.6}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.5}])
def test_draws_follow_the_distribution_whose_logprobs_are_returned(rules: dict[str, Any]) -> None:
    draws = 10_000
    sampling = Sampling(max_new_tokens=1, **rules)
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 1.5, 300)).float()
    expected = warped(logits, sampling)
    tokens, logprobs = sample(logits.expand(draws, -1), [sampling] * draws, [np.random.default_rng(1)] * draws)
    np.testing.assert_allclose(logprobs, expected.log()[tokens], atol=1e-4)
    counts = np.bincount(tokens, minlength=300)
    possible = expected.numpy() > 0
    assert counts[~possible].sum() == 0
    mean = expected.numpy()[possible] * draws
    chi_square = float(((counts[possible] - mean) ** 2 / mean).sum())
    freedom = int(possible.sum()) - 1
    assert abs(chi_square - freedom) < 4 * (2 * freedom) ** 0.5 + 4, (chi_square, freedom)


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution by its definition: transformers' own warpers in their order."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].double())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return torch.as_tensor(scores.softmax(-1)[0])


def test_every_uniform_number_draws_a_token_that_has_weight() -> None:
    class Extreme(np.random.Generator):
        def __init__(self, value: float) -> None:
            super().__init__(np.random.PCG64(0))
            self.value = value

        def random(self, *_: Any, **__: Any) -> Any:
            return self.value

    logits = torch.full((2, 1000), float("-inf"))
    logits[:, [300, 301, 700]] = torch.tensor([0.1, 0.2, 0.3])
    tokens, _ = sample(logits, [Sampling(1)] * 2, [Extreme(0.0), Extreme(1 - 2**-53)])
    assert tokens == [300, 700]


async def test_a_seed_gives_the_same_draw_whatever_shares_the_batch(tiny: Path, adapters: dict[str, Path]) -> None:
    sampling = Sampling(max_new_tokens=20, seed=-7)
    async with serving(tiny, adapters) as engine:
        alone = await engine.generate("alone", "plain", prompt_of(11), sampling)
        crowd = [
            engine.generate(f"{index}", ADAPTERS[index % 3], prompt_of(3 + index), Sampling(max_new_tokens=25))
            for index in range(9)
        ]
        crowded, *_ = await asyncio.gather(engine.generate("crowded", "plain", prompt_of(11), sampling), *crowd)
        other = await engine.generate("other", "plain", prompt_of(11), Sampling(max_new_tokens=20, seed=8))
    assert alone.token_ids.tolist() == crowded.token_ids.tolist() != other.token_ids.tolist()


async def test_requests_of_a_group_without_seeds_differ(tiny: Path) -> None:
    async with serving(tiny) as engine:
        results = await asyncio.gather(
            *(engine.generate(f"{index}", None, prompt_of(9), Sampling(max_new_tokens=16)) for index in range(8))
        )
    assert len({result.token_ids.tobytes() for result in results}) > 1


# What ends a request.


def test_a_stop_token_ends_sampling_and_is_kept(batcher: Batcher, reference: Reference) -> None:
    expected = reference.greedy(None, prompt_of(6), 12)
    stop = expected[4]
    rules = Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(EOS, stop))
    stopped, ran_out = finish(batcher, submit(batcher, prompt_of(6), rules), submit(batcher, prompt_of(6), GREEDY))
    assert stopped.token_ids.tolist() == expected[: expected.index(stop) + 1]
    assert (stopped.finish, ran_out.finish) == ("stop", "length")
    assert len(stopped.logprobs) == len(stopped.token_ids)


async def test_the_context_limits_what_is_sampled(tiny: Path) -> None:
    async with serving(tiny, context=40) as engine:
        result = await engine.generate("fits", None, prompt_of(30), Sampling(max_new_tokens=100))
        assert (len(result.token_ids), result.finish) == (10, "length")
        with pytest.raises(PromptTooLong, match="40"):
            await engine.generate("too-long", None, prompt_of(40), GREEDY)
        assert (await engine.health()).context == 40


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (np.zeros(0, np.int32), GREEDY),
        (np.array([VOCABULARY], np.int32), GREEDY),
        (np.array([-1], np.int32), GREEDY),
        (prompt_of(3), Sampling(max_new_tokens=0)),
        (prompt_of(3), Sampling(max_new_tokens=1, temperature=-1.0)),
        (prompt_of(3), Sampling(max_new_tokens=1, top_p=0.0)),
    ],
)
async def test_what_cannot_be_sampled_is_refused_for_good(tiny: Path, prompt: Tokens, sampling: Sampling) -> None:
    async with serving(tiny) as engine:
        with pytest.raises(GenerationError) as refused:
            await engine.generate("bad", None, prompt, sampling)
        assert not refused.value.retryable
        assert len((await engine.generate("good", None, prompt_of(3), GREEDY)).token_ids) == 12


async def test_cancel_ends_a_running_and_a_waiting_request(tiny: Path, reference: Reference) -> None:
    sampling = Sampling(max_new_tokens=400, temperature=0.0)
    async with serving(tiny, max_batch=1) as engine:
        running = asyncio.create_task(engine.generate("running", None, prompt_of(8), sampling))
        waiting = asyncio.create_task(engine.generate("waiting", None, prompt_of(9), sampling))
        survivor = asyncio.create_task(engine.generate("survivor", None, prompt_of(10), GREEDY))

        async def sampled() -> bool:
            return bool((await engine.health()).generated_tokens >= 3)

        await until(sampled)
        assert (await engine.health()).waiting == 2
        with pytest.raises(GenerationError, match="in flight already"):
            await engine.generate("waiting", None, prompt_of(9), sampling)
        await engine.cancel("waiting")
        await engine.cancel("running")
        await engine.cancel("unknown")
        part, nothing, whole = await asyncio.gather(running, waiting, survivor)
    assert (part.finish, nothing.finish, whole.finish) == ("cancelled", "cancelled", "length")
    assert 3 <= len(part.token_ids) < 400
    assert part.token_ids.tolist() == reference.greedy(None, prompt_of(8), len(part.token_ids))
    assert len(nothing.token_ids) == 0


def test_cancel_ends_a_request_whose_prompt_is_half_computed(batcher: Batcher) -> None:
    sequence = submit(batcher, prompt_of(60), GREEDY)
    batcher.tick()
    batcher.cancel(sequence.request_id)
    assert sequence.future.result().finish == "cancelled"
    assert batcher.active == batcher.waiting == 0


async def test_a_cancelled_task_frees_its_place(tiny: Path) -> None:
    async with serving(tiny, max_batch=1) as engine:
        task = asyncio.create_task(engine.generate("abandoned", None, prompt_of(8), Sampling(max_new_tokens=400)))

        async def running() -> bool:
            return bool((await engine.health()).running)

        await until(running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len((await engine.generate("next", None, prompt_of(3), GREEDY)).token_ids) == 12
        health = await engine.health()
        assert health.running == health.waiting == 0
        assert health.generated_tokens < 400


async def test_close_cancels_everything_and_refuses_what_comes_after(tiny: Path, adapters: dict[str, Path]) -> None:
    engine = EmbeddedEngine(tiny, max_batch=2, threads=1)
    assert not (await engine.health()).ok
    with pytest.raises(GenerationError, match="not running"):
        await engine.generate("early", None, prompt_of(3), GREEDY)
    await engine.start()
    tasks = [
        asyncio.create_task(engine.generate(f"{index}", None, prompt_of(4), Sampling(max_new_tokens=400)))
        for index in range(4)
    ]

    async def sampled() -> bool:
        return (await engine.health()).generated_tokens > 0

    await until(sampled)
    await engine.close()
    await engine.close()
    assert [result.finish for result in await asyncio.gather(*tasks)] == ["cancelled"] * 4
    with pytest.raises(GenerationError, match="closed"):
        await engine.generate("late", None, prompt_of(3), GREEDY)
    with pytest.raises(GenerationError, match="closed"):
        await engine.load_adapter("plain", adapters["plain"])
    health = await engine.health()
    assert (health.ok, health.detail) == (False, "closed")


# Prefix reuse.


def test_a_groups_prompt_is_computed_once(batcher: Batcher, reference: Reference) -> None:
    prompt = prompt_of(37)
    sequences = [submit(batcher, prompt, Sampling(max_new_tokens=9), "plain") for _ in range(8)]
    results = finish(batcher, *sequences)
    assert batcher.prefilled_tokens == 37
    assert [result.cached_tokens for result in results] == [0] + [37] * 7
    (later,) = finish(batcher, submit(batcher, prompt, Sampling(max_new_tokens=9), "plain"))
    assert later.cached_tokens == 36, "without logits at hand the last token is computed again"
    assert batcher.prefilled_tokens == 38
    for result in (*results, later):
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, prompt), atol=1e-4)


def test_equal_prompts_of_different_adapters_do_not_wait_for_each_other(batcher: Batcher) -> None:
    sequences = [submit(batcher, prompt_of(5), GREEDY, name) for name in ADAPTERS]
    batcher.tick()
    assert [len(sequence.tokens) for sequence in sequences] == [1, 1, 1]
    assert batcher.prefilled_tokens == 15


def test_a_waiting_request_of_another_adapter_does_not_join_an_equal_prompt(
    tiny: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    batcher = make_batcher(tiny, {"plain": adapters["plain"]}, cache_tokens=100, chunk=64)
    small, large = prompt_of(20), prompt_of(60)
    first = submit(batcher, small, GREEDY)
    second = submit(batcher, large, GREEDY)
    third = submit(batcher, small, GREEDY, "plain")
    batcher.tick()
    assert batcher.waiting == 2, "the large one does not fit, so the third waits behind it"
    results = finish(batcher, first, second, third)
    expected = [
        reference.greedy(None, small, 12),
        reference.greedy(None, large, 12),
        reference.greedy("plain", small, 12),
    ]
    assert [result.token_ids.tolist() for result in results] == expected


async def test_cached_tokens_are_counted_truthfully_however_a_group_arrives(tiny: Path) -> None:
    async with serving(tiny) as engine:
        group = await asyncio.gather(
            *(engine.generate(f"{index}", None, prompt_of(37), Sampling(max_new_tokens=9)) for index in range(8))
        )
        computed = [37 - result.cached_tokens for result in group]
        assert (await engine.health()).prefilled_tokens == sum(computed)
        assert sorted(computed, reverse=True)[0] == 37
        assert sum(computed) <= 37 + 7


def test_a_prompt_that_shares_most_of_one_in_progress_waits_for_it(batcher: Batcher, reference: Reference) -> None:
    first = prompt_of(40)
    second = np.concatenate([first[:35], prompt_of(6)])
    sequences = [submit(batcher, prompt, Sampling(max_new_tokens=5), "plain") for prompt in (first, second)]
    results = finish(batcher, *sequences)
    assert [result.cached_tokens for result in results] == [0, 35]
    assert batcher.prefilled_tokens == 40 + 6
    for result, prompt in zip(results, (first, second), strict=True):
        np.testing.assert_allclose(result.logprobs, reference.logprobs(result, prompt), atol=1e-4)


@pytest.mark.parametrize("adapter", ADAPTERS)
async def test_a_later_turn_reuses_what_earlier_turns_computed(
    tiny: Path, adapters: dict[str, Path], reference: Reference, adapter: str | None
) -> None:
    prompt = prompt_of(20)
    computed = 0
    async with serving(tiny, adapters) as engine:
        for turn in range(4):
            result = await engine.generate(f"{turn}", adapter, prompt, Sampling(max_new_tokens=15))
            assert result.cached_tokens == computed
            np.testing.assert_allclose(result.logprobs, reference.logprobs(result, prompt), atol=1e-4)
            # The last sampled token was never fed back, so its keys and values do not exist yet.
            computed = len(prompt) + len(result.token_ids) - 1
            prompt = np.concatenate([prompt, result.token_ids, prompt_of(6, seed=turn)])


async def test_prefixes_are_not_shared_between_adapters(tiny: Path, adapters: dict[str, Path]) -> None:
    async with serving(tiny, adapters) as engine:
        for name in ADAPTERS:
            assert (await engine.generate("first", name, prompt_of(20), GREEDY)).cached_tokens == 0
            assert (await engine.generate("again", name, prompt_of(20), GREEDY)).cached_tokens == 19


async def test_unloading_forgets_what_the_adapter_computed(
    tiny: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    async with serving(tiny, {"name": adapters["plain"]}) as engine:
        await engine.generate("first", "name", prompt_of(20), GREEDY)
        await engine.unload_adapter("name")
        await engine.unload_adapter("unknown")
        with pytest.raises(AdapterNotLoaded, match="name"):
            await engine.generate("none", "name", prompt_of(20), GREEDY)
        await engine.load_adapter("name", adapters["patterned"])
        result = await engine.generate("second", "name", prompt_of(20), GREEDY)
    assert result.cached_tokens == 0
    assert result.token_ids.tolist() == reference.greedy("patterned", prompt_of(20), 12)


@pytest.mark.parametrize("capacity", [120, 100_000])
def test_the_prefix_store_finds_the_longest_prefix_and_stays_within_its_capacity(capacity: int) -> None:
    random = np.random.default_rng(0)
    store = PrefixStore(capacity)
    inserted: list[Tokens] = []
    for _ in range(300):
        tokens = random.integers(0, 3, random.integers(1, 30), dtype=np.int32)
        pieces = store.match("a", tokens)
        found = sum(piece.shape[2] for piece in pieces)
        expected = max((common(tokens, known) for known in inserted), default=0)
        assert found == expected if capacity > 120 else found <= expected
        if pieces:
            assert torch.cat(pieces, 2)[0, 0, :, 0, 0].tolist() == positional(tokens)[:found]
        cache = torch.tensor(positional(tokens)).float()[None, None, :, None, None]
        store.insert("a", tokens, cache.expand(2, 1, -1, 1, 1))
        inserted.append(tokens)
        assert store.size <= capacity
        assert sum(piece.shape[2] for piece in store.match("a", tokens)) == len(tokens)
    assert store.size > 100
    assert store.match("b", inserted[-1]) == []
    store.drop("a")
    assert store.size == 0
    assert store.match("a", inserted[-1]) == []


def positional(tokens: Tokens) -> list[float]:
    """A stand-in for keys and values: a number that depends on a token and on all before it."""
    return [float(hash(tuple(tokens[: end + 1].tolist())) % 65521) for end in range(len(tokens))]


def common(first: Tokens, second: Tokens) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


# Limits.


def test_requests_wait_while_the_batch_or_the_cache_is_full(tiny: Path, reference: Reference) -> None:
    for options in ({"max_batch": 3}, {"cache_tokens": 100}):
        batcher = make_batcher(tiny, {}, **options)
        sequences = [submit(batcher, prompt_of(20, seed=seed), GREEDY) for seed in range(8)]
        batcher.tick()
        assert (batcher.active, batcher.waiting) == (3, 5)
        for result, sequence in zip(finish(batcher, *sequences), sequences, strict=True):
            assert result.token_ids.tolist() == reference.greedy(None, sequence.prompt, 12)


def test_a_group_larger_than_the_batch_is_served_in_parts(tiny: Path, reference: Reference) -> None:
    batcher = make_batcher(tiny, {}, max_batch=3)
    results = finish(batcher, *[submit(batcher, prompt_of(20), GREEDY) for _ in range(8)])
    assert [result.token_ids.tolist() for result in results] == [reference.greedy(None, prompt_of(20), 12)] * 8
    assert batcher.prefilled_tokens == 20 + 2, "each later part recomputes one token"


# Adapters.


async def test_the_number_of_slots_is_enforced(tiny: Path, adapters: dict[str, Path]) -> None:
    async with serving(tiny, {"one": adapters["plain"]}, adapter_slots=2) as engine:
        await engine.load_adapter("two", adapters["patterned"])
        await engine.load_adapter("two", adapters["patterned"])
        with pytest.raises(AdapterError, match="no slot left"):
            await engine.load_adapter("three", adapters["plain"])
        assert (await engine.health()).adapters == ("one", "two")
        await engine.unload_adapter("one")
        await engine.load_adapter("three", adapters["plain"])
        assert (await engine.health()).adapters == ("two", "three")


async def test_an_adapter_is_unloaded_when_its_last_request_has_ended(tiny: Path, adapters: dict[str, Path]) -> None:
    async with serving(tiny, adapters) as engine:
        running = asyncio.create_task(engine.generate("long", "plain", prompt_of(8), Sampling(max_new_tokens=400)))

        async def sampled() -> bool:
            return bool((await engine.health()).generated_tokens > 0)

        await until(sampled)
        unloading = asyncio.create_task(engine.unload_adapter("plain"))

        async def refused() -> bool:
            try:
                await engine.generate("new", "plain", prompt_of(3), GREEDY)
            except AdapterNotLoaded:
                return True
            return False

        await until(refused)
        assert not unloading.done()
        assert "plain" in (await engine.health()).adapters
        assert len((await running).token_ids) == 400
        await unloading
        assert "plain" not in (await engine.health()).adapters


async def test_loading_a_name_that_is_leaving_keeps_it(tiny: Path, adapters: dict[str, Path]) -> None:
    async with serving(tiny, adapters) as engine:
        running = asyncio.create_task(engine.generate("long", "plain", prompt_of(8), Sampling(max_new_tokens=100)))

        async def sampled() -> bool:
            return bool((await engine.health()).generated_tokens > 0)

        await until(sampled)
        unloading = asyncio.create_task(engine.unload_adapter("plain"))
        await asyncio.sleep(0)
        await engine.load_adapter("plain", adapters["plain"])
        await unloading
        await running
        assert len((await engine.generate("new", "plain", prompt_of(3), GREEDY)).token_ids) == 12


async def test_loading_and_unloading_do_not_disturb_running_requests(
    tiny: Path, adapters: dict[str, Path], reference: Reference
) -> None:
    async with serving(tiny, {"plain": adapters["plain"]}) as engine:
        running = [
            asyncio.create_task(engine.generate(f"{index}", "plain", prompt_of(8), Sampling(max_new_tokens=480)))
            for index in range(3)
        ]

        async def sampled() -> bool:
            return bool((await engine.health()).generated_tokens > 0)

        await until(sampled)
        await engine.load_adapter("patterned", adapters["patterned"])
        await engine.generate("other", "patterned", prompt_of(5), GREEDY)
        await engine.unload_adapter("patterned")
        assert (await engine.health()).running == 3, "the requests must outlive the loading for this test to mean much"
        for result in await asyncio.gather(*running):
            np.testing.assert_allclose(result.logprobs, reference.logprobs(result, prompt_of(8)), atol=1e-4)


def read_adapter(model_dir: Path, directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    return AdapterReader(model, torch.device("cpu"), torch.float32).read(directory)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True, "target_modules": ["q_proj"]}, "use_dora"),
        ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, "modules_to_save"),
        ({"bias": "lora_only", "target_modules": ["q_proj"]}, "bias"),
        ({"target_modules": ["embed_tokens"]}, "embed_tokens"),
        ({"target_modules": ["lm_head"]}, "lm_head"),
    ],
)
def test_adapters_that_are_not_plain_lora_are_refused(
    tiny: Path, tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(AdapterError, match=reason):
        read_adapter(tiny, save_adapter(tiny, tmp_path, seed=0, **config))


def test_adapters_that_do_not_fit_are_refused(tiny: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    with pytest.raises(AdapterError, match=r"no adapter_config\.json"):
        read_adapter(tiny, tmp_path)
    deeper = build_tiny_model(tmp_path / "deeper", layers=3)
    with pytest.raises(AdapterError, match="layers"):
        read_adapter(tiny, save_adapter(deeper, tmp_path / "deep", seed=0, target_modules=["q_proj"]))
    weights = load_file(adapters["plain"] / "adapter_model.safetensors")
    name = min(weights)
    for change, reason in (
        (weights | {name: weights[name][:, :-1].contiguous()}, "needs shapes"),
        ({key: value for key, value in weights.items() if key != name}, "no weights for"),
        (weights | {name: torch.full_like(weights[name], torch.inf)}, "not finite"),
    ):
        (tmp_path / "adapter_config.json").write_text((adapters["plain"] / "adapter_config.json").read_text())
        save_file(change, tmp_path / "adapter_model.safetensors")
        with pytest.raises(AdapterError, match=reason):
            read_adapter(tiny, tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(AdapterError, match="cannot read"):
        read_adapter(tiny, tmp_path)


# Failure.


async def test_a_failing_forward_fails_only_its_requests(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    async with serving(tiny, max_batch=1) as engine:
        working, failures = engine._model.logits, 1

        def failing(step: Any) -> Any:
            nonlocal failures
            if failures and len(step.token_ids) == 1:
                failures -= 1
                raise RuntimeError("the machine is on fire")
            return working(step)

        monkeypatch.setattr(engine._model, "logits", failing)
        unlucky, lucky = await asyncio.gather(
            *(engine.generate(f"{size}", None, prompt_of(size), GREEDY) for size in (8, 9)), return_exceptions=True
        )
        assert isinstance(unlucky, GenerationError)
        assert unlucky.retryable
        assert "on fire" in str(unlucky)
        assert isinstance(lucky, Generation)
        assert lucky.token_ids.tolist() == reference.greedy(None, prompt_of(9), 12)
        health = await engine.health()
        assert health.ok
        assert "on fire" in health.detail
        failures = UNHEALTHY_AFTER
        for index in range(UNHEALTHY_AFTER):
            with pytest.raises(GenerationError, match="on fire"):
                await engine.generate(f"{index}", None, prompt_of(1), GREEDY)
        assert not (await engine.health()).ok
        await engine.generate("again", None, prompt_of(1), GREEDY)
        assert (await engine.health()).ok


def test_what_a_failed_step_left_behind_spoils_nothing(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    unlucky = submit(batcher, prompt_of(12), GREEDY)
    for _ in range(3):
        batcher.tick()

    def ruin(step: Any) -> Any:
        assert unlucky.row is not None
        unlucky.row.band.cache[:, :, unlucky.row.index] = torch.nan
        raise RuntimeError("half a step")

    with monkeypatch.context() as patched:
        patched.setattr(batcher._model, "logits", ruin)
        batcher.tick()
    with pytest.raises(GenerationError, match="half a step"):
        unlucky.future.result()
    (next_in_row,) = finish(batcher, submit(batcher, prompt_of(4), GREEDY))
    assert next_in_row.token_ids.tolist() == reference.greedy(None, prompt_of(4), 12)


async def test_an_adapter_that_overflows_fails_its_own_requests_only(
    tiny: Path, tmp_path: Path, reference: Reference
) -> None:
    wild = save_adapter(tiny, tmp_path, seed=0, std=1e25, target_modules="all-linear")
    async with serving(tiny, {"wild": wild}) as engine:
        for _ in range(2):
            found: list[Generation | BaseException] = await asyncio.gather(
                engine.generate("broken", "wild", prompt_of(8), GREEDY),
                engine.generate("sound", None, prompt_of(8), GREEDY),
                return_exceptions=True,
            )
            broken, sound = found
            assert isinstance(broken, GenerationError)
            assert "not finite" in str(broken)
            assert isinstance(sound, Generation)
            assert sound.token_ids.tolist() == reference.greedy(None, prompt_of(8), 12)


async def test_what_is_no_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    with pytest.raises(ModelError, match="cannot be loaded"):
        await EmbeddedEngine(tmp_path / "nothing").start()
    with pytest.raises(ModelError, match="dtype"):
        await EmbeddedEngine(tiny, dtype="int3").start()
    config = Gemma2Config(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=8
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path / "capped")
    with pytest.raises(ModelError, match="soft-capping"):
        await EmbeddedEngine(tmp_path / "capped").start()


def test_create_makes_engines_and_loads_torch_only_then(tiny: Path) -> None:
    assert isinstance(create_embedded(tiny), EmbeddedEngine)
    code = "import sys, actors.engines; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
