"""Environments are checked when they are loaded, not in the middle of a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.calls import call_user_code
from actors.environment import (
    EpisodeError,
    SingleTurn,
    StepResult,
    check_messages,
    check_prompt,
    load_environment,
)
from broker.errors import ConfigError, EpisodeFailed, UserCodeError
from broker.runspec import EnvironmentSection, RunSpec, TasksSection
from learner.tasks import load_tasks

TASKS = TasksSection(source="x.jsonl")
EXAMPLES = Path(__file__).parents[2] / "examples"


def load(tmp_path: Path, source: str, **section: Any) -> Any:
    (tmp_path / "world.py").write_text(source)
    return load_environment(EnvironmentSection(environment="world.py:World", **section), TASKS, [tmp_path])


def test_each_episode_gets_a_fresh_environment_with_the_configured_arguments(tmp_path: Path) -> None:
    source = (
        "class World:\n    def __init__(self, size=1): self.size = size\n"
        "    def reset(self, task, seed): ...\n    async def step(self, reply): ...\n"
    )
    factory = load(tmp_path, source, arguments={"size": 5})
    one, two = factory.make(), factory.make()
    assert one is not two
    assert one.size == 5


@pytest.mark.parametrize(
    ("source", "arguments", "told"),
    [
        ("World = 3", {}, r"expected world\.py:World to be a class, got int"),
        ("class World:\n    def reset(self, task, seed): ...", {}, r"no method step; write `def step\(self, reply\)`"),
        ("class World:\n    def step(self, reply): ...", {}, r"no method reset; write `def reset\(self, task, seed\)`"),
        (
            "class World:\n    def reset(self): ...\n    def step(self, reply): ...",
            {},
            r"cannot be called as reset\(task, seed\)",
        ),
        (
            "class World:\n    def reset(self, task, seed): ...\n    def step(self, reply): ...",
            {"speed": 2},
            r"environment\.arguments.*speed",
        ),
        ("raise OSError('no disk')", {}, r"world\.py:1: OSError: no disk"),
    ],
)
def test_an_unusable_environment_is_refused_with_what_to_write(
    tmp_path: Path, source: str, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserCodeError, match=told):
        load(tmp_path, source, arguments=arguments)


def test_a_run_that_nothing_scores_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"nothing scores an episode.*environment\.rewards"):
        load_environment(EnvironmentSection(), TASKS)


async def test_without_an_environment_an_episode_is_the_prompt_and_one_reply() -> None:
    factory = load_environment(EnvironmentSection(rewards=["addition.py:reward"]), TASKS, [EXAMPLES])
    environment = factory.make()
    assert isinstance(environment, SingleTurn)
    assert await environment.reset({"prompt": "2+3="}, 0) == "2+3="
    assert (await environment.step("5")).done
    with pytest.raises(EpisodeError, match="no column 'prompt'; it has question") as failure:
        await environment.reset({"question": "2+3="}, 0)
    assert failure.value.category == "task"
    assert isinstance(failure.value, EpisodeFailed)


def test_prompts_and_messages_are_checked() -> None:
    assert check_prompt("text") == "text"
    assert check_messages([{"role": "user", "content": "x"}]) == [{"role": "user", "content": "x"}]
    for bad in (3, None, {"role": "user"}):
        with pytest.raises(ValueError, match="expected a list of chat messages"):
            check_prompt(bad)
    with pytest.raises(ValueError, match="expected messages such as"):
        check_messages([{"role": "user"}])


async def test_a_slow_sync_method_never_stalls_the_event_loop() -> None:
    release = threading.Event()
    waiting = [asyncio.create_task(call_user_code(release.wait, 30)) for _ in range(100)]
    await asyncio.wait_for(asyncio.sleep(0), timeout=5)
    release.set()
    assert await asyncio.wait_for(asyncio.gather(*waiting), timeout=20) == [True] * 100


async def test_user_code_may_be_sync_async_or_an_object() -> None:
    class Callable:
        async def __call__(self, value: int) -> int:
            return value + 1

    async def double(value: int) -> int:
        return 2 * value

    def interrupt() -> None:
        raise SystemExit(3)

    assert await call_user_code(lambda value: value, 1) == 1
    assert await call_user_code(double, 2) == 4
    assert await call_user_code(functools.partial(double), 3) == 6
    assert await call_user_code(lambda *values: double(sum(values)), 1, 2) == 6
    assert await call_user_code(Callable(), 4) == 5
    with pytest.raises(ZeroDivisionError):
        await call_user_code(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await call_user_code(interrupt)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await call_user_code(lambda: next(iter(())))


@pytest.mark.parametrize("name", ["addition", "guess_the_number"])
def test_the_examples_are_valid_runs(name: str) -> None:
    spec = msgspec.convert(tomllib.loads((EXAMPLES / f"{name}.toml").read_text()), RunSpec)
    factory = load_environment(spec.environment, spec.tasks, [EXAMPLES])
    source = load_tasks(spec.tasks, [EXAMPLES], needs_prompt=not spec.environment.environment)
    assert factory.make() is not None
    assert source.row(5)


def test_the_guessing_game_rewards_few_turns() -> None:
    section = EnvironmentSection(environment="guess_the_number.py:GuessTheNumber", arguments={"turns": 4})
    factory = load_environment(section, TASKS, [EXAMPLES])
    task = {"secret": 7, "high": 20}

    def play(*guesses: str) -> tuple[list[str], StepResult]:
        game = factory.make()
        assert "from 1 to 20" in game.reset(task, 0)[0]["content"]
        results = [game.step(guess) for guess in guesses]
        return [message["content"] for result in results for message in result.messages], results[-1]

    assert play("7") == ([], StepResult(reward=1.0, done=True, metrics={"solved": 1.0, "turns": 1}))
    said, last = play("3", "I say 12", "7.")
    assert said == ["Higher.", "Lower."]
    assert (last.reward, last.done) == (0.5, True)
    said, last = play("no idea", "1", "2", "3")
    assert said[0].startswith("That is no number")
    assert (last.reward, last.done) == (0.0, True)


async def test_a_coroutine_that_will_not_be_cancelled_is_left_alone_after_its_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.calls.CANCEL_GRACE", 0.05)
    began, released = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        began.set()
        while not released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await released.wait()

    calling = asyncio.create_task(call_user_code(stubborn))
    await began.wait()
    calling.cancel()
    done, _ = await asyncio.wait([calling], timeout=10)
    assert done
    assert calling.cancelled()
    released.set()


async def test_a_coroutine_that_is_cancelled_cleans_up_before_anything_else_happens() -> None:
    began, cleaned = asyncio.Event(), asyncio.Event()

    async def tidy() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.set()

    calling = asyncio.create_task(call_user_code(tidy))
    await began.wait()
    calling.cancel()
    await asyncio.wait([calling], timeout=10)
    assert calling.cancelled()
    assert cleaned.is_set()
