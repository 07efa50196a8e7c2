"""Episodes and groups: what counts as good, as truncated, as failed, and what is tried again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.calls import EpisodeError
from actors.environment import EnvironmentFactory, SingleTurn, StepResult
from actors.episode import GroupOutcome, Sampled, UnscoredEpisode, episode_seed, run_episode, run_group
from actors.rewards import RewardFunction, Rewards
from broker.chat import ChatTokenizer
from broker.errors import GenerationError, PromptTooLong
from broker.messages import Ids, Task
from broker.runspec import RunSpec
from tests.tiny import EOS

QUESTION = [{"role": "user", "content": "q"}]


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> ChatTokenizer:
    return ChatTokenizer.from_directory(tiny_model)


class Replies:
    """A generator that says the same to everyone, and remembers what it was asked."""

    def __init__(self, tokenizer: ChatTokenizer, text: str = "ok", finish: Any = "stop") -> None:
        self.ids = [*tokenizer.encode(text), *([EOS] if finish == "stop" else [])]
        self.finish = finish
        self.asked: list[tuple[int, int, list[int], int]] = []

    async def __call__(self, episode: int, turn: int, prompt: Ids, max_new_tokens: int) -> Sampled:
        self.asked.append((episode, turn, prompt.tolist(), max_new_tokens))
        ids = np.asarray(self.ids[:max_new_tokens], dtype=np.int32)
        return Sampled(ids, np.full(len(ids), -0.5, dtype=np.float32), self.finish, 4, f"replica-{turn}")


class Game:
    """Three turns, a tenth of a point each."""

    def __init__(self) -> None:
        self.turns = 0

    def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        return QUESTION

    def step(self, reply: str) -> Any:
        self.turns += 1
        answer = [{"role": "user", "content": "more"}]
        return StepResult(messages=answer, reward=0.1, done=self.turns == 3, metrics={"turns": self.turns})


def by_length(completions: Any, **columns: Any) -> list[float]:
    return [float(len(completion[0]["content"])) for completion in completions]


def single(function: Callable[..., Any] = by_length) -> EnvironmentFactory:
    return EnvironmentFactory(lambda: SingleTurn("prompt"), Rewards((RewardFunction("reward", function),)))


def spec(**environment: Any) -> RunSpec:
    system = {"run": {"name": "r", "model": "m"}, "tasks": {"source": "s"}, "sampling": {"max_new_tokens": 32}}
    return msgspec.convert({**system, "environment": environment}, RunSpec)


def task(group_size: int = 3, **columns: Any) -> Task:
    return Task(
        run="r",
        incarnation="i",
        group="g",
        index=0,
        columns={"prompt": QUESTION, **columns},
        group_size=group_size,
        seed=7,
    )


def ticking() -> Callable[[], float]:
    ticks = itertools.count()
    return lambda: float(next(ticks))


async def group(tokenizer: ChatTokenizer, factory: EnvironmentFactory, generate: Any, **more: Any) -> GroupOutcome:
    arguments: dict[str, Any] = {"task": task(), "spec": spec(), "context": 512, "clock": ticking(), **more}
    return await run_group(factory=factory, tokenizer=tokenizer, generate=generate, **arguments)


async def episode(tokenizer: ChatTokenizer, factory: EnvironmentFactory, generate: Any, **more: Any) -> UnscoredEpisode:
    arguments: dict[str, Any] = {"task": task(), "spec": spec(), "context": 512, "clock": ticking(), **more}
    return await run_episode(index=0, factory=factory, tokenizer=tokenizer, generate=generate, **arguments)


async def test_a_group_of_single_turns_is_scored_in_one_call(tokenizer: ChatTokenizer) -> None:
    calls = []

    def reward(completions: Any, answer: Any, completion_ids: Any, prompts: Any) -> list[float]:
        calls.append((completions, answer, completion_ids, prompts))
        return [0.0, 1.0, 2.0]

    generate = Replies(tokenizer)
    outcome = await group(tokenizer, single(reward), generate, task=task(answer=5))
    assert calls == [([[{"role": "assistant", "content": "ok"}]] * 3, [5] * 3, [generate.ids] * 3, [QUESTION] * 3)]
    assert [(e.index, e.reward, e.parts) for e in outcome.episodes] == [(n, n, {"reward": float(n)}) for n in range(3)]
    assert outcome.failures == []
    assert outcome.lengths == [3, 3, 3]
    assert outcome.episodes[0].replicas == ["replica-0"]
    assert not outcome.episodes[0].truncated
    assert sorted(asked[0] for asked in generate.asked) == [0, 1, 2]
    (row,) = outcome.episodes[0].rows
    row.check()
    assert row.served_by[row.trained].tolist() == [4, 4, 4]


async def test_many_turns_add_up_and_keep_the_tokens(tokenizer: ChatTokenizer) -> None:
    generate = Replies(tokenizer)
    outcome = await group(tokenizer, EnvironmentFactory(Game, Rewards()), generate, task=task(1))
    (played,) = outcome.episodes
    assert played.reward == pytest.approx(0.3)
    assert (played.extensions, played.forks, played.truncated) == (2, 0, False)
    assert played.metrics == {"turns": 3}
    assert played.replicas == ["replica-0", "replica-1", "replica-2"]
    (first, second, third) = [prompt for _, _, prompt, _ in generate.asked]
    assert second[: len(first) + 3] == first + generate.ids
    assert third[: len(second) + 3] == second + generate.ids
    assert played.sampled_tokens == 9


async def test_environment_rewards_and_reward_functions_add_up(tokenizer: ChatTokenizer) -> None:
    def talk(completions: Any, **columns: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    factory = EnvironmentFactory(Game, Rewards((RewardFunction("talk", talk),)))
    outcome = await group(tokenizer, factory, Replies(tokenizer), task=task(1))
    assert outcome.episodes[0].reward == pytest.approx(0.3 + 5.0), "three replies and two answers"


async def test_the_system_prompt_goes_before_every_prompt(tokenizer: ChatTokenizer) -> None:
    generate = Replies(tokenizer)
    await episode(tokenizer, single(), generate, spec=spec(system_prompt="Be brief."))
    assert tokenizer.decode(generate.asked[0][2]).startswith("system\nBe brief.\n")


async def test_a_string_prompt_gives_reward_functions_strings(tokenizer: ChatTokenizer) -> None:
    done = await episode(tokenizer, single(), Replies(tokenizer), task=task(prompt="Once"))
    assert done.completion == "ok"


async def test_a_reply_cut_by_length_is_a_valid_truncated_sample(tokenizer: ChatTokenizer) -> None:
    outcome = await group(tokenizer, single(), Replies(tokenizer, "ok", finish="length"))
    assert [e.truncated for e in outcome.episodes] == [True] * 3
    assert outcome.failures == []


async def test_the_turn_limit_truncates(tokenizer: ChatTokenizer) -> None:
    done = await episode(tokenizer, EnvironmentFactory(Game, Rewards()), Replies(tokenizer), spec=spec(max_turns=2))
    assert done.truncated
    assert done.reward == pytest.approx(0.2)


async def test_a_reply_gets_the_room_the_context_leaves(tokenizer: ChatTokenizer) -> None:
    generate = Replies(tokenizer)
    length = len(tokenizer.encode(tokenizer.render(QUESTION)))
    await episode(tokenizer, single(), generate, context=length + 5)
    await episode(tokenizer, single(), generate, context=length + 500)
    assert [limit for _, _, _, limit in generate.asked] == [5, 32]


async def test_a_full_context_truncates_after_the_first_reply_and_fails_before_it(tokenizer: ChatTokenizer) -> None:
    length = len(tokenizer.encode(tokenizer.render(QUESTION)))
    game = EnvironmentFactory(Game, Rewards())
    done = await episode(tokenizer, game, Replies(tokenizer), context=length + 4)
    assert done.truncated
    assert len(done.completion_ids) == 3
    with pytest.raises(EpisodeError, match="no room for a reply") as failure:
        await episode(tokenizer, game, Replies(tokenizer), context=length)
    assert (failure.value.category, failure.value.retryable) == ("task", False)


@pytest.mark.parametrize(
    ("error", "category", "calls"),
    [
        (GenerationError("no replica"), "generation", 2),
        (GenerationError("bad request", retryable=False), "generation", 1),
        (PromptTooLong("too long"), "task", 1),
    ],
)
async def test_only_what_may_pass_is_generated_again(
    tokenizer: ChatTokenizer, error: Exception, category: str, calls: int
) -> None:
    asked = []

    async def generate(*arguments: Any) -> Sampled:
        asked.append(arguments)
        raise error

    outcome = await group(tokenizer, single(), generate, task=task(1))
    assert [(f.category, f.reason) for f in outcome.failures] == [(category, str(error))]
    assert len(asked) == calls
    assert outcome.retries == calls - 1


async def test_a_flaky_environment_gets_one_fresh_start(tokenizer: ChatTokenizer) -> None:
    made: list[Any] = []

    class Flaky(Game):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)
            self.broken = len(made) == 1
            self.closed = False

        def step(self, reply: str) -> Any:
            if self.broken:
                raise ConnectionError("sandbox lost")
            return super().step(reply)

        def close(self) -> None:
            self.closed = True

    outcome = await group(tokenizer, EnvironmentFactory(Flaky, Rewards()), Replies(tokenizer), task=task(1))
    assert len(outcome.episodes) == 1
    assert outcome.retries == 1
    assert len(made) == 2
    assert all(environment.closed for environment in made)


async def test_a_broken_environment_fails_with_the_line_and_the_others_go_on(tokenizer: ChatTokenizer) -> None:
    class Broken(Game):
        def reset(self, task: Mapping[str, Any], seed: int) -> Any:
            if seed == episode_seed(7, 1):
                raise ConnectionError("sandbox lost")
            return QUESTION

    outcome = await group(tokenizer, EnvironmentFactory(Broken, Rewards()), Replies(tokenizer))
    assert [e.index for e in outcome.episodes] == [0, 2]
    (failure,) = outcome.failures
    assert (failure.index, failure.category) == (1, "environment")
    assert "reset raised ConnectionError: sandbox lost" in failure.reason
    assert "test_episode.py" in failure.reason
    assert outcome.main_failure() == ("environment", failure.reason)


async def test_an_environment_that_is_cancelled_from_within_fails_and_the_others_go_on(
    tokenizer: ChatTokenizer,
) -> None:
    class Broken(Game):
        async def reset(self, task: Mapping[str, Any], seed: int) -> Any:
            if seed == episode_seed(7, 1):
                connecting = asyncio.ensure_future(asyncio.Event().wait())
                connecting.cancel()
                await connecting
            return QUESTION

    outcome = await group(tokenizer, EnvironmentFactory(Broken, Rewards()), Replies(tokenizer))
    assert [e.index for e in outcome.episodes] == [0, 2]
    (failure,) = outcome.failures
    assert (failure.index, failure.category, outcome.retries) == (1, "environment", 1)
    assert "reset raised RuntimeError: what it awaited was cancelled" in failure.reason


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "step\\(\\) returned NoneType; expected actors.environment.StepResult"),
        (StepResult(reward=float("nan")), "returned the reward nan"),
        (StepResult(reward="much"), "no number"),  # type: ignore[arg-type]
        (StepResult(reward=10**400), "no number"),
        (StepResult(metrics=None), "no number"),  # type: ignore[arg-type]
        (StepResult(messages=["hello"]), "unusable messages"),  # type: ignore[list-item]
        (StepResult(messages=[{"role": "user", "content": "caf\udce9"}]), "unusable messages"),
    ],
)
async def test_an_answer_that_is_none_is_the_environments_failure(
    tokenizer: ChatTokenizer, answer: Any, told: str
) -> None:
    class Wrong(Game):
        def step(self, reply: str) -> Any:
            return answer

    with pytest.raises(EpisodeError, match=told) as failure:
        await episode(tokenizer, EnvironmentFactory(Wrong, Rewards()), Replies(tokenizer))
    assert failure.value.category == "environment"
    assert failure.value.sampled_tokens == 3


@pytest.mark.parametrize("prompt", [3, "", [{"role": "user"}]])
async def test_an_unusable_prompt_is_the_tasks_failure(tokenizer: ChatTokenizer, prompt: Any) -> None:
    with pytest.raises(EpisodeError, match="not a usable prompt") as failure:
        await episode(tokenizer, single(), Replies(tokenizer), task=task(prompt=prompt))
    assert failure.value.category == "task"


async def test_an_environment_that_rewrites_the_history_forks(tokenizer: ChatTokenizer) -> None:
    class Forgetful(Game):
        def step(self, reply: str) -> Any:
            self.turns += 1
            return StepResult(history=QUESTION, done=self.turns == 2)

    outcome = await group(tokenizer, EnvironmentFactory(Forgetful, Rewards()), Replies(tokenizer), task=task(1))
    assert (outcome.episodes[0].forks, len(outcome.episodes[0].rows)) == (1, 2)
    assert outcome.episodes[0].sampled_tokens == 6


async def test_a_hung_episode_times_out_and_costs_no_other(tokenizer: ChatTokenizer) -> None:
    replies = Replies(tokenizer)

    async def generate(index: int, turn: int, prompt: Ids, limit: int) -> Sampled:
        if index == 1:
            await asyncio.Event().wait()
        return await replies(index, turn, prompt, limit)

    outcome = await group(tokenizer, single(), generate, spec=spec(episode_timeout=0.2))
    assert [e.index for e in outcome.episodes] == [0, 2]
    assert [(f.index, f.category) for f in outcome.failures] == [(1, "timeout")]


async def test_the_group_timeout_keeps_what_is_done(tokenizer: ChatTokenizer) -> None:
    replies = Replies(tokenizer)

    async def generate(index: int, turn: int, prompt: Ids, limit: int) -> Sampled:
        if index == 2:
            await asyncio.Event().wait()
        return await replies(index, turn, prompt, limit)

    outcome = await group(tokenizer, single(), generate, spec=spec(group_timeout=0.2))
    assert [e.index for e in outcome.episodes] == [0, 1]
    assert [(f.index, f.category) for f in outcome.failures] == [(2, "timeout")]


async def test_a_reward_that_never_returns_fails_the_group(tokenizer: ChatTokenizer) -> None:
    async def hang(completions: Any) -> Any:
        await asyncio.Event().wait()

    outcome = await group(tokenizer, single(hang), Replies(tokenizer), spec=spec(episode_timeout=0.2))
    assert [f.category for f in outcome.failures] == ["reward"] * 3
    assert [f.sampled_tokens for f in outcome.failures] == [3] * 3


async def test_a_reward_that_raises_fails_all_and_nan_fails_one(tokenizer: ChatTokenizer) -> None:
    def crash(completions: Any) -> list[float]:
        raise RuntimeError("judge is down")

    def partial(completions: Any) -> list[float]:
        return [0.0, float("nan"), 1.0]

    crashed = await group(tokenizer, single(crash), Replies(tokenizer))
    assert crashed.episodes == []
    category, reason = crashed.main_failure()
    assert category == "reward"
    assert "judge is down" in reason
    some = await group(tokenizer, single(partial), Replies(tokenizer))
    assert [e.index for e in some.episodes] == [0, 2], "a reward of zero is no failure"
    assert [f.index for f in some.failures] == [1]


async def test_a_cancelled_generation_cancels_the_whole_group(tokenizer: ChatTokenizer) -> None:
    ended = []

    async def generate(index: int, turn: int, prompt: Ids, limit: int) -> Sampled:
        if index == 0:
            return await Replies(tokenizer, "", finish="cancelled")(index, turn, prompt, limit)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)
        raise AssertionError

    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(group(tokenizer, single(), generate))
    assert sorted(ended) == [1, 2]


async def test_cancelling_the_group_leaves_nothing_running(tokenizer: ChatTokenizer) -> None:
    started, ended = asyncio.Semaphore(0), []

    async def generate(index: int, turn: int, prompt: Ids, limit: int) -> Sampled:
        started.release()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(index)
        raise AssertionError

    running = asyncio.create_task(group(tokenizer, single(), generate))
    for _ in range(3):
        await asyncio.wait_for(started.acquire(), 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == [0, 1, 2]


async def test_time_is_booked_where_it_is_spent(tokenizer: ChatTokenizer) -> None:
    now = 0.0

    class Timed(Game):
        async def step(self, reply: str) -> Any:
            nonlocal now
            now += 3
            return StepResult(done=True)

    async def generate(*arguments: Any) -> Sampled:
        nonlocal now
        now += 5
        return await Replies(tokenizer)(*arguments)

    async def reward(completions: Any) -> list[float]:
        nonlocal now
        now += 2
        return [0.0]

    factory = EnvironmentFactory(Timed, Rewards((RewardFunction("reward", reward),)))
    outcome = await group(tokenizer, factory, generate, task=task(1), clock=lambda: now)
    assert outcome.episodes[0].seconds == outcome.seconds == {"generate": 5, "environment": 3, "reward": 2}


def test_episode_seeds_depend_on_the_task_and_the_index_alone() -> None:
    seeds = [episode_seed(seed, index) for seed in range(20) for index in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert episode_seed(7, 1) == episode_seed(7, 1)
    assert all(0 <= seed < 2**31 for seed in seeds)
