"""Episodes and groups: from a task to scored trajectories.

A group's episodes run concurrently, each in a fresh environment. An episode ends well (its environment said so, or a
limit cut it: a truncated episode is a valid sample), or fails with a category and a reason; a reward of zero is
neither. A flaky environment or engine gets a second attempt. One failed episode takes no other with it; only a
reward function that cannot score the group fails all of its episodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from actors.calls import EpisodeError, call_user_code, describe
from actors.conversation import Conversation
from actors.environment import EnvironmentFactory, StepResult, check_messages, check_prompt
from broker.chat import ChatTokenizer, Prompt, with_system_prompt
from broker.errors import GenerationError, ModelError, PromptTooLong, TaskSourceError
from broker.messages import FailureKind, Ids, Task
from broker.runspec import RunSpec
from broker.trajectories import Episode
from observability import metrics, tracing

ATTEMPTS = 2
"""How often an episode is tried when what failed may be flaky: the fault that a fresh start cures shows once."""


CLOSE_TIMEOUT = 10.0
"""Seconds an environment has to close: enough to stop a container, short against an episode."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One reply: token ids [n] with the stop token, their logprobs [n], and who served it under which version."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish: Literal["stop", "length", "cancelled"]
    version: int
    replica: str
    seconds: float = 0.0


Generate = Callable[[int, int, Ids, int], Awaitable[Sampled]]
"""Samples a reply: (episode, turn, prompt ids, max_new_tokens). Called anew, with the same numbers, in a second
attempt. Raises GenerationError."""

Clock = Callable[[], float]
"""Seconds on a clock that only moves forward."""


@dataclass(slots=True)
class UnscoredEpisode:
    """An episode that ended well. `reward` is the environment's part; functions may add theirs."""

    index: int
    prompt: Prompt
    conversation: Conversation
    reward: float = 0.0
    truncated: bool = False
    replicas: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "environment": 0.0})

    @property
    def completion(self) -> Any:
        """What reward functions see: a string for a plain string prompt, else a list of messages."""
        messages = self.conversation.completion
        if isinstance(self.prompt, str):
            return "".join(str(message["content"]) for message in messages)
        return messages

    @property
    def completion_ids(self) -> list[int]:
        """The sampled tokens, in order."""
        return [int(token) for row in self.conversation.rows() for token in row.ids[row.trained]]

    def scored(self, reward: float, parts: Mapping[str, float], seconds: float) -> Episode:
        """The finished episode: `reward` added to the environment's own, `seconds` spent on scoring it."""
        return Episode(
            index=self.index,
            rows=self.conversation.rows(),
            reward=self.reward + reward,
            parts=dict(parts),
            turns=self.conversation.turns,
            truncated=self.truncated,
            replicas=self.replicas,
            extensions=self.conversation.extensions,
            forks=self.conversation.forks,
            seconds={**self.seconds, "reward": seconds},
            metrics=self.metrics,
        )


@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """An episode that failed for good, and how many tokens it had sampled."""

    index: int
    category: FailureKind
    reason: str
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of a group. `seconds` adds up its episodes' generate and environment times, and its scoring."""

    episodes: list[Episode]
    failures: list[EpisodeFailure]
    seconds: dict[str, float]
    retries: int

    @property
    def lengths(self) -> list[int]:
        """Sampled tokens of each episode, good or failed, by index."""
        by_index = {episode.index: episode.sampled_tokens for episode in self.episodes}
        by_index |= {failure.index: failure.sampled_tokens for failure in self.failures}
        return [by_index[index] for index in sorted(by_index)]

    def main_failure(self) -> tuple[FailureKind, str]:
        """The commonest category of failure, and the first reason of that category. Needs at least one failure."""
        category = Counter(failure.category for failure in self.failures).most_common(1)[0][0]
        return category, next(failure.reason for failure in self.failures if failure.category == category)


def episode_seed(task_seed: int, index: int) -> int:
    """The seed of one episode's environment, in 0 .. 2**31 - 1: the same wherever and however often it runs."""
    digest = hashlib.sha256(f"{task_seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


async def run_episode(
    *,
    task: Task,
    index: int,
    factory: EnvironmentFactory,
    tokenizer: ChatTokenizer,
    spec: RunSpec,
    generate: Generate,
    context: int,
    clock: Clock,
) -> UnscoredEpisode:
    """One attempt at `task`, in a fresh environment, within `episode_timeout`. `context` is the model's, in tokens.

    Raises EpisodeError, and asyncio.CancelledError when a generation was cancelled.
    """
    attempt = _Attempt(task, index, tokenizer, spec, generate, context, clock)
    began = clock()
    try:
        with tracing.span("episode", group=task.group, episode=index) as span:
            async with asyncio.timeout(spec.environment.episode_timeout):
                episode = await attempt.run(factory)
            span.set_attribute("farflung.tokens", attempt.sampled_tokens)
        metrics.record("farflung.episode.seconds", clock() - began)
        return episode
    except TimeoutError:
        failure = EpisodeError(
            "timeout", f"not done after {spec.environment.episode_timeout:g} s (environment.episode_timeout)"
        )
        failure.sampled_tokens = attempt.sampled_tokens
        raise failure from None
    except EpisodeError as failure:
        failure.sampled_tokens = attempt.sampled_tokens
        raise


async def run_group(
    *,
    task: Task,
    factory: EnvironmentFactory,
    tokenizer: ChatTokenizer,
    spec: RunSpec,
    generate: Generate,
    context: int,
    clock: Clock,
) -> GroupOutcome:
    """All episodes of `task`, concurrently, then their scores.

    Episodes that `group_timeout` finds unfinished fail with the category "timeout". Raises asyncio.CancelledError
    when one of its generations was cancelled, or when it is cancelled itself; no episode runs on then.
    """
    retries = 0

    async def attempt(index: int) -> UnscoredEpisode | EpisodeError:
        nonlocal retries
        for last in (False,) * (ATTEMPTS - 1) + (True,):
            try:
                return await run_episode(
                    task=task,
                    index=index,
                    factory=factory,
                    tokenizer=tokenizer,
                    spec=spec,
                    generate=generate,
                    context=context,
                    clock=clock,
                )
            except EpisodeError as failure:
                if last or not failure.retryable:
                    return failure
                retries += 1
        raise AssertionError("unreachable")

    outcomes = await _within(
        [attempt(index) for index in range(task.group_size)], seconds=spec.environment.group_timeout
    )
    good = [outcome for outcome in outcomes if isinstance(outcome, UnscoredEpisode)]
    failures = {index: outcome for index, outcome in enumerate(outcomes) if isinstance(outcome, EpisodeError)}
    began = clock()
    episodes, unscored = await _score(good, task, factory, spec, clock)
    failures |= unscored
    return GroupOutcome(
        episodes=episodes,
        failures=[
            EpisodeFailure(index, failure.category, str(failure), failure.sampled_tokens)
            for index, failure in sorted(failures.items())
        ],
        seconds={
            "generate": sum(episode.seconds["generate"] for episode in good),
            "environment": sum(episode.seconds["environment"] for episode in good),
            "reward": clock() - began,
        },
        retries=retries,
    )


async def _within(attempts: list[Any], *, seconds: float) -> list[UnscoredEpisode | EpisodeError]:
    """The results of `attempts`; those not there after `seconds` are ended and count as timed out."""
    tasks = [asyncio.ensure_future(attempt) for attempt in attempts]
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*tasks)
    except TimeoutError:
        pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    late = EpisodeError("timeout", f"not done when the group's time was up after {seconds:g} s (group_timeout)")
    return [late if task.cancelled() else task.result() for task in tasks]


async def _score(
    episodes: list[UnscoredEpisode], task: Task, factory: EnvironmentFactory, spec: RunSpec, clock: Clock
) -> tuple[list[Episode], dict[int, EpisodeError]]:
    """Score a group's good episodes in one call of each reward function."""
    if not episodes:
        return [], {}
    began = clock()
    limit = spec.environment.episode_timeout
    try:
        with tracing.span("reward", group=task.group, episodes=len(episodes)):
            async with asyncio.timeout(limit):
                scores = await factory.rewards.score(
                    prompts=[episode.prompt for episode in episodes],
                    completions=[episode.completion for episode in episodes],
                    completion_ids=[episode.completion_ids for episode in episodes],
                    columns=task.columns,
                )
    except TimeoutError:
        scores = [EpisodeError("reward", f"not scored after {limit:g} s (environment.episode_timeout)")] * len(episodes)
    except EpisodeError as failure:
        scores = [failure] * len(episodes)
    seconds = clock() - began
    good: list[Episode] = []
    failed: dict[int, EpisodeError] = {}
    for episode, score in zip(episodes, scores, strict=True):
        if isinstance(score, EpisodeError):
            failed[episode.index] = EpisodeError(score.category, str(score))
            failed[episode.index].sampled_tokens = episode.conversation.sampled_tokens
        elif not np.isfinite(episode.reward + score.reward):
            failed[episode.index] = EpisodeError("reward", "the rewards of the environment and the functions overflow")
            failed[episode.index].sampled_tokens = episode.conversation.sampled_tokens
        else:
            good.append(episode.scored(score.reward, score.parts, seconds))
    return good, failed


class _Attempt:
    """One walk through an environment."""

    def __init__(
        self,
        task: Task,
        index: int,
        tokenizer: ChatTokenizer,
        spec: RunSpec,
        generate: Generate,
        context: int,
        clock: Clock,
    ) -> None:
        self._task = task
        self._index = index
        self._tokenizer = tokenizer
        self._spec = spec
        self._generate = generate
        self._context = context
        self._clock = clock
        self._episode: UnscoredEpisode | None = None
        self._environment_seconds = 0.0

    @property
    def sampled_tokens(self) -> int:
        return self._episode.conversation.sampled_tokens if self._episode else 0

    async def run(self, factory: EnvironmentFactory) -> UnscoredEpisode:
        environment = await self._call("__init__", factory.make)
        try:
            episode = self._episode = await self._reset(environment)
            await self._play(environment, episode)
        finally:
            await self._close(environment)
        episode.seconds["environment"] = self._environment_seconds
        return episode

    async def _reset(self, environment: Any) -> UnscoredEpisode:
        seed = episode_seed(self._task.seed, self._index)
        value = await self._call("reset", environment.reset, self._task.columns, seed)
        try:
            prompt = with_system_prompt(check_prompt(value), self._spec.environment.system_prompt)
            conversation = Conversation(self._tokenizer, prompt)
        except (ValueError, TypeError, ModelError, TaskSourceError) as error:
            raise EpisodeError("task", f"not a usable prompt: {error}") from error
        return UnscoredEpisode(index=self._index, prompt=prompt, conversation=conversation)

    async def _play(self, environment: Any, episode: UnscoredEpisode) -> None:
        for turn in range(self._spec.environment.max_turns):
            sampled = await self._sample(episode, turn)
            if sampled is None:
                episode.truncated = True
                return
            reply = episode.conversation.add_reply(sampled.token_ids, sampled.logprobs, sampled.version)
            episode.replicas.append(sampled.replica)
            episode.truncated |= sampled.finish == "length"
            result = await self._call("step", environment.step, reply)
            self._take(episode, result)
            if result.done:
                return
            self._continue(episode.conversation, result)
        episode.truncated = True

    async def _sample(self, episode: UnscoredEpisode, turn: int) -> Sampled | None:
        """The next reply, or None when the context is full. Raises EpisodeError if it is before the first reply."""
        prompt = episode.conversation.prompt
        room = self._context - len(prompt)
        began = self._clock()
        try:
            if room <= 0:
                raise PromptTooLong(
                    f"the prompt has {len(prompt)} tokens and the model's context {self._context}: no room for a reply"
                )
            limit = min(self._spec.sampling.max_new_tokens, room)
            sampled = await self._generate(self._index, turn, prompt, limit)
        except PromptTooLong as error:
            if self.sampled_tokens:
                return None
            raise EpisodeError("task", str(error)) from error
        except GenerationError as error:
            raise EpisodeError("generation", str(error), retryable=error.retryable) from error
        finally:
            episode.seconds["generate"] += self._clock() - began
        if sampled.finish == "cancelled":
            raise asyncio.CancelledError(f"generation of turn {turn} of episode {self._index} was cancelled")
        return sampled

    def _take(self, episode: UnscoredEpisode, result: object) -> None:
        """Book what the environment answered. Raises EpisodeError for an answer that is none."""
        if not isinstance(result, StepResult):
            raise EpisodeError(
                "environment", f"step() returned {type(result).__name__}; expected actors.environment.StepResult"
            )
        try:
            reward = float(result.reward or 0.0)
            metrics = {str(name): float(value) for name, value in result.metrics.items()}
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise EpisodeError(
                "environment", f"step() returned a reward or metrics that are no numbers: {error}"
            ) from error
        if not np.isfinite(reward):
            raise EpisodeError("environment", f"step() returned the reward {reward}; expected a finite number")
        episode.reward += reward
        episode.metrics |= metrics

    def _continue(self, conversation: Conversation, result: StepResult) -> None:
        try:
            if result.history is not None:
                conversation.rewrite(check_messages(result.history))
            else:
                conversation.extend(check_messages(result.messages))
        except (ValueError, TypeError, ModelError) as error:  # TypeError: text that no tokenizer takes
            raise EpisodeError("environment", f"step() gave unusable messages: {error}") from error

    async def _close(self, environment: Any) -> None:
        """Close the environment, if it can be. The episode is over by then: trouble is logged, and costs nothing."""
        close = getattr(environment, "close", None)
        if not callable(close):
            return
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._call("close", close)
        except (EpisodeError, TimeoutError) as error:
            log.warning("environment not closed: %s", error or f"no answer in {CLOSE_TIMEOUT:g} s")

    async def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the environment's method `name`; what it raises becomes an EpisodeError that may be retried."""
        began = self._clock()
        try:
            return await call_user_code(function, *arguments)
        except EpisodeError:
            raise
        except Exception as error:
            raise EpisodeError("environment", f"{name} raised {describe(error)}", retryable=True) from error
        finally:
            self._environment_seconds += self._clock() - began
