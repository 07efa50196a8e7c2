"""Environments: how an episode goes.

An environment is a class of the user's with `reset(task, seed)` and `step(reply)`, sync or async; each episode gets
a fresh instance. Without one, an episode is a single reply to the task's prompt, scored by reward functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from actors.calls import EpisodeError as EpisodeError
from actors.rewards import Rewards, load_rewards
from broker.chat import ChatMessage, Prompt
from broker.code import load_object
from broker.errors import ConfigError, UserCodeError
from broker.runspec import EnvironmentSection, TasksSection


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an environment answers to a reply.

    `messages` come after the reply. `reward` is added to the episode's. `done` ends the episode. `metrics` are
    logged, the last value of each. `history`, if given, replaces the whole conversation instead of extending it.
    """

    messages: Sequence[ChatMessage] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    history: Sequence[ChatMessage] | None = None


class Environment(Protocol):
    """One episode's world. The methods may also be plain (not async) ones: each call then runs in a thread of its own.

    A method `close()`, if there is one, is called when the episode ends, however it ends.
    """

    async def reset(self, task: Mapping[str, Any], seed: int) -> list[ChatMessage] | str:
        """Start the episode of `task` (the task source's row) and return its prompt."""

    async def step(self, reply: str) -> StepResult:
        """Answer the model's reply."""


class SingleTurn:
    """The environment of a run that names none: the task's prompt, one reply, done. Rewards come from functions."""

    def __init__(self, prompt_column: str) -> None:
        self._prompt_column = prompt_column

    async def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        """The task's prompt column. Raises EpisodeError when there is none."""
        if self._prompt_column not in task:
            raise EpisodeError("task", f"the task has no column {self._prompt_column!r}; it has {', '.join(task)}")
        return task[self._prompt_column]

    async def step(self, reply: str) -> StepResult:
        return StepResult(done=True)


@dataclass(frozen=True, slots=True)
class EnvironmentFactory:
    """Makes one environment per episode, and holds the reward functions that score what it gave."""

    make: Callable[[], Any]
    rewards: Rewards


def load_environment(
    section: EnvironmentSection, tasks: TasksSection, roots: Sequence[Path] = ()
) -> EnvironmentFactory:
    """Import and check the run's environment and rewards. Raises UserCodeError or ConfigError before any episode."""
    rewards = load_rewards(section, roots)
    if section.environment:
        return EnvironmentFactory(make=_environment_class(section, roots), rewards=rewards)
    if not rewards.functions:
        raise ConfigError(
            "environment: nothing scores an episode. Write environment.rewards = ['path/to/file.py:function'], or "
            "environment.environment = 'path/to/file.py:Class'"
        )
    return EnvironmentFactory(make=lambda: SingleTurn(tasks.prompt_column), rewards=rewards)


def check_prompt(value: object) -> Prompt:
    """`value` as a prompt. Raises ValueError that says what is wrong, unless it is a string or a list of messages."""
    return value if isinstance(value, str) else check_messages(value)


def check_messages(value: object) -> list[ChatMessage]:
    """`value` as chat messages. Raises ValueError that says what is wrong."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected a list of chat messages, got {type(value).__name__}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise ValueError(f'expected messages such as {{"role": "user", "content": "..."}}, got {message!r:.200}')
    return list(value)


def _environment_class(section: EnvironmentSection, roots: Sequence[Path]) -> Callable[[], Any]:
    spec = section.environment
    found = load_object(spec, roots=roots)
    if not isinstance(found, type):
        raise UserCodeError(
            f"environment.environment: expected {spec} to be a class, got {type(found).__name__}. "
            "Write a class with the methods reset(self, task, seed) and step(self, reply)"
        )
    for method, arguments in (("reset", "task, seed"), ("step", "reply")):
        function = getattr(found, method, None)
        if not callable(function):
            raise UserCodeError(
                f"environment.environment: {spec} has no method {method}; write "
                f"`def {method}(self, {arguments})` in it (async or not)"
            )
        try:
            inspect.signature(function).bind(None, *arguments.split(", "))
        except TypeError:
            raise UserCodeError(
                f"environment.environment: {spec}.{method}{inspect.signature(function)} cannot be called as "
                f"{method}({arguments}); write `def {method}(self, {arguments})`"
            ) from None
    try:
        inspect.signature(found).bind(**section.arguments)
    except TypeError as error:
        raise UserCodeError(
            f"environment.arguments: {spec}{inspect.signature(found)} cannot be made with "
            f"{section.arguments}: {error}. Write the class's own keyword arguments there"
        ) from None
    return lambda: found(**section.arguments)
