"""One schedule, played: processes are started, struck and revived until the run is finished or something is wrong."""

from __future__ import annotations

import asyncio
import gc
import logging
import random as global_random
import secrets
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import actors.replica as actor_replica
import router.service as router_service
from actors.replica import Replica
from actors.service import Actor
from broker import faults, messages, registry
from broker.bus import Bus
from broker.errors import BrokerLost, ConnectionFailed, FarflungError, Fenced, RunConflict, RunFailed, StoreError
from broker.models import ModelFiles
from broker.registry import Registry
from broker.runspec import RunSpec
from broker.store import Store, StoreAddress
from deploy.config import check
from learner.service import Learner
from observability import metrics
from router.service import RouterService
from tests.chaos.simulation.client import Client, Connection
from tests.chaos.simulation.loop import PROCESS, Process, ProcessDied, VirtualLoop
from tests.chaos.simulation.models import (
    PlayedCache,
    PlayedEngine,
    PlayedPolicy,
    PlayedTokenizer,
    PlayedWorkloads,
)
from tests.chaos.simulation.objects import Objects
from tests.chaos.simulation.referee import Referee
from tests.chaos.simulation.schedule import Fault, Schedule, Shape
from tests.chaos.simulation.server import Server

HERE = Path(__file__).parent
RUN = "r"
PATIENCE = 900.0
"""Virtual seconds that the run has to finish once the last fault is over."""

EXPECTED_ENDS = (Fenced, RunConflict, ConnectionFailed, StoreError, RunFailed)
"""With these a learner may leave; whoever looks after it starts it again."""

MODEL = ModelFiles(name="played", directory=HERE, context=512, fingerprint="f" * 16)
ADDRESS = StoreAddress("store", False, "", "")


def spec_of(shape: Shape) -> RunSpec:
    """The run's configuration."""
    return check(
        {
            "run": {"name": RUN, "model": "played", "steps": shape.steps},
            "tasks": {"source": "tasks.jsonl"},
            "environment": {
                "environment": "models.py:PlayedEnvironment", "episode_timeout": 20.0, "group_timeout": 30.0,
            },
            "sampling": {"max_new_tokens": 4},
            "algorithm": {
                "group_size": 2, "groups_per_step": shape.groups_per_step, "max_staleness": shape.max_staleness,
                "publish_every": shape.publish_every,
            },
            "fleet": {
                "name": "fleet", "actors": shape.actors, "min_replicas": shape.min_replicas,
                "activation_timeout": 20.0,
            },
        },
        "the simulation",
    )  # fmt: skip


@dataclass
class Outcome:
    """How a schedule ended."""

    schedule: Schedule
    violation: str = ""
    story: list[str] = field(default_factory=list)
    seconds: float = 0.0
    callbacks: int = 0
    commits: int = 0


class World:
    """Everything there is, and what happens to it."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.shape = schedule.shape
        self.random = Random(schedule.seed)
        self.loop = VirtualLoop(self._executor_seconds)  # type: ignore[abstract]
        self.server = Server(self.loop, self.random.randrange)
        self.objects = Objects(self.loop.time)
        self.story: list[str] = []
        self.spec = spec_of(self.shape)
        self.referee = Referee(RUN, self.shape, self.server, self.objects, self._who)
        self.referee.on_violation = self._halt
        self.server.on_written = self.referee.on_written
        self.server.on_removed = self.referee.on_removed
        self.server.on_published = self.referee.on_published
        self._absences = 0
        self._flaky = 0.0
        self._running: dict[str, Process] = {}
        self._learners: dict[Process, Learner] = {}
        self._connections: list[Connection] = []
        self._engines: dict[str, PlayedEngine] = {}
        self._hanging: dict[str, float] = {}
        self._acting: Process | None = None
        self._starts = 0
        self._actors = self.shape.actors
        self._passed: dict[tuple[str, str], int] = {}
        self._calls: dict[str, int] = {}
        self._spent: set[int] = set()
        self._deadly_calls = {
            (fault.target, fault.count): number
            for number, fault in enumerate(schedule.faults)
            if fault.kind == "kill at a call"
        }
        self.finished = False
        self.refused = False
        """The run cannot go on, and says so: the store has lost every commit."""
        self._last_fault = max((fault.at + fault.seconds for fault in schedule.faults), default=0.0)

    def _halt(self) -> None:
        self.loop.halted = True

    # ------------------------------------------------------------------------------------------------------- a network

    @property
    def down(self) -> bool:
        return self._absences > 0

    def latency(self) -> float:
        slow = self.random.random() < self._flaky
        return self.random.uniform(0.1, 3.0) if slow else 0.0005 + 0.004 * self.random.random()

    def loses(self) -> bool:
        return self._flaky > 0 and self.random.random() < self._flaky / 2

    def before_effect(self, process: Process) -> None:
        """A process sends a request; a kill may be due."""
        component = process.kind
        count = self._calls[component] = self._calls.get(component, 0) + 1
        number = self._deadly_calls.get((component, count))
        if number is not None:
            self._spent.add(number)
            if count % 2:
                self._kill(component, f"before its call {count} was sent")
                raise ProcessDied
            self.loop.in_world(0.0, self._kill, component, f"while its call {count} was under way")

    def _executor_seconds(self, executor: object) -> float:
        training = getattr(executor, "_thread_name_prefix", "") == "train"
        return self.random.uniform(0.02, 0.3) if training else 0.001 + 0.01 * self.random.random()

    def _who(self) -> tuple[str, Learner | None]:
        """The process whose request takes effect now, and its learner if it is one."""
        process = self._acting
        return (process.name, self._learners.get(process)) if process else ("nobody", None)

    # ---------------------------------------------------------------------------------------------------- components

    def say(self, what: str) -> None:
        """Add a line to the story."""
        self.story.append(f"{self.loop.time():8.3f} s  {what}")

    def _connect(self, process: Process) -> tuple[Bus, Store]:
        world = self

        class Watched(Connection):
            """Tells the world whose request takes effect."""

            def _arrive(self, effect: Callable[[], object], epoch: int) -> None:
                world._acting = self.process
                try:
                    super()._arrive(effect, epoch)
                finally:
                    world._acting = None

        connection = Watched(self.loop, self.server, self, process, self.random)
        self._connections.append(connection)
        client: Any = Client(connection)
        objects: Any = self.objects
        return Bus(client, "nats://played", process.name), Store(ADDRESS, client=objects)

    def _start(self, component: str, *, take_over: bool = False) -> None:
        """Start a component as a new process."""
        self._starts += 1
        process = Process(f"{component}-s{self._starts}", component)
        mains: dict[str, Callable[[], Coroutine[Any, Any, object]]] = {
            "learner": lambda: self._learner(process, take_over),
            "router": lambda: self._router(process),
            "actor": lambda: self._actor(process),
        }
        self._running[component] = process
        self.say(f"{process.name} starts" + (" with --take-over" if take_over else ""))
        task = self.loop.start(process, mains[component.partition("-")[0]]())
        task.add_done_callback(lambda done: self._on_end(process, done), context=self.loop._world)

    async def _learner(self, process: Process, take_over: bool) -> object:
        bus, store = self._connect(process)
        registry = await Registry.open(bus)
        await store.open()
        make: Any = PlayedPolicy
        learner = Learner(
            bus, registry, store, self.spec, MODEL,
            id=process.name, roots=[HERE], take_over=take_over, clock=self.loop.time, policy=make,
        )  # fmt: skip
        self._learners[process] = learner
        return await learner.run()

    async def _router(self, process: Process) -> None:
        bus, _ = self._connect(process)
        registry = await Registry.open(bus)
        await RouterService(bus, registry, fleet="fleet", id=process.name, clock=self.loop.time).run()

    async def _actor(self, process: Process) -> None:
        bus, store = self._connect(process)
        registry = await Registry.open(bus)
        await store.open()
        engine: Any = PlayedEngine(self.spec.adapter_slots, lambda: self.random.uniform(0.02, 0.4))
        self._engines[process.kind] = engine
        cache: Any = PlayedCache(store)
        tokenizer: Any = PlayedTokenizer()
        workloads: Any = PlayedWorkloads(self.spec, lambda: self._hang(process.kind))
        replica = Replica(
            bus, registry, cache, engine,
            fleet="fleet", id=process.name.replace("actor", "replica"), model=MODEL.fingerprint, clock=self.loop.time,
        )  # fmt: skip
        actor = Actor(
            bus, registry, store, tokenizer,
            fleet="fleet", id=process.name, context=512, roots=[], max_inflight=6, clock=self.loop.time,
            workloads=workloads,
        )  # fmt: skip
        await asyncio.gather(replica.run(), actor.run())

    async def _hang(self, component: str) -> None:
        until = self._hanging.get(component, 0.0)
        if self.loop.time() < until:
            await asyncio.sleep(until - self.loop.time())

    def _on_end(self, process: Process, task: asyncio.Task[Any]) -> None:
        """A root task has ended by itself."""
        if not process.alive:
            return
        current = self._running.get(process.kind) is process
        process.kill()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, ProcessDied):
            return
        if error is None and process.kind == "learner" and not task.cancelled():
            self.finished = self.loop.halted = bool(task.result().done)
            self.say(f"{process.name} has finished the run" if self.finished else f"{process.name} has stopped")
        elif task.cancelled():
            self.say(f"{process.name} has left")
        else:
            self.say(f"{process.name} ends: {type(error).__name__}: {str(error)[:200]}")
            if self.objects.forgotten and isinstance(error, StoreError) and "cannot resume" in str(error):
                self.refused = self.loop.halted = True  # no commit is left intact: that is for a person to decide
            if isinstance(error, BrokerLost) and not self.referee.broker_was_wiped:
                self.referee.fail(f"{process.name} ended: the broker has lost something, which it has not: {error}")
            if not isinstance(error, EXPECTED_ENDS):
                self.referee.fail(f"{process.name} ended:\n{''.join(traceback.format_exception(error))}")
        if current and not self.finished:
            self._revive(process.kind, 3.0)

    def _kill(self, component: str, how: str) -> None:
        process = self._running.get(component)
        if process is not None and process.alive:
            self.say(f"{process.name} is killed {how}")
            process.kill()
            self._revive(component, self.random.uniform(0.3, 6.0))

    def _revive(self, component: str, delay: float) -> None:
        self.loop.in_world(delay, self._start_if_gone, component)

    def _start_if_gone(self, component: str) -> None:
        process = self._running.get(component)
        if not self.finished and (process is None or not process.alive):
            self._start(component)

    # -------------------------------------------------------------------------------------------------------- faults

    def _on_point(self, point: str) -> None:
        """The product passes a named point; a fault may be due there."""
        process = PROCESS.get()
        if process is None or not process.alive:
            raise ProcessDied
        if point == "learner.issued" and process in self._learners:
            self.referee.on_issue(self._learners[process])
        passed = self._passed[process.kind, point] = self._passed.get((process.kind, point), 0) + 1
        for number, fault in enumerate(self.schedule.faults):
            if fault.point != point or fault.target != process.kind or fault.count != passed or number in self._spent:
                continue
            self._spent.add(number)
            self._last_fault = max(self._last_fault, self.loop.time() + fault.seconds)
            if fault.kind == "kill at a point":
                self._kill(process.kind, f"at {point}")
                if not process.alive:
                    raise ProcessDied
            elif fault.kind == "pause at a point":
                self._pause(process, fault.seconds, f"at {point}")

    def _pause(self, process: Process, seconds: float, how: str = "") -> None:
        self.say(f"{process.name} is stopped {how} for {seconds:.1f} s")
        process.paused = True
        self.loop.in_world(seconds, self._go_on, process)

    def _go_on(self, process: Process) -> None:
        if process.alive:
            self.say(f"{process.name} goes on")
            self.loop.resume(process)

    def _strike(self, number: int, fault: Fault) -> None:
        """A fault's time has come."""
        if self.finished:
            return
        process = self._running.get(fault.target)
        kind = fault.kind
        if kind == "kill":
            self._kill(fault.target, "")
        elif kind == "pause" and process is not None and process.alive:
            self._pause(process, fault.seconds)
        elif kind == "take over":
            self._start("learner", take_over=True)
        elif kind in ("broker restarts", "broker is wiped"):
            self.say(f"the broker goes away for {fault.seconds:.1f} s")
            self._absences += 1
            if kind == "broker is wiped":
                self.say("and loses everything it had")
                self.server.wipe()
                self.referee.broker_was_wiped = True
            self.loop.in_world(fault.seconds, self._broker_returns)
            for connection in self._connections:
                connection.break_off()
        elif kind == "network is flaky":
            self.say(f"the network is flaky for {fault.seconds:.1f} s")
            self._flaky = self.random.uniform(0.02, 0.4)
            self.loop.in_world(fault.seconds, self._network_heals)
        elif kind in ("store is away", "store is full"):
            self.say(f"the {kind} for {fault.seconds:.1f} s")
            name = kind.rpartition(" ")[2]
            setattr(self.objects, name, True)
            self.loop.in_world(fault.seconds, setattr, self.objects, name, False)
        elif kind == "store forgets":
            self._forget(fault.point)
        elif kind in ("loads fail", "loads are slow"):
            engine = self._engines.get(fault.target)
            if engine is not None:
                self.say(f"{fault.target}: {kind}")
                engine.failing_loads = fault.count if kind == "loads fail" else 0
                engine.load_seconds = fault.seconds if kind == "loads are slow" else 0.0
                self.loop.in_world(fault.seconds, setattr, engine, "load_seconds", 0.0)
        elif kind == "environment hangs":
            self.say(f"the environments of {fault.target} hang for {fault.seconds:.1f} s")
            self._hanging[fault.target] = self.loop.time() + fault.seconds
        elif kind == "actor joins":
            self._actors += 1
            self._start(f"actor-{self._actors - 1}")
        elif kind == "actor leaves" and process is not None and process.alive and process.root is not None:
            self.say(f"{process.name} is told to leave")
            process.root.cancel()

    def _broker_returns(self) -> None:
        self._absences -= 1
        if self.down:
            return
        self.say("the broker is back")
        self.server.forget_ids()

    def _network_heals(self) -> None:
        self._flaky = 0.0

    def _forget(self, what: str) -> None:
        head = self.referee.head
        if what == "newest commit" and head is not None and head.checkpoint is not None:
            doomed = [head.checkpoint.key]
        else:
            doomed = sorted(key for key in self.objects.held if f"/{what}/" in key)[-1:]
        for key in doomed:
            self.say(f"the store forgets {key[:60]}")
            self.objects.forget(key)

    # ---------------------------------------------------------------------------------------------------------- play

    def play(self) -> Outcome:
        """Run to the end.

        No garbage is collected meanwhile: what a killed process has left behind would run its `finally` blocks, which a
        dead process does not, and when that happens depends on what was played before.
        """
        gc.disable()
        faults.install(self._on_point)
        trouble = _Trouble(self.referee)
        logging.getLogger().addHandler(trouble)
        global_random.seed(self.schedule.seed)
        tokens = Random(self.schedule.seed)
        original = secrets.token_hex
        secrets.token_hex = lambda nbytes=None: f"{tokens.getrandbits(8 * (nbytes or 8)):0{2 * (nbytes or 8)}x}"
        try:
            for name in ["learner", *(f"router-{n}" for n in range(self.shape.routers))]:
                self.loop.in_world(self.random.uniform(0.0, 0.5), self._start_if_gone, name)
            for number in range(self.shape.actors):
                self.loop.in_world(self.random.uniform(0.0, 1.0), self._start_if_gone, f"actor-{number}")
            for number, fault in enumerate(self.schedule.faults):
                if not fault.kind.endswith(("point", "call")):
                    self.loop.in_world(fault.at, self._strike, number, fault)
            self._run()
            return Outcome(
                self.schedule,
                violation=self.referee.violations[0] if self.referee.violations else "",
                story=self.story,
                seconds=self.loop.time(),
                callbacks=self.loop.ran,
                commits=self.referee.commits,
            )
        finally:
            self.finished = True
            faults.install(None)
            self.loop.reap()
            gc.enable()
            secrets.token_hex = original
            logging.getLogger().removeHandler(trouble)

    def _run(self) -> None:
        violations = self.referee.violations
        while not self.finished and not self.refused and not violations:
            deadline = self._last_fault + PATIENCE
            self.loop.run(deadline)
            if self.loop.faults:
                self.referee.fail(f"unhandled: {self.loop.faults[0]}")
            if not (self.finished or self.refused or violations) and self._last_fault + PATIENCE <= deadline:
                head = self.referee.head
                where = f"step {head.step}, version {head.head}, active {head.active}" if head else "no head"
                violations.append(f"the run stands still at {where} long after the last fault")
        head = self.referee.head
        if (
            self.finished
            and not violations
            and head is not None
            and (head.state, head.step) != ("finished", self.shape.steps)
        ):
            violations.append(f"the run ended {head.state} at step {head.step} of {self.shape.steps}")


class _Trouble(logging.Handler):
    """Errors that the product catches at its outermost edge, and logs with a traceback, are errors all the same."""

    def __init__(self, referee: Referee) -> None:
        super().__init__(logging.ERROR)
        self._referee = referee

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not isinstance(record.exc_info[1], FarflungError | ProcessDied):
            self._referee.fail(f"{record.name}: {record.getMessage()}: {record.exc_info[1]!r}")


def quiet() -> None:
    """Once per process: no metrics (they are never read here), and no log below an error."""
    metrics.observe = lambda *_, **__: None
    metrics.count = lambda *_, **__: None
    metrics.record = lambda *_, **__: None
    logging.disable(logging.WARNING)
    logging.getLogger().setLevel(logging.ERROR)
    logging.getLogger("asyncio").disabled = True
    # What the services did only to look after idle times is done less often; no decision depends on how often.
    router_service.TICK_SECONDS = 0.5
    actor_replica.BEAT_SECONDS = 1.0
    registry.REREAD_SECONDS = 5.0
    # The same bytes are read by many. What they decode to is frozen, so it is decoded once.
    messages._unpack = lru_cache(maxsize=1024)(messages._unpack)
    gc.freeze()
    gc.set_threshold(100_000, 1, 1000)
