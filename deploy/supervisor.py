"""`farflung up`: a whole run on one machine. Embedded servers, router, actors and learner as processes of their own.

Invariant: whatever of this ends, the others end with it, and the run's state stays where the next start finds it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from broker.bus import Bus
from broker.chat import ChatTokenizer, prompt_ids, with_system_prompt
from broker.errors import ConfigError, FarflungError, ServerError
from broker.locks import file_lock
from broker.messages import GenerateReply, GenerateRequest, decode_one_of, pack_ids, unpack_ids
from broker.models import ModelFiles, resolve
from broker.names import generate_subject
from broker.registry import Heads, Registry, Roster
from broker.runspec import RunSpec
from broker.store import StoreAddress
from deploy import profile, view
from deploy.children import Child, describe_exit, end_all, share_cores, thread_environment
from deploy.processes import cores
from deploy.profile import Connection, Profile
from deploy.running import connected
from deploy.servers import Server, nats_launch, store_launch
from deploy.snapshot import Snapshot, snapshot_of
from learner.branch import Origin
from learner.readings import STEP_LOG

log = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5

LEARNER_VERDICTS = frozenset(range(1, 9))
"""Exit codes by which the learner says that starting it again would not help; `farflung up` ends with them, too."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """How to bring a run up."""

    config: Path
    directory: Path
    nats: str | None
    s3: str | None
    restart: bool
    origin: str | None
    adapter: Path | None
    fresh_optimizer: bool
    threads_learner: int | None
    threads_actor: int | None


class Up:
    """One `farflung up`."""

    def __init__(self, spec: RunSpec, options: UpOptions, console: Console) -> None:
        self._spec = spec
        self._options = options
        self._console = console
        self._servers: list[Server] = []
        self._children: list[Child] = []
        self._rewards: list[float] = []
        self._read_to = 0
        self._said_details: dict[str, str] = {}
        self._said_evaluation = -1.0
        self._once = [
            *(["--restart"] if options.restart else []),
            *([f"--from={options.origin}"] if options.origin else []),
            *([f"--adapter={options.adapter.resolve()}"] if options.adapter else []),
            *(["--fresh-optimizer"] if options.fresh_optimizer else []),
        ]
        """What the learner is told at its first start only."""

    async def run(self) -> dict[str, Any]:
        """Bring everything up, watch until the run ends, and return its summary.

        Raises RunConflict when another `farflung up` runs in the same directory, and whatever made the learner stop.
        """
        directory = self._options.directory
        directory.mkdir(parents=True, exist_ok=True)
        busy = f"another `farflung up` is running in {directory}; stop it, or choose another --dir"
        with file_lock(directory / "lock", wait=False, busy=busy), self._hold_servers(directory):
            files = await asyncio.to_thread(resolve, self._spec.run.model, self._say)
            try:
                connection = self._start_servers(directory)
                async with connected(connection, "up") as (bus, registry, store):
                    from learner.claim import finished
                    from learner.summary import summary_of

                    name = self._spec.run.name
                    found = await registry.head(name)
                    anew = self._options.restart or self._options.origin or self._options.adapter
                    if found is not None and not anew and finished(found[0], self._spec):
                        self._say(f"run {name} is finished; --restart begins it anew")
                        summary = (await summary_of(registry, store, name)).to_json()
                        self._show_figures(summary)
                        return summary
                    await self._run_components(registry, directory)
                    summary = (await summary_of(registry, store, name)).to_json()
                    if not summary["done"]:
                        self._say(
                            f"run {name} was stopped at step {summary['steps']}; the same command goes on from there"
                        )
                    else:
                        self._show_figures(summary)
                        await self._show_answers(bus, summary, files)
                    return summary
            finally:
                end_all(self._children)
                for server in reversed(self._servers):
                    server.stop()

    # ----------------------------------------------------------------------------------------------------- starting

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def _hold_servers(self, directory: Path) -> Iterator[None]:
        """Keep the embedded servers' data to ourselves. Raises RunConflict when another `farflung up` uses them.

        A run that is branched from one beside it uses that run's servers, from then on: they hold its first version.
        """
        servers = directory / "servers"
        origin = self._options.origin
        if self._options.nats is not None and self._options.s3 is not None:
            yield
            return
        if origin is not None and not servers.is_symlink() and not servers.exists():
            beside = directory.parent / Origin.parse(origin).run / "servers"
            if beside.is_dir():
                servers.symlink_to(os.path.relpath(beside.resolve(), directory))
        if servers.is_symlink() and not servers.exists():
            raise ServerError(f"{servers} leads to {servers.readlink()}, the servers of another run, which are gone")
        busy = (
            f"the servers in {servers.resolve()} are in use by another `farflung up` or by a command with --dir; wait "
            f"for its end, or name them with --nats and --s3 as its profile.toml has them"
        )
        with file_lock(servers / "lock", wait=False, busy=busy):
            yield

    def _start_servers(self, directory: Path) -> Connection:
        servers = directory / "servers"
        nats, s3 = self._options.nats, self._options.s3
        if nats is None:
            nats = self._start(Server(nats_launch(servers), directory / "logs" / "nats.log"))
        if s3 is None:
            s3 = self._start(Server(store_launch(servers), directory / "logs" / "store.log"))
        kept = Profile(nats=nats, s3=s3)
        profile.write(kept, directory / "profile.toml")
        profile.remember(kept)
        return Connection(nats=nats, store=StoreAddress.parse(s3, environment=os.environ))

    def _start(self, server: Server) -> str:
        server.start()
        self._servers.append(server)
        return server.launch.url

    def _spawn(self, directory: Path) -> Child:
        """Start every component; returns the learner."""
        spec, options = self._spec, self._options
        fleet = spec.fleet
        shared = share_cores(cores(), fleet.actors)
        threads_actor = options.threads_actor or shared.actor
        threads_learner = options.threads_learner or shared.learner
        common = ["--profile", str(directory / "profile.toml"), "--telemetry", str(directory / "telemetry")]
        if spec.observability.otlp_endpoint:
            common += ["--otlp", spec.observability.otlp_endpoint]
        learner = Child(
            "learner",
            [
                "learner", str(options.config), *common, "--dir", str(directory), "--threads", str(threads_learner),
                *self._once,
            ],
            directory / "logs" / "learner.log",
            environment=thread_environment(threads_learner),
        )  # fmt: skip
        routers = [
            Child(
                f"router-{number}",
                ["router", *common, "--fleet", spec.fleet_name],
                directory / "logs" / f"router-{number}.log",
                environment=thread_environment(1),
            )
            for number in range(fleet.routers)
        ]
        actors = [
            Child(
                f"actor-{number}",
                [
                    "actor", *common, "--fleet", spec.fleet_name, "--model", spec.run.model, "--engine", fleet.engine,
                    "--max-inflight", str(fleet.max_inflight), "--adapter-slots", str(spec.adapter_slots),
                    "--dtype", spec.run.dtype, "--code", str(options.config.resolve().parent),
                    "--max-lora-rank", str(spec.lora.rank), "--threads", str(threads_actor),
                    *(f"--engine-arg={flag}" for flag in fleet.engine_args),
                ],
                directory / "logs" / f"actor-{number}.log",
                environment=thread_environment(threads_actor),
            )
            for number in range(fleet.actors)
        ]  # fmt: skip
        self._children = [learner, *routers, *actors]
        for child in self._children:
            child.start()
        return learner

    # ----------------------------------------------------------------------------------------------------- watching

    async def _run_components(self, registry: Registry, directory: Path) -> None:
        """Until the learner has ended. Raises what its failure means."""
        (directory / "logs").mkdir(exist_ok=True)
        if self._options.restart:
            (directory / STEP_LOG).unlink(missing_ok=True)
        self._new_steps()
        before = await registry.head(self._spec.run.name)
        learner = self._spawn(directory)
        heads, roster = Heads(registry), Roster(registry)
        try:
            with self._display() as show:
                while True:
                    await asyncio.sleep(REFRESH_SECONDS)
                    snapshot = self._snapshot(heads, roster)
                    show(snapshot)
                    if snapshot and (before is None or snapshot.head.incarnation != before[0].incarnation):
                        for option in self._once:
                            learner.forget(option)  # it has begun: should it crash, it is to go on
                    code = self._tend(learner)
                    if code is not None:
                        show(self._snapshot(heads, roster))
                        break
        finally:
            await heads.close()
            await roster.close()
        if code != 0:
            raise _learner_error(code, learner)

    def _tend(self, learner: Child) -> int | None:
        """Start again what crashed; the learner's exit code once it has ended for good."""
        for child in self._children:
            code = child.poll()
            if code is None:
                if child.restart_if_due():
                    self._say(f"{child.name} started again")
                continue
            if child is learner and (code == 0 or code in LEARNER_VERDICTS):
                return code
            if code == ConfigError.exit_code:
                raise ConfigError(f"{child.name} cannot run: {child.last_lines(1)}")
            self._say(f"{child.name} ended ({describe_exit(code)}), starting it again; see {child.log}")
        for server in self._servers:
            if server.poll() is not None:
                self._say(f"the {server.launch.name} server ended, starting it again; see {server.log}")
                server.start()
        return None

    def _snapshot(self, heads: Heads, roster: Roster) -> Snapshot | None:
        head = heads.heads.get(self._spec.run.name)
        return snapshot_of(head, roster.present()) if head is not None else None

    @contextmanager
    def _display(self) -> Iterator[Callable[[Snapshot | None], None]]:
        """A live table on a terminal, lines elsewhere."""
        starting = f"starting {self._spec.fleet.actors} actors, {self._spec.fleet.routers} router, 1 learner"
        if not self._console.is_terminal:
            self._say(starting)
            yield self._show_lines
            return
        with Live(view.live(None, [], starting), console=self._console, refresh_per_second=4) as live:

            def show(snapshot: Snapshot | None) -> None:
                self._new_steps()
                live.update(view.live(snapshot, self._rewards, starting))

            yield show

    def _new_steps(self) -> list[dict[str, Any]]:
        """The steps that the learner has logged since the last call."""
        path = self._options.directory / STEP_LOG
        if not path.exists():
            return []
        with path.open("rb") as file:
            if path.stat().st_size < self._read_to:
                self._read_to = 0  # begun anew
            file.seek(self._read_to)
            lines = file.readlines()
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()  # still being written
        self._read_to += sum(map(len, lines))
        steps = [json.loads(line) for line in lines]
        self._rewards += [step["reward"] for step in steps]
        return steps

    def _show_lines(self, snapshot: Snapshot | None) -> None:
        for step in self._new_steps():
            self._say(view.step_line(step, snapshot))
        version = snapshot.gauge("eval_version", -1.0) if snapshot is not None else -1.0
        if snapshot is not None and snapshot.learner is not None and version not in (-1.0, self._said_evaluation):
            self._said_evaluation = version
            for line in view.evaluation_lines(snapshot.learner.gauges)[:1]:
                self._say(line)
        for node in snapshot.nodes if snapshot is not None else ():
            if node.detail and node.detail != self._said_details.get(node.id):
                self._said_details[node.id] = node.detail
                self._say(f"note: {node.detail}" if node.node == "learner" else f"note: {node.id}: {node.detail}")

    # ------------------------------------------------------------------------------------------------------- result

    def _show_figures(self, summary: dict[str, Any]) -> None:
        run = summary["run"]
        self._say(
            f"\nrun {run}: {summary['steps']} steps in {view.duration(summary['seconds'])}, mean reward "
            f"{summary['reward_first5']:.2f} (first 5 steps) -> {summary['reward_last5']:.2f} (last 5 steps)"
        )
        groups = {name.removeprefix("groups_"): value for name, value in summary.items() if name.startswith("groups_")}
        for line in view.lost_lines(groups, summary):
            self._say(line)
        self._say(f"adapter: {summary['adapter_key']} (version {summary['head']})")
        self._say(f"get it:  farflung adapters pull {run} ./{run}-adapter --dir {self._options.directory}")
        self._say("         (--merge writes a plain model; --dir starts the servers of that directory meanwhile)")

    async def _show_answers(self, bus: Bus, summary: dict[str, Any], files: ModelFiles) -> None:
        """What the model said before and after, to a few tasks. Not worth failing for."""
        try:
            for question, before, after in await self._ask_before_and_after(bus, summary, files):
                self._say(f"\n  {question}\n    before: {before}\n    after:  {after}")
        except FarflungError as error:
            self._say(f"(no sample answers: {error})")

    async def _ask_before_and_after(
        self, bus: Bus, summary: dict[str, Any], files: ModelFiles
    ) -> Sequence[tuple[str, str, str]]:
        """Greedy answers of the base model and of the newest version to a few tasks that have prompts."""
        from learner.tasks import load_tasks, order

        spec = self._spec
        if spec.environment.environment:
            return []
        source = load_tasks(spec.tasks, [self._options.config.resolve().parent])
        tokenizer = ChatTokenizer.from_directory(files.directory)
        numbers = itertools.count()
        answers = []
        for index in range(3):
            row = source.row(order(index, source.length, spec.run.seed, spec.tasks.shuffle))
            prompt = row[spec.tasks.prompt_column]
            asked = prompt_ids(tokenizer, with_system_prompt(prompt, spec.environment.system_prompt))
            replies = []
            for adapter, version in ((None, 0), (summary["adapter_name"], summary["head"])):
                request = GenerateRequest(
                    id=f"show-{time.time_ns()}-{next(numbers)}",
                    run=spec.run.name,
                    group="",
                    siblings=1,
                    adapter=adapter,
                    version=version,
                    prompt=pack_ids(asked),
                    max_new_tokens=spec.sampling.max_new_tokens,
                    temperature=0.0,
                    stop_token_ids=list(tokenizer.eos_ids),
                )
                message = await bus.request(generate_subject(spec.fleet_name), request, timeout=30)
                reply = decode_one_of(message.data, GenerateReply) if message is not None else None
                replies.append(tokenizer.decode(unpack_ids(reply.token_ids)).strip() if reply else "(no answer)")
            answers.append((_shown(prompt), replies[0], replies[1]))
        return answers


def _shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def _learner_error(code: int, learner: Child) -> FarflungError:
    """The learner's own last words, under its own exit code."""
    line = learner.last_lines(1).removeprefix("farflung learner: ")
    error = FarflungError(line or f"the learner ended with {describe_exit(code)}; see {learner.log}")
    error.exit_code = code
    return error
