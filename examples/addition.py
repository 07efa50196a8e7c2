"""Two-digit addition: the smallest task on which a small model visibly learns."""

import re


class Tasks:
    """Sums of two numbers from 10 to 49: every pair once per epoch."""

    LOW, HIGH = 10, 49

    def __len__(self) -> int:
        return (self.HIGH - self.LOW + 1) ** 2

    def __getitem__(self, index: int) -> dict[str, object]:
        a, b = divmod(index, self.HIGH - self.LOW + 1)
        a, b = a + self.LOW, b + self.LOW
        question = f"What is {a} + {b}? Answer with just the number."
        return {"prompt": [{"role": "user", "content": question}], "answer": a + b}


def reward(completions: list[list[dict[str, str]]], answer: list[int], **columns: object) -> list[float]:
    """1.0 when the last integer of the reply is the sum, else 0.0."""
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        numbers = re.findall(r"\d+", completion[-1]["content"])
        scores.append(1.0 if numbers and int(numbers[-1]) == expected else 0.0)
    return scores
