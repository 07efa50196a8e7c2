"""Which actor has which task of an evaluation. Pure: who is there and what came back in, whom to ask out.

Invariant: each task ends once, as done or as failed. A task whose actor is gone is given to another one, as often as
there is hope; one that failed gets a second attempt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from broker.messages import EVALUATION_SHARE

ATTEMPTS = 2
"""How often a task is tried whose samples did not all come to a reward: what is flaky shows once."""

LOSSES = 5
"""A task that this many actors were lost with has failed: it may be what ends them."""

ASIDE_SECONDS = 5.0
"""An actor that refused a task is asked again after this long: the news of a run may not have reached it."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A task that is with an actor. `attempt` counts up over the task's assignments."""

    index: int
    actor: str
    attempt: int
    since: float


def allowance(capacity: int, samples: int) -> int:
    """How many tasks of `samples` samples an actor that runs `capacity` episodes has room for, one at least."""
    return max(1, capacity // EVALUATION_SHARE // samples)


class Rota:
    """The tasks 0 .. `tasks` - 1, of `samples` samples each; one that is out for longer than `seconds` is overdue."""

    def __init__(self, tasks: int, samples: int, *, seconds: float) -> None:
        self._samples = samples
        self._seconds = seconds
        self._waiting = deque(range(tasks))
        self._attempts = [0] * tasks
        self._failures = [0] * tasks
        self._losses = [0] * tasks
        self._aside: dict[str, float] = {}
        self.out: dict[int, Assignment] = {}
        self.done: set[int] = set()
        self.failed: dict[int, str] = {}
        """Tasks that have no score, with the reason."""
        self.refusals: dict[str, str] = {}
        """Why actors do not take tasks of this evaluation."""

    @property
    def finished(self) -> bool:
        return not self._waiting and not self.out

    def assign(self, actors: Mapping[str, int], now: float) -> list[Assignment]:
        """Give out what may be given out; `actors` are those that are there, with their capacity."""
        for assignment in list(self.out.values()):
            if assignment.actor not in actors:
                self._lose(assignment)
            elif now - assignment.since > self._seconds:
                self.fail(assignment.index, f"timeout: {assignment.actor} has not answered for {self._seconds:.0f} s")
        room = {
            actor: allowance(capacity, self._samples) - sum(other.actor == actor for other in self.out.values())
            for actor, capacity in actors.items()
            if now >= self._aside.get(actor, now)
        }
        given = []
        while self._waiting and any(free > 0 for free in room.values()):
            actor = max(sorted(room), key=lambda name: room[name])
            index = self._waiting.popleft()
            self._attempts[index] += 1
            self.out[index] = Assignment(index, actor, self._attempts[index], now)
            room[actor] -= 1
            given.append(self.out[index])
        return given

    def _lose(self, assignment: Assignment) -> None:
        index = assignment.index
        del self.out[index]
        self._losses[index] += 1
        if self._losses[index] >= LOSSES:
            self.failed[index] = f"actors: {LOSSES} were lost with it, the last was {assignment.actor}"
        else:
            self._waiting.appendleft(index)

    def complete(self, index: int) -> bool:
        """A task has its score. False when it has ended already, with what another actor answered."""
        if index not in self.out and index not in self._waiting:
            return False
        self._take_out(index)
        self.done.add(index)
        return True

    def fail(self, index: int, reason: str) -> None:
        """An attempt at a task that is out came to nothing."""
        self._take_out(index)
        self._failures[index] += 1
        if self._failures[index] >= ATTEMPTS:
            self.failed[index] = reason
        else:
            self._waiting.append(index)

    def refuse(self, index: int, reason: str, now: float) -> None:
        """The actor of a task that is out does not take it: others may, and so may it after a while."""
        actor = self.out.pop(index).actor
        self._waiting.appendleft(index)
        self._aside[actor] = now + ASIDE_SECONDS
        self.refusals[actor] = reason

    def _take_out(self, index: int) -> None:
        self.out.pop(index, None)
        if index in self._waiting:
            self._waiting.remove(index)
