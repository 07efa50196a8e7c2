"""The router on the bus: takes generation requests, forwards them, and places again what a dead replica leaves.

The reply never passes through here: a request is forwarded with the asker's own reply address. Load is kept true
from the replicas' reports, which name every request they still have: a request that a replica reports is never placed
again, whichever router placed it. What nobody can serve waits, bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import nats.errors
import numpy as np
from nats.aio.msg import Msg

from broker import names
from broker.bus import Bus
from broker.messages import CancelRequest, GenerateRefused, GenerateRequest, Node, ReplicaLoad, decode, unpack_ids
from broker.registry import PRESENCE_SECONDS, Registry, Roster
from observability import metrics, tracing
from router.placement import Placer, Request

log = logging.getLogger(__name__)

SILENT_SECONDS = 2.5
"""A replica that reported every half second and is silent for this long is dead; its requests go elsewhere."""

LOST_BEATS = 3
"""A request that this many reports in a row do not list was lost on the way, and is sent again."""

LOST_SECONDS = 1.5
"""But not before it has had this long to arrive."""

WAIT_SECONDS = 30.0
"""How long a request may wait for an eligible replica before the asker is told that there is none."""

MAX_WAITING = 8192

TICK_SECONDS = 0.25


@dataclass
class _Forwarded:
    message: GenerateRequest
    reply: str
    headers: Mapping[str, str]
    sent: float
    beats_missing: int = 0


@dataclass
class _Waiting:
    message: GenerateRequest
    reply: str
    headers: Mapping[str, str]
    since: float


class RouterService:
    """One router of a fleet. Several may run: requests are shared among them as a queue group."""

    def __init__(
        self, bus: Bus, registry: Registry, *, fleet: str, id: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus = bus
        self._registry = registry
        self.fleet = fleet
        self.id = id
        self._clock = clock
        self._placer = Placer()
        self._forwarded: dict[str, _Forwarded] = {}
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._heard: dict[str, tuple[int, float]] = {}
        self._unfinished: dict[str, frozenset[str]] = {}
        self._output: dict[str, float] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Serve until cancelled."""
        roster = Roster(self._registry, on_change=self._changed.set, clock=self._clock)
        subscriptions = []
        try:
            await roster.ready.wait()
            self._take_in(roster)
            subscriptions = [
                await self._bus.subscribe(names.load_subject(self.fleet), self._on_load),
                await self._bus.subscribe(names.cancel_subject(self.fleet), self._on_cancel),
                await self._bus.subscribe(names.generate_subject(self.fleet), self._on_request, queue="routers"),
            ]
            metrics.observe(lambda: {"farflung.router.waiting": float(len(self._waiting))}, router=self.id)
            log.info("router %s serves fleet %s", self.id, self.fleet)
            await asyncio.gather(self._tend(roster), self._announce())
        finally:
            for subscription in subscriptions:
                with contextlib.suppress(nats.errors.Error, ValueError):
                    await subscription.unsubscribe()  # type: ignore[attr-defined]
            await roster.close()
            await self._registry.remove_node(self.id)

    async def _announce(self) -> None:
        while True:
            kinds = {f"placed.{kind}": float(number) for kind, number in self._placer.placements.items()}
            await self._registry.put_node(
                Node(
                    id=self.id,
                    node="router",
                    fleet=self.fleet,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    state="ready",
                    gauges={"waiting": float(len(self._waiting)), "inflight": float(len(self._forwarded)), **kinds},
                )
            )
            await asyncio.sleep(PRESENCE_SECONDS)

    async def _tend(self, roster: Roster) -> None:
        """Follow the replicas, notice silence, and retry what waits."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            for replica in self._take_in(roster):
                await self._lose(replica, "gone")
            self._forget_strangers()
            self._placer.expire(self._clock())
            for replica in self._placer.replicas():
                _, heard = self._heard[replica]
                if self._clock() - heard > SILENT_SECONDS:
                    await self._lose(replica, "silent")
            await self._retry_waiting()

    def _take_in(self, roster: Roster) -> list[str]:
        """Bring placement up to date with who is there; returns the replicas that are gone."""
        present = {node.id: node for node in roster.present("replica", self.fleet)}
        now = self._clock()
        for replica, node in present.items():
            # A node record outlives its replica by seconds: only one that also reports its load stays in use.
            _, heard = self._heard.setdefault(replica, (-1, now))
            self._placer.update_replica(
                replica,
                confirmed=node.confirmed,
                accepts=node.state == "ready" and now - heard <= SILENT_SECONDS,
                cache_tokens=node.cache_tokens,
            )
        gone = [replica for replica in self._placer.replicas() if replica not in present]
        for replica in gone:
            self._heard.pop(replica, None)
        return gone

    def _forget_strangers(self) -> None:
        """Forget replicas that reported without being present, once they are silent."""
        known = set(self._placer.replicas())
        for replica, (_, heard) in list(self._heard.items()):
            if replica not in known and self._clock() - heard > SILENT_SECONDS:
                del self._heard[replica]
                self._unfinished.pop(replica, None)

    async def _lose(self, replica: str, why: str) -> None:
        """Place a dead replica's requests elsewhere, under the same version."""
        self._unfinished.pop(replica, None)
        orphans = self._placer.remove_replica(replica)
        if orphans:
            log.warning("replica %s is %s: placing its %d requests elsewhere", replica, why, len(orphans))
        for id in orphans:
            forwarded = self._forwarded.pop(id, None)
            if forwarded is not None:
                await self._place(forwarded.message, forwarded.reply, forwarded.headers)

    # ---------------------------------------------------------------------------------------------------- messages

    async def _on_request(self, message: Msg) -> None:
        request = decode(message.data, GenerateRequest)
        if request.id in self._forwarded or request.id in self._waiting:
            return  # asked again while it is being served
        await self._place(request, message.reply, message.headers or {})

    def _holder(self, id: str) -> str | None:
        """The replica that reports `id` as unfinished, None when none does that is not silent."""
        for replica, unfinished in self._unfinished.items():
            if id in unfinished and self._clock() - self._heard[replica][1] <= SILENT_SECONDS:
                return replica
        return None

    async def _place(self, request: GenerateRequest, reply: str, headers: Mapping[str, str]) -> None:
        """Forward to the best replica; let the request wait when none may serve it or the bus does not take it.

        Does nothing when a replica has it already: that one answers, since an asker's address stays the same.
        """
        if holder := self._holder(request.id):
            log.info("request %s is with %s already", request.id, holder)
            return
        with tracing.span("route", parent=headers, request=request.id, group=request.group) as span:
            placed = self._placer.place(
                Request(
                    id=request.id,
                    group=request.group,
                    siblings=request.siblings,
                    adapter=request.adapter,
                    prompt=unpack_ids(request.prompt).astype(np.int32, copy=False),
                    expected_output=round(self._expected(request)),
                ),
                self._clock(),
            )
            if placed is None:
                span.set_attribute("farflung.outcome", "waiting")
                await self._wait(request, reply, headers)
                return
            span.set_attribute("farflung.outcome", placed.kind)
            span.set_attribute("farflung.replica", placed.replica)
            forwarded = _Forwarded(request, reply, headers, self._clock())
            self._forwarded[request.id] = forwarded
            try:
                await self._bus.send(
                    names.replica_generate(placed.replica), request, reply=reply, headers=tracing.headers() or headers
                )
            except nats.errors.Error as error:
                log.warning("request %s not sent to %s, it waits: %s", request.id, placed.replica, error)
                span.set_attribute("farflung.outcome", "waiting")
                if self._forwarded.get(request.id) is forwarded:
                    del self._forwarded[request.id]
                    self._placer.complete(request.id)
                    await self._wait(request, reply, headers)
                return
            metrics.count("farflung.router.placements", 1, kind=placed.kind)

    def _expected(self, request: GenerateRequest) -> float:
        """Output tokens to expect: the run's running mean, at most what was asked for."""
        return min(self._output.get(request.run, request.max_new_tokens / 2), request.max_new_tokens)

    async def _wait(self, request: GenerateRequest, reply: str, headers: Mapping[str, str]) -> None:
        if len(self._waiting) >= MAX_WAITING:
            await self._refuse(request, reply, f"{MAX_WAITING} requests wait already")
            return
        self._waiting[request.id] = _Waiting(request, reply, headers, self._clock())

    async def _retry_waiting(self) -> None:
        now = self._clock()
        for id, waiting in list(self._waiting.items()):
            if self._waiting.get(id) is not waiting:
                continue  # cancelled or answered while the ones before it were sent
            if self._holder(id):
                del self._waiting[id]
            elif self._placer.eligible(waiting.message.adapter):
                del self._waiting[id]
                await self._place(waiting.message, waiting.reply, waiting.headers)
            elif now - waiting.since > WAIT_SECONDS:
                del self._waiting[id]
                wanted = waiting.message.adapter or "the base model"
                told = await self._refuse(
                    waiting.message,
                    waiting.reply,
                    f"no replica of fleet {self.fleet} has served {wanted} for {WAIT_SECONDS:.0f} s "
                    f"({len(self._placer.replicas())} present)",
                )
                if not told:
                    self._waiting.setdefault(id, waiting)

    async def _refuse(self, request: GenerateRequest, reply: str, reason: str) -> bool:
        """Tell the asker; False when the bus does not take it."""
        refused = GenerateRefused(id=request.id, code="unavailable", reason=reason, retryable=True, source=self.id)
        try:
            await self._bus.send(reply, refused)
        except nats.errors.Error as error:
            log.warning("refusal of request %s not sent: %s", request.id, error)
            return False
        log.warning("request %s refused: %s", request.id, reason)
        return True

    async def _on_cancel(self, message: Msg) -> None:
        cancel = decode(message.data, CancelRequest)
        self._waiting.pop(cancel.id, None)
        replica = self._placer.assigned_to(cancel.id)
        if replica is not None:
            try:
                await self._bus.send(names.replica_cancel(replica), cancel)
            except nats.errors.Error as error:
                log.info("cancellation of %s not sent to %s: %s", cancel.id, replica, error)

    async def _on_load(self, message: Msg) -> None:
        report = decode(message.data, ReplicaLoad)
        beat, _ = self._heard.get(report.replica, (-1, 0.0))
        if report.beat <= beat:
            return  # older than what is known
        self._heard[report.replica] = (report.beat, self._clock())
        unfinished = frozenset(report.unfinished)
        self._unfinished[report.replica] = unfinished
        for done in report.completed:
            if done.ok:  # a refused one is asked again under its id
                self._waiting.pop(done.id, None)
            if self._placer.assigned_to(done.id) not in (None, report.replica):
                continue  # placed elsewhere while this replica was silent: that replica still works on it
            forwarded = self._forwarded.pop(done.id, None)
            self._placer.complete(done.id, done.blocks)
            if forwarded is not None and done.ok:
                run = forwarded.message.run
                self._output[run] = 0.95 * self._output.get(run, float(done.output_tokens)) + 0.05 * done.output_tokens
        assigned = self._placer.assigned(report.replica)
        self._placer.report_others(report.replica, len(unfinished.difference(assigned)))
        for id in assigned:
            forwarded = self._forwarded.get(id)
            if forwarded is None or id in unfinished:
                if forwarded is not None:
                    forwarded.beats_missing = 0
                continue
            forwarded.beats_missing += 1
            if forwarded.beats_missing >= LOST_BEATS and self._clock() - forwarded.sent > LOST_SECONDS:
                log.warning("request %s was lost on its way to %s: placing it again", id, report.replica)
                self._placer.complete(id)
                del self._forwarded[id]
                await self._place(forwarded.message, forwarded.reply, forwarded.headers)
