"""Credit: how many groups may be issued now. Pure arithmetic, so that it can be checked by brute force.

The window counts what is *served*, not what is committed: with `head` alone, fast actors would sample a version that
is about to be old, and a good part of the groups would be dropped as too stale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CreditRule:
    """The numbers that bound how far generation may run ahead."""

    groups_per_step: int
    max_staleness: int
    publish_every: int
    mean_staleness: float | None = None
    """The mean staleness of waiting groups beyond which the window shrinks; None: it never does."""

    @property
    def window(self) -> int:
        """W: the groups that may be open at once while everything committed is active.

        Consumed first in first out, the oldest token trained is then exactly `max_staleness` versions old.
        """
        return (self.publish_every * self.max_staleness + 1) * self.groups_per_step

    def credit(self, *, head: int, active: int, open_groups: int, waiting_staleness: float = 0.0) -> int:
        """Groups that may be issued now; 0 or less means none.

        `waiting_staleness` is the mean staleness of the groups that wait in the buffer. Where it exceeds its bound, the
        window shrinks in proportion, down to one step's groups: fewer groups wait, each for a shorter time. The learner
        goes on meanwhile with what there is; were it to wait, nothing would grow fresher.
        """
        window = (self.publish_every * (self.max_staleness - (head - active)) + 1) * self.groups_per_step
        if self.mean_staleness is not None and waiting_staleness > self.mean_staleness:
            shrunk = max(self.groups_per_step, int(window * self.mean_staleness / waiting_staleness))
            window = min(window, shrunk)
        return window - open_groups

    def too_stale(self, *, version: int, head: int) -> bool:
        """Whether a group sampled under `version` may no longer be trained on at the step that starts from `head`."""
        return version < head - self.max_staleness
