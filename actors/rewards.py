"""Reward functions: what a reply is worth.

They have TRL's signature, `reward(completions, **columns) -> list[float]`, sync or async, and are called once per
group, with all its completions, so that they may compare them. A conversation's completion is a list of messages, a
plain string prompt's is a string. `prompts`, `completion_ids` and every column of the task come as lists of the same
length; a function gets those it names, or all of them if it takes `**kwargs`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from actors.calls import EpisodeError, call_user_code, describe
from broker.code import load_object
from broker.errors import ConfigError, UserCodeError
from broker.runspec import EnvironmentSection

_RESERVED = ("prompt", "prompts", "completion", "completions", "completion_ids")
"""Columns that a function never gets by name, as in TRL: `prompts` and `completions` carry them."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function, the name its values are logged under, and its weight in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Score:
    """What one completion is worth: the weighted sum, and each function's own value."""

    reward: float
    parts: dict[str, float]


@dataclass(frozen=True, slots=True)
class Rewards:
    """The reward functions of a run."""

    functions: tuple[RewardFunction, ...] = ()

    async def score(
        self,
        *,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]],
        columns: Mapping[str, Any],
    ) -> list[Score | EpisodeError]:
        """Score the completions of one group, in order; a bad value is an error in its completion's place.

        A function may answer None for a completion that it does not apply to: it adds nothing. Raises EpisodeError
        when the whole group cannot be scored: a function raised, or returned something else than one value each.
        """
        offered: dict[str, Any] = {
            "prompts": list(prompts),
            "completion_ids": [list(ids) for ids in completion_ids],
            **{name: [value] * len(completions) for name, value in columns.items() if name not in _RESERVED},
        }
        tables = await asyncio.gather(*(_call(reward, completions, offered) for reward in self.functions))
        return [self._sum([table[place] for table in tables]) for place in range(len(completions))]

    def _sum(self, values: Sequence[object]) -> Score | EpisodeError:
        parts = {}
        for reward, value in zip(self.functions, values, strict=True):
            if value is None:
                continue
            try:
                number = float(value) if isinstance(value, SupportsFloat) else math.nan
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not math.isfinite(number):
                return EpisodeError(
                    "reward",
                    f"{reward.name} returned {str(value)[:100]!r} ({type(value).__name__}); expected a finite number",
                )
            parts[reward.name] = number
        total = sum(reward.weight * parts[reward.name] for reward in self.functions if reward.name in parts)
        if not math.isfinite(total):
            return EpisodeError("reward", f"the weighted sum of {parts} is {total}; expected a finite number")
        return Score(reward=float(total), parts=parts)


def load_rewards(section: EnvironmentSection, roots: Sequence[Path] = ()) -> Rewards:
    """Import and check the functions that `section` names. Raises UserCodeError or ConfigError."""
    weights = section.reward_weights or [1.0] * len(section.rewards)
    if len(weights) != len(section.rewards):
        raise ConfigError(
            f"environment.reward_weights: expected one weight per reward function ({len(section.rewards)}), got "
            f"{len(weights)}. Leave it out to weigh all by 1"
        )
    functions: list[RewardFunction] = []
    for spec, weight in zip(section.rewards, weights, strict=True):
        function = load_object(spec, roots=roots)
        if not callable(function) or isinstance(function, type):
            raise UserCodeError(
                f"environment.rewards: expected {spec} to be a function, got {type(function).__name__}. "
                "Write `def name(completions, **columns): return [0.0 for _ in completions]`"
            )
        parameters = inspect.signature(function).parameters
        if "completions" not in parameters and not _takes_any(parameters):
            raise UserCodeError(
                f"environment.rewards: {spec} takes no argument named `completions`. "
                "Write `def name(completions, **columns): ...`"
            )
        name = spec.rpartition(":")[2]
        taken = any(other.name == name for other in functions)
        functions.append(RewardFunction(name=spec if taken else name, function=function, weight=weight))
    return Rewards(tuple(functions))


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())


async def _call(reward: RewardFunction, completions: Sequence[Any], offered: Mapping[str, Any]) -> list[Any]:
    """One function's values, one per completion."""
    parameters = inspect.signature(reward.function).parameters
    arguments = {name: value for name, value in offered.items() if _takes_any(parameters) or name in parameters}
    missing = [
        name
        for name, parameter in parameters.items()
        if name not in arguments
        and name != "completions"
        and parameter.default is inspect.Parameter.empty
        and parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    ]
    if missing:
        raise EpisodeError(
            "reward",
            f"{reward.name} wants the argument {', '.join(missing)}, but the task has no such column; it has "
            f"{', '.join(offered)}",
        )
    try:
        values = await call_user_code(reward.function, completions=list(completions), **arguments)
    except Exception as error:
        raise EpisodeError("reward", f"{reward.name} raised {describe(error)}") from error
    if not isinstance(values, list | tuple) and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, list | tuple):
        raise EpisodeError(
            "reward", f"{reward.name} returned {type(values).__name__}; expected a list with one number per completion"
        )
    if len(values) != len(completions):
        raise EpisodeError(
            "reward",
            f"{reward.name} returned {len(values)} values for {len(completions)} completions; expected as many",
        )
    return list(values)
