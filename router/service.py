"""The router on the bus: takes generation requests, forwards them, and places again what a dead replica leaves.

The reply never passes through here: a request is forwarded with the asker's own reply address. Load is kept true
from the replicas' reports, which name every request they still have: a request that a replica reports is never placed
again, whichever router placed it. What nobody can serve waits, bounded.

Several routers share the groups of a fleet: any of them takes a request and hands it to the one whose group it is, so
that a group's members and turns meet one memory. They tell each other twice a second that they are there; what the
others have placed, and still expect, they read in the replicas' reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec
import nats.errors
import numpy as np
from nats.aio.msg import Msg

from broker import names
from broker.blocks import HASH
from broker.bus import Bus
from broker.ending import end
from broker.errors import MalformedMessage
from broker.messages import (
    CancelRequest,
    GenerateRefused,
    GenerateReply,
    GenerateRequest,
    Node,
    ReplicaLoad,
    RouterBeat,
    decode,
    decode_one_of,
    unpack_ids,
)
from broker.registry import PRESENCE_SECONDS, Registry, Roster
from observability import metrics, tracing
from router.placement import MAX_BYTES, SPILL_REQUESTS, Placer, Request

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

AWAY_SECONDS = 1.0
"""A wait for TICK_SECONDS that took this long says that the router itself did not run."""

BEAT_SECONDS = 0.5
"""How often routers tell each other that they are there."""

LISTEN_SECONDS = 0.6
"""How long a router that starts listens before it takes requests: it then knows the other routers, and what the
replicas have from them."""

ROUTER_SILENT_SECONDS = 2.0
"""A router that is silent for this long has its groups taken over."""

REFUSALS_KEPT = 16_384
"""Requests of which it is remembered who refused them, newest kept."""

PROBE_SECONDS = 1.0
"""How often a failing replica is tried, and how long it may take to answer."""


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
    arrived_ns: int
    """The same moment, as traces count time."""


@dataclass
class _Failing:
    """A replica that failed a request. It is tried until it answers."""

    again: float
    probe: asyncio.Task[None] | None = None


class RouterService:
    """One router of a fleet."""

    def __init__(
        self,
        bus: Bus,
        registry: Registry,
        *,
        fleet: str,
        id: str,
        clock: Callable[[], float] = time.monotonic,
        spill: float = SPILL_REQUESTS,
        max_bytes: int = MAX_BYTES,
        max_waiting: int = MAX_WAITING,
        wait_seconds: float = WAIT_SECONDS,
    ) -> None:
        """`spill` and `max_bytes` as of `router.placement.Placer`. At most `max_waiting` requests wait for an eligible
        replica, each for `wait_seconds` at most.
        """
        self._bus = bus
        self._registry = registry
        self.fleet = fleet
        self.id = id
        self._clock = clock
        self._max_waiting = max_waiting
        self._wait_seconds = wait_seconds
        self.placer = Placer(spill=spill, max_bytes=max_bytes)
        self._forwarded: dict[str, _Forwarded] = {}
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._heard: dict[str, tuple[int, float]] = {}
        self._unfinished: dict[str, frozenset[str]] = {}
        self._failing: dict[str, _Failing] = {}
        self._refusals: OrderedDict[str, set[str]] = OrderedDict()
        """The replicas that refused a request, which its asker may ask again."""
        self._present: frozenset[str] = frozenset()
        self._contexts: dict[str, int] = {}
        self._routers: dict[str, float] = {}
        self._probes = itertools.count()
        self._changed = asyncio.Event()
        self.refused = 0
        """Requests that were answered with an error here."""
        self.lost_replicas = 0
        """Replicas that died or went silent."""

    @property
    def context(self) -> int:
        """The longest context of the fleet's replicas in tokens; 0 while none says."""
        return max(self._contexts.values(), default=0)

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
                await self._bus.subscribe(names.routers_subject(self.fleet), self._on_beat),
                await self._bus.subscribe(names.router_generate(self.id), self._on_own),
            ]
            await self._say()
            await asyncio.sleep(LISTEN_SECONDS)
            subscriptions.append(
                await self._bus.subscribe(names.generate_subject(self.fleet), self._on_request, queue="routers")
            )
            metrics.observe(self._gauges, router=self.id)
            log.info("router %s serves fleet %s", self.id, self.fleet)
            await asyncio.gather(self._tend(roster), self._announce(), self._beat())
        finally:
            await self._say(leaving=True)
            for subscription in subscriptions:
                with contextlib.suppress(nats.errors.Error, ValueError):
                    await subscription.unsubscribe()  # type: ignore[attr-defined]
            await end(*(failing.probe for failing in self._failing.values() if failing.probe is not None))
            await roster.close()
            await self._registry.remove_node(self.id)

    # ---------------------------------------------------------------------------------------------------- presence

    def readings(self) -> dict[str, float]:
        """Figures for people, by name."""
        placer = self.placer
        return {
            "waiting": float(len(self._waiting)),
            "inflight": float(len(self._forwarded)),
            "refused": float(self.refused),
            "failing": float(len(self._failing)),
            "lost_replicas": float(self.lost_replicas),
            "mirrored_blocks": float(placer.mirrored_blocks()),
            "mirror_bytes": float(placer.memory()),
            "prompt_tokens": float(placer.prompt_tokens),
            "cached_tokens": float(placer.cached_tokens),
            **{f"placed.{kind}": float(number) for kind, number in placer.placements.items()},
        }

    def loads(self) -> dict[str, float]:
        """Work that each replica is believed to have left, in prefilled tokens."""
        return {replica: self.placer.load(replica) for replica in self.placer.replicas()}

    def _gauges(self) -> dict[str, float]:
        placer = self.placer
        return {
            "farflung.router.waiting": float(len(self._waiting)),
            "farflung.router.inflight": float(len(self._forwarded)),
            "farflung.router.mirrored_blocks": float(placer.mirrored_blocks()),
            "farflung.router.mirror_bytes": float(placer.memory()),
        }

    async def _announce(self) -> None:
        while True:
            await self._registry.put_node(
                Node(
                    id=self.id,
                    node="router",
                    fleet=self.fleet,
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    state="ready",
                    gauges=self.readings(),
                )
            )
            await asyncio.sleep(PRESENCE_SECONDS)

    async def _beat(self) -> None:
        while True:
            await self._say()
            await asyncio.sleep(BEAT_SECONDS)

    async def _say(self, *, leaving: bool = False) -> None:
        with contextlib.suppress(nats.errors.Error):
            await self._bus.send(names.routers_subject(self.fleet), RouterBeat(id=self.id, leaving=leaving))

    async def _on_beat(self, message: Msg) -> None:
        beat = decode(message.data, RouterBeat)
        if beat.leaving:
            self._routers.pop(beat.id, None)
        elif beat.id != self.id:
            self._routers[beat.id] = self._clock()

    def _owner(self, group: str) -> str:
        """The router whose group this is: each router there is has the same chance, and they all say the same."""
        now = self._clock()
        for router, heard in list(self._routers.items()):
            if now - heard > ROUTER_SILENT_SECONDS:
                del self._routers[router]
        if not self._routers:
            return self.id
        return max([self.id, *self._routers], key=lambda router: blake2b(f"{group}\0{router}".encode()).digest())

    # ---------------------------------------------------------------------------------------------------- replicas

    async def _tend(self, roster: Roster) -> None:
        """Follow the replicas, notice silence, and retry what waits."""
        while True:
            began = self._clock()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            # Who was away oneself has reports unread, and must not take that for silence.
            away = self._clock() - began > AWAY_SECONDS
            await self._tick(roster, away=away)

    async def _tick(self, roster: Roster, *, away: bool) -> None:
        for replica in self._take_in(roster):
            await self._lose(replica, "gone")
        self._forget_strangers()
        self.placer.expire(self._clock())
        for replica in self.placer.replicas():
            _, heard = self._heard[replica]
            if not away and self._clock() - heard > SILENT_SECONDS:
                await self._lose(replica, "silent")
        self._probe_failing()
        await self._retry_waiting()

    def _take_in(self, roster: Roster) -> list[str]:
        """Bring placement up to date with who is there; returns the replicas that are gone."""
        present = {node.id: node for node in roster.present("replica", self.fleet)}
        now = self._clock()
        placed = set(self.placer.replicas())
        self._present = frozenset(present)
        self._contexts = {replica: node.context for replica, node in present.items()}
        for replica, node in present.items():
            # A node record outlives its replica by seconds: only one that also reports its load comes and stays in use.
            _, heard = self._heard.setdefault(replica, (-1, now))
            if now - heard > SILENT_SECONDS and replica not in placed:
                continue
            self.placer.update_replica(
                replica,
                confirmed=node.confirmed,
                accepts=node.state == "ready" and replica not in self._failing and now - heard <= SILENT_SECONDS,
                cache_tokens=node.cache_tokens,
                block=node.block,
            )
        gone = [replica for replica in self.placer.replicas() if replica not in present]
        for replica in gone:
            self._heard.pop(replica, None)
        return gone

    def _forget_strangers(self) -> None:
        """Forget replicas that are not present, once they are silent."""
        known = self._present.union(self.placer.replicas())
        for replica, (_, heard) in list(self._heard.items()):
            if replica not in known and self._clock() - heard > SILENT_SECONDS:
                del self._heard[replica]
                self._unfinished.pop(replica, None)

    async def _lose(self, replica: str, why: str) -> None:
        """Place a dead replica's requests elsewhere, under the same version."""
        self._unfinished.pop(replica, None)
        if (failing := self._failing.pop(replica, None)) and failing.probe is not None:
            failing.probe.cancel()
        orphans = self.placer.remove_replica(replica)
        self.lost_replicas += 1
        if orphans:
            log.warning("replica %s is %s: placing its %d requests elsewhere", replica, why, len(orphans))
        for id in orphans:
            forwarded = self._forwarded.pop(id, None)
            if forwarded is not None:
                await self._place(forwarded.message, forwarded.reply, forwarded.headers)

    def _take_out(self, replica: str) -> None:
        """A replica failed a request: it gets no more until it has answered a probe."""
        if replica in self._failing or not self.placer.bar(replica):
            return
        self._failing[replica] = _Failing(self._clock() + PROBE_SECONDS)
        log.warning("replica %s failed a request: no more until it answers a probe", replica)

    def _probe_failing(self) -> None:
        now = self._clock()
        for replica, failing in self._failing.items():
            if now >= failing.again and (failing.probe is None or failing.probe.done()):
                failing.again = now + PROBE_SECONDS
                failing.probe = asyncio.create_task(self._probe(replica, failing))

    async def _probe(self, replica: str, failing: _Failing) -> None:
        """Ask for one token of the base model; an answer ends the replica's exclusion.

        The probe is of no run: what a replica may not do for one run says nothing of the others.
        """
        probe = GenerateRequest(
            id=f"probe.{self.id}.{next(self._probes)}",
            run="",
            group="",
            siblings=1,
            adapter=None,
            version=0,
            prompt=b"\0\0\0\0",
            max_new_tokens=1,
            temperature=0.0,
            stop_token_ids=[],
        )
        try:
            answer = await self._bus.request(names.replica_generate(replica), probe, timeout=PROBE_SECONDS)
            if answer is None or not isinstance(
                decode_one_of(answer.data, GenerateReply, GenerateRefused), GenerateReply
            ):
                return
        except (nats.errors.Error, MalformedMessage) as error:
            log.info("replica %s did not answer a probe: %s", replica, error)
            return
        if self._failing.pop(replica, None) is failing:
            log.warning("replica %s answers again", replica)
            self._changed.set()

    # ---------------------------------------------------------------------------------------------------- messages

    async def _on_request(self, message: Msg) -> None:
        request = decode(message.data, GenerateRequest)
        owner = self._owner(request.group or blake2b(request.prompt, digest_size=8).hexdigest())
        if owner != self.id and request.id not in self._forwarded and request.id not in self._waiting:
            try:
                await self._bus.send(
                    names.router_generate(owner), request, reply=message.reply, headers=message.headers or {}
                )
                return
            except nats.errors.Error as error:
                log.warning("request %s not handed to %s, it stays here: %s", request.id, owner, error)
        await self._take(request, message)

    async def _on_own(self, message: Msg) -> None:
        """A request that another router has handed on: whoever's group it is, it is served here."""
        await self._take(decode(message.data, GenerateRequest), message)

    async def _take(self, request: GenerateRequest, message: Msg) -> None:
        if request.id in self._forwarded or request.id in self._waiting:
            return  # asked again while it is being served
        if problem := self._problem(request):
            code, reason = problem
            await self._refuse(request, message.reply, reason, code=code, retryable=False)
            return
        await self._place(request, message.reply, message.headers or {})

    def _problem(self, request: GenerateRequest) -> tuple[Literal["prompt_too_long", "invalid"], str] | None:
        """Why no replica could ever serve this request."""
        tokens = len(unpack_ids(request.prompt))
        if not tokens:
            return "invalid", "the prompt is empty; send at least one token"
        contexts = self._contexts.values()
        if contexts and 0 < max(contexts) <= tokens and min(contexts) > 0:
            return "prompt_too_long", (
                f"the prompt has {tokens} tokens; the longest context of fleet {self.fleet} is {max(contexts)}, "
                "of which one must be left to sample"
            )
        return None

    def _holder(self, id: str) -> str | None:
        """The replica that reports `id` as unfinished, None when none does that is not silent."""
        for replica, unfinished in self._unfinished.items():
            if id in unfinished and self._clock() - self._heard[replica][1] <= SILENT_SECONDS:
                return replica
        return None

    async def _place(
        self, request: GenerateRequest, reply: str, headers: Mapping[str, str], arrived_ns: int | None = None
    ) -> None:
        """Forward to the best replica; let the request wait when none may serve it or the bus does not take it.

        Does nothing when a replica has it already: that one answers, since an asker's address stays the same. The span
        of what has waited begins when it `arrived_ns`.
        """
        if holder := self._holder(request.id):
            log.info("request %s is with %s already", request.id, holder)
            return
        arrived_ns = arrived_ns or time.time_ns()
        refusals = self._refusals.get(request.id, set())
        placed = self.placer.place(
            Request(
                id=request.id,
                prompt=unpack_ids(request.prompt).astype(np.int32, copy=False),
                most=request.max_new_tokens,
                adapter=request.adapter,
                group=request.group,
                siblings=request.siblings if request.group else None,
                run=request.run,
            ),
            self._clock(),
            avoid=refusals,
        )
        if placed is None:
            await self._wait(request, reply, headers, arrived_ns)
            return
        if placed.replica in refusals:  # all have refused it: another round
            refusals.clear()
        with tracing.span(
            "route",
            parent=headers,
            start_ns=arrived_ns,
            request=request.id,
            group=request.group,
            outcome=placed.kind,
            replica=placed.replica,
        ) as span:
            forwarded = _Forwarded(request, reply, headers, self._clock())
            self._forwarded[request.id] = forwarded
            try:
                await self._bus.send(
                    names.replica_generate(placed.replica),
                    msgspec.structs.replace(request, work=placed.work, reserved=placed.reserved),
                    reply=reply,
                    headers=tracing.headers() or headers,
                )
            except nats.errors.Error as error:
                log.warning("request %s not sent to %s, it waits: %s", request.id, placed.replica, error)
                span.set_attribute("farflung.outcome", "not sent")
                if self._forwarded.get(request.id) is forwarded:
                    del self._forwarded[request.id]
                    self.placer.complete(request.id)
                    await self._wait(request, reply, headers, time.time_ns())
                return
            metrics.count("farflung.router.placements", 1, kind=placed.kind)

    async def _wait(self, request: GenerateRequest, reply: str, headers: Mapping[str, str], arrived_ns: int) -> None:
        if len(self._waiting) >= self._max_waiting:
            await self._refuse(request, reply, f"{self._max_waiting} requests wait already")
            return
        self._waiting[request.id] = _Waiting(request, reply, headers, self._clock(), arrived_ns)

    async def _retry_waiting(self) -> None:
        now = self._clock()
        for id, waiting in list(self._waiting.items()):
            if self._waiting.get(id) is not waiting:
                continue  # cancelled or answered while the ones before it were sent
            if self._holder(id):
                del self._waiting[id]
            elif self.placer.can_serve(waiting.message.adapter):
                del self._waiting[id]
                await self._place(waiting.message, waiting.reply, waiting.headers, waiting.arrived_ns)
            elif now - waiting.since > self._wait_seconds:
                del self._waiting[id]
                wanted = waiting.message.adapter or "the base model"
                told = await self._refuse(
                    waiting.message,
                    waiting.reply,
                    f"no replica of fleet {self.fleet} has served {wanted} for {self._wait_seconds:.0f} s "
                    f"({len(self.placer.replicas())} present)",
                )
                if not told:
                    self._waiting.setdefault(id, waiting)

    async def _refuse(
        self,
        request: GenerateRequest,
        reply: str,
        reason: str,
        *,
        code: Literal["unavailable", "prompt_too_long", "invalid"] = "unavailable",
        retryable: bool = True,
    ) -> bool:
        """Tell the asker; False when the bus does not take it."""
        refused = GenerateRefused(id=request.id, code=code, reason=reason, retryable=retryable, source=self.id)
        try:
            await self._bus.send(reply, refused)
        except nats.errors.Error as error:
            log.warning("refusal of request %s not sent: %s", request.id, error)
            return False
        self.refused += 1
        log.warning("request %s refused: %s", request.id, reason)
        return True

    async def _on_cancel(self, message: Msg) -> None:
        cancel = decode(message.data, CancelRequest)
        self._waiting.pop(cancel.id, None)
        self._refusals.pop(cancel.id, None)
        replica = self.placer.assigned_to(cancel.id) or self._holder(cancel.id)
        if replica is not None:
            try:
                await self._bus.send(names.replica_cancel(replica), cancel)
            except nats.errors.Error as error:
                log.info("cancellation of %s not sent to %s: %s", cancel.id, replica, error)

    async def _on_load(self, message: Msg) -> None:
        report = decode(message.data, ReplicaLoad)
        _check(report)
        beat, _ = self._heard.get(report.replica, (-1, 0.0))
        if report.beat <= beat:
            return  # older than what is known
        self._heard[report.replica] = (report.beat, self._clock())
        unfinished = frozenset(report.unfinished)
        self._unfinished[report.replica] = unfinished
        for event in report.cache:
            if event.change == "stored":
                self.placer.cache_stored(report.replica, event.adapter, event.blocks, event.salt)
            elif event.change == "removed":
                self.placer.cache_removed(report.replica, event.blocks)
            else:
                self.placer.clear_cache(report.replica)
        for done in report.completed:
            if done.ok:  # a refused one is asked again under its id
                self._waiting.pop(done.id, None)
                self._refusals.pop(done.id, None)
            else:
                self._remember_refusal(done.id, report.replica)
            if self.placer.assigned_to(done.id) not in (None, report.replica):
                continue  # placed elsewhere while this replica was silent: that replica still works on it
            self._forwarded.pop(done.id, None)
            if done.ok:
                self.placer.complete(
                    done.id,
                    output_tokens=done.output_tokens,
                    cached_tokens=min(done.cached_tokens, done.prompt_tokens),
                    prompt_tokens=done.prompt_tokens,
                    blocks=done.blocks,
                )
            else:
                self.placer.complete(done.id)
            if done.fault:
                self._take_out(report.replica)
        assigned = self.placer.assigned(report.replica)
        self._count_others(report, assigned)
        for id in assigned:
            forwarded = self._forwarded.get(id)
            if forwarded is None or id in unfinished:
                if forwarded is not None:
                    forwarded.beats_missing = 0
                continue
            forwarded.beats_missing += 1
            if forwarded.beats_missing >= LOST_BEATS and self._clock() - forwarded.sent > LOST_SECONDS:
                log.warning("request %s was lost on its way to %s: placing it again", id, report.replica)
                self.placer.complete(id)
                del self._forwarded[id]
                await self._place(forwarded.message, forwarded.reply, forwarded.headers)

    def _remember_refusal(self, id: str, replica: str) -> None:
        self._refusals.setdefault(id, set()).add(replica)
        self._refusals.move_to_end(id)
        if len(self._refusals) > REFUSALS_KEPT:
            self._refusals.popitem(last=False)

    def _count_others(self, report: ReplicaLoad, assigned: list[str]) -> None:
        """Count what the replica has from other routers, and what of their groups is still to come."""
        own = set(assigned)
        others = [id for id in report.unfinished if id not in own]
        work = None
        if len(report.work) == len(report.unfinished) and any(report.work):
            work = sum(work for id, work in zip(report.unfinished, report.work, strict=True) if id not in own)
            work += sum(work for group, work in report.reserved.items() if not self.placer.knows(group))
        self.placer.report_others(report.replica, len(others), work)


def _check(report: ReplicaLoad) -> None:
    """Raises MalformedMessage for hashes that are none, and for work that is no number."""
    for work in (*report.work, *report.reserved.values()):
        if not 0 <= work < math.inf:
            raise MalformedMessage(f"expected work as a number of tokens, got {work}")
    for blocks in (*(done.blocks for done in report.completed), *(event.blocks for event in report.cache)):
        if len(blocks) % HASH:
            raise MalformedMessage(f"expected block hashes (a multiple of {HASH} bytes), got {len(blocks)} bytes")
