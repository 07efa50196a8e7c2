"""The activator: drives the newest committed version to where every replica serves it.

The state machine is `activation.Activation`; this is the shell that shows it the replicas and writes the outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from broker import faults
from broker.registry import Roster
from learner.activation import Activation, Pace, ReplicaView, State, backoff
from learner.session import Session
from observability import tracing

log = logging.getLogger(__name__)

TROUBLE_SECONDS = 3.0
"""An activation that takes longer than this is worth telling a person about."""

LOOK_SECONDS = 0.5
"""Replicas are looked at whenever one says something, and this often at least."""


class Activator:
    """Runs beside training; never holds it up but through the credit that an inactive head costs."""

    def __init__(
        self,
        session: Session,
        roster: Roster,
        *,
        fleet: str,
        timeout: float,
        min_replicas: int,
        on_active: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._roster = roster
        self._fleet = fleet
        self._timeout = timeout
        self._min_replicas = min_replicas
        self._on_active = on_active
        self._clock = clock
        self.wake = asyncio.Event()
        """Set when the head moved or a replica said something."""
        self.traces: dict[int, Mapping[str, str]] = {}
        """The headers of the step that makes each version. Known before its commit: replicas may be as quick."""
        self.trouble = ""
        """Why the newest version is not active yet, for people."""
        self._pace = Pace(timeout)
        self._told: dict[str, str] = {}
        self.seconds = 0.0
        """How long the last activation took, from announcement to active everywhere."""

    async def run(self) -> None:
        attempt = 0
        while True:
            head = self._session.head
            if head.active >= head.head or head.adapter is None:
                self.trouble = ""
                await self._look()
                continue
            self.traces = {version: trace for version, trace in self.traces.items() if version >= head.head}
            trace = self.traces.get(head.head)
            with tracing.span("activate", parent=trace, run=head.run, version=head.head) as span:
                began = self._clock()
                state = await self._drive(head.head, head.adapter.name)
                span.set_attribute("farflung.outcome", state or "superseded")
            if state == "active":
                attempt = 0
                self.seconds = self._clock() - began
                log.info("version %d is active (%.2f s)", head.head, self.seconds)
                self._on_active()
            elif state == "failed":
                attempt += 1
                wait = backoff(attempt)
                log.warning("version %d failed on the fleet, again in %.0f s: %s", head.head, wait, self.trouble)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        while self._session.head.head == head.head and not self._served(head.adapter.name):
                            await self._look()

    async def _drive(self, version: int, name: str) -> State | None:
        """One attempt; None when a newer version was committed meanwhile."""
        now = self._clock()
        since = self._pace.announce(name, self._views(), now)
        activation = Activation(version, name, frozenset(since), now, self._timeout, self._min_replicas, since)
        faults.reached("learner.activating")
        while self._session.head.head == version:
            views, now = self._views(), self._clock()
            self._pace.observe(views, now)
            state = activation.observe(views, now)
            self._pace.leave(name, activation.expelled)
            for replica, reason in activation.expelled.items():
                if self._told.get(replica) != reason:
                    log.warning("replica %s is left behind at version %d: %s", replica, version, reason)
            self._told = dict(activation.expelled)
            if state == "active":
                await self._session.activate(version)
                self._pace.activated(name)
                return state
            left = self._pace.left_behind(name, views) | activation.expelled
            reasons = "; ".join(f"{replica}: {reason}" for replica, reason in sorted(left.items()))
            present = len(views)
            if now - activation.announced < TROUBLE_SECONDS and not reasons:
                await self._look()
                continue
            self.trouble = (
                f"version {version} waits for {self._min_replicas} replica(s) to serve it, {present} present"
                + (f" ({reasons})" if reasons else "")
            )
            if state == "failed":
                return state
            await self._look()
        return None

    async def _look(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS):
                await self.wake.wait()
        self.wake.clear()
        self._pace.observe(self._views(), self._clock())

    def left_behind(self) -> str:
        """Which replicas lack the newest version and are not waited for, and why, for people; empty when none."""
        adapter = self._session.head.adapter
        left = self._pace.left_behind(adapter.name, self._views()) if adapter is not None else {}
        return "; ".join(f"{replica} is left behind: {reason}" for replica, reason in sorted(left.items()))

    def _served(self, name: str) -> bool:
        """Whether enough replicas serve a version for another attempt at it to succeed at once."""
        return sum(name in view.confirmed for view in self._views()) >= self._min_replicas

    def _views(self) -> list[ReplicaView]:
        return [
            ReplicaView(node.id, frozenset(node.confirmed), node.refused)
            for node in self._roster.present("replica", self._fleet)
            if node.state == "ready"
        ]
