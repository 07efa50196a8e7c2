"""Named points at which a component may be killed or stopped, so that tests can reach every one of them.

A component calls `reached` as it passes a point. Outside tests nothing listens and the call costs a comparison. The
environment variable FARFLUNG_FAULT makes a process meet its fate at a point: `kill learner.before_commit 3` sends it
SIGKILL the third time it gets there, `stop actor.published` sends it SIGSTOP the first time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from broker.errors import ConfigError

VARIABLE = "FARFLUNG_FAULT"

POINTS = (
    "learner.claimed",
    "learner.adopted",
    "learner.issue",
    "learner.issued",
    "learner.batch_taken",
    "learner.after_backward",
    "learner.after_optimizer",
    "learner.adapter_uploaded",
    "learner.adapter_offered",
    "learner.optimizer_uploaded",
    "learner.state_uploaded",
    "learner.before_commit",
    "learner.after_commit",
    "learner.before_acknowledgements",
    "learner.acknowledged",
    "learner.activating",
    "learner.before_activation",
    "learner.after_activation",
    "learner.sweeping",
    "actor.leased",
    "actor.mid_episode",
    "actor.blob_stored",
    "actor.published",
    "actor.acknowledged",
    "replica.fetched",
    "replica.loaded",
)
"""Every point there is, in the order of a step's life."""

Hook = Callable[[str], None]

_hook: Hook | None = None


def reached(point: str) -> None:
    """The process is at `point`. Safe to call from any thread."""
    if _hook is not None:
        _hook(point)


def install(hook: Hook | None) -> None:
    """Call `hook` with each point that is reached; None: nothing listens."""
    global _hook
    _hook = hook


def from_environment(environment: Mapping[str, str]) -> None:
    """Install the fault that FARFLUNG_FAULT names, if it names one. Raises ConfigError when it is none."""
    text = environment.get(VARIABLE, "")
    if not text:
        return
    what, _, rest = text.partition(" ")
    point, _, count = rest.partition(" ")
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if what not in signals or point not in POINTS or not (count or "1").isdecimal():
        raise ConfigError(f"{VARIABLE}={text!r} is no fault; expected `kill POINT [N]` or `stop POINT [N]`")
    left = int(count or "1")

    def strike(here: str) -> None:
        nonlocal left
        if here == point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signals[what])

    install(strike)
