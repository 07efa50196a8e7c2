"""Guess the number: many turns, with the environment's answers between the replies."""

import random
import re
from collections.abc import Mapping
from typing import Any

from actors.environment import StepResult

RULES = (
    "I am thinking of a whole number from 1 to {high}. Guess it. After each guess I say higher or lower. "
    "Answer with just the number."
)


class Tasks:
    """Secret numbers without end: the same index is always the same number."""

    def __init__(self, high: int = 20) -> None:
        self.high = high

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"secret": random.Random(index).randint(1, self.high), "high": self.high}


class GuessTheNumber:
    """Worth 1 for the first guess and less for each further one; 0 if the number is not found in `turns`."""

    def __init__(self, turns: int = 5) -> None:
        self.turns = turns
        self.used = 0
        self.secret = 0

    def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        self.secret = task["secret"]
        return [{"role": "user", "content": RULES.format(high=task["high"])}]

    def step(self, reply: str) -> StepResult:
        self.used += 1
        numbers = re.findall(r"\d+", reply)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.secret:
            reward = 1.0 - (self.used - 1) / self.turns
            return StepResult(reward=reward, done=True, metrics={"solved": 1.0, "turns": self.used})
        if self.used == self.turns:
            return StepResult(done=True, metrics={"solved": 0.0, "turns": self.used})
        if guess is None:
            answer = "That is no number. Answer with just the number."
        else:
            answer = "Higher." if guess < self.secret else "Lower."
        return StepResult(messages=[{"role": "user", "content": answer}])
