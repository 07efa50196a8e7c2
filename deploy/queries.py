"""The commands that ask: status, runs, adapters, trajectories."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from broker import names
from broker.adapters import write_adapter_directory
from broker.bus import Bus
from broker.chat import ChatTokenizer
from broker.errors import ConfigError, FarflungError, ObjectMissing, RunConflict, StoreError
from broker.messages import Control, Head, Node, VersionRecord
from broker.models import resolve
from broker.registry import Registry, Roster
from broker.store import Store, StoreAddress
from broker.trajectories import Episode, Group
from deploy.processes import hold
from deploy.profile import Connection, find, read
from deploy.running import connected
from deploy.servers import Server, nats_launch, store_launch
from deploy.snapshot import Snapshot, snapshot_of
from deploy.view import print_status
from learner.evaluation import Evaluation
from learner.evaluations import newest_result, results_of
from learner.history import history_of, newest_head, prefix_of
from learner.ledger import Ledger
from learner.lineage import lineage
from learner.summary import summary_of
from learner.tails import figures_in

TURN_SECONDS = 30.0
"""How long a query waits for another one that has the directory's servers: most take a second or two."""

LEAVE_SECONDS = 60.0
"""How long a deletion waits for the run's learner to leave."""


@dataclass(frozen=True, slots=True)
class Services:
    """What a query asks."""

    bus: Bus
    registry: Registry
    store: Store
    console: Console


@asynccontextmanager
async def opened(options: dict[str, Any], directory: Path | None) -> AsyncIterator[Services]:
    """Take the connection options out of `options` and connect; with `directory`, to its servers."""
    named = {
        "access_key": options.pop("s3_access_key"),
        "secret_key": options.pop("s3_secret_key"),
        "region": options.pop("s3_region"),
        **{name: options.pop(name) for name in ("nats", "s3", "profile")},
    }
    async with AsyncExitStack() as stack:
        connection = find(**named) if directory is None else await stack.enter_async_context(_servers_of(directory))
        bus, registry, store = await stack.enter_async_context(connected(connection, "query"))
        yield Services(bus, registry, store, _console())


@asynccontextmanager
async def _servers_of(directory: Path) -> AsyncIterator[Connection]:
    """The servers of a directory of `farflung up`: those in use while it runs there, else its own, started meanwhile.

    Its data never have two servers: whoever starts them holds their lock. Queries that start them take turns, so that
    none is cut off by the end of another. Raises ConfigError when the directory has never had a run.
    """
    where, profile = directory.resolve() / "servers", directory / "profile.toml"
    made = (("nats.json", nats_launch), ("store.json", store_launch))
    own = [launch for name, launch in made if (where / name).exists()]
    if not own and not profile.exists():
        raise ConfigError(f"{directory} has no servers of `farflung up`; give the --dir of a run, as runs/NAME is")
    urls: dict[str, str] = {}
    with ExitStack() as held:
        if own and await _may_start(where, held):
            for launch in own:
                server = Server(launch(where), where / "query.log")
                held.callback(server.stop)
                server.start()
                urls[server.launch.name] = server.launch.url
        if len(urls) < len(made):
            kept = read(profile)
            urls = {"nats": kept.nats, "store": kept.s3, **urls}
        yield Connection(nats=urls["nats"], store=StoreAddress.parse(urls["store"]))


async def _may_start(where: Path, held: ExitStack) -> bool:
    """Whether the servers in `where` are ours to start, and then hold them; not while `farflung up` has them."""
    busy = f"another command has started the servers in {where}; wait for its end, then try again"
    deadline = time.monotonic() + TURN_SECONDS
    with ExitStack() as ours:
        while True:
            try:
                ours.enter_context(hold(where / "query.lock", busy))
                break
            except RunConflict:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        try:
            ours.enter_context(hold(where / "lock", busy))
        except RunConflict:
            return False
        held.enter_context(ours.pop_all())
    return True


def _console() -> Console:
    """A terminal's own width; elsewhere lines are as long as they are, for other programs to read.

    Text is shown as it is: what nodes, models and users say may have square brackets and colons in it.
    """
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 250)


async def _present(registry: Registry) -> list[Node]:
    roster = Roster(registry)
    await roster.ready.wait()
    nodes = roster.present()
    await roster.close()
    return nodes


async def head_of(services: Services, run: str) -> Head:
    found = await services.registry.head(run)
    if found is None:
        there = ", ".join(head.run for head in await services.registry.heads()) or "none"
        raise RunConflict(f"there is no run {run}; runs there are: {there}")
    return found[0]


async def status(services: Services, run: str | None, as_json: bool) -> None:
    """Runs, versions, ledger and nodes."""
    heads = [await head_of(services, run)] if run else await services.registry.heads()
    nodes = await _present(services.registry)
    snapshots = [snapshot_of(head, nodes) for head in heads]
    closed = [await _closed(services, snapshot) for snapshot in snapshots]
    evaluated = [await _newest_evaluation(services, head) for head in heads]
    known = {node.id for snapshot in snapshots for node in snapshot.nodes}
    if as_json:
        plain = {
            "runs": [
                snapshot.to_plain()
                | {"ledger": ledger, "tails": tails, "evaluation": result.flat() if result is not None else None}
                for snapshot, (ledger, tails), result in zip(snapshots, closed, evaluated, strict=True)
            ],
            "other_nodes": [msgspec.to_builtins(node) for node in nodes if node.id not in known],
        }
        click.echo(json.dumps(plain))
        return
    elsewhere = len([node for node in nodes if node.id not in known])
    print_status(services.console, snapshots, closed, evaluated, elsewhere)


async def _newest_evaluation(services: Services, head: Head) -> Evaluation | None:
    try:
        return await newest_result(services.store, head)
    except StoreError as error:
        click.echo(f"the evaluations of run {head.run} cannot be read: {error}", err=True)
        return None


async def _closed(services: Services, snapshot: Snapshot) -> tuple[dict[str, int], dict[str, float]]:
    """A run's groups as its learner counts them now, as of the last commit while no learner is there: how many had
    which outcome, and how long they had been.
    """
    gauges = snapshot.learner.gauges if snapshot.learner else {}
    if "issued" in gauges:
        return {name: int(gauges[name]) for name in Ledger().counts()}, figures_in(gauges)
    try:
        summary = await summary_of(services.registry, services.store, snapshot.head.run)
    except StoreError as error:
        click.echo(f"the ledger of run {snapshot.head.run} cannot be read: {error}", err=True)
        return {}, {}
    return summary.groups, summary.tails


async def runs_list(services: Services, as_json: bool) -> None:
    """Every run, a line each."""
    heads = await services.registry.heads()
    if as_json:
        fields = ("run", "fleet", "incarnation", "epoch", "state", "step", "head", "active", "learner", "summary")
        click.echo(json.dumps([{field: getattr(head, field) for field in fields} for head in heads]))
        return
    table = _table("run", "fleet", "state", "step", "head", "active", "reward")
    for head in heads:
        reward = head.summary.get("reward")
        table.add_row(
            head.run, head.fleet, head.state, str(head.step), str(head.head), str(head.active),
            f"{reward:.3f}" if reward is not None else "-",
        )  # fmt: skip
    services.console.print(table)


async def control(services: Services, run: str, wanted: Literal["run", "pause", "stop", "delete"]) -> None:
    """Ask something of a run's learner."""
    head = await head_of(services, run)
    await services.registry.put_control(Control(run=run, wanted=wanted))
    present = any(node.id == head.learner for node in await _present(services.registry))
    verb = {"run": "goes on", "pause": "pauses", "stop": "stops after its step", "delete": "stops"}[wanted]
    note = "" if present else "; no learner is present now, the next one will heed it"
    services.console.print(f"run {run} {verb}{note}")


async def replay(services: Services, run: str, model: str | None, as_json: bool) -> None:
    """Make every step again. Raises ReplayMismatch after the last one when any differs."""
    from learner.replay import StepReplayed, require_identical
    from learner.replay import replay as make_again

    head = await head_of(services, run)
    files = await asyncio.to_thread(resolve, model or str(head.spec["run"]["model"]), services.console.print)

    def show(step: StepReplayed) -> None:
        if not as_json:
            verdict = "bit-identical" if step.identical else f"differs: {step.difference}"
            services.console.print(f"step {step.step}  {len(step.groups)} groups  {step.adapter[:16]}  {verdict}")

    try:
        steps = await make_again(services.store, head, files, on_step=show)
    except ImportError as error:
        raise ConfigError(f"a replay needs `pip install 'farflung[train]'`: {error}") from error
    if as_json:
        identical = all(step.identical for step in steps)
        plain = [step.to_json() for step in steps]
        click.echo(json.dumps({"run": run, "incarnation": head.incarnation, "identical": identical, "steps": plain}))
    require_identical(run, steps)


async def plot(services: Services, run: str, names: Sequence[str], out: Path | None, as_json: bool) -> None:
    """Draw the figures of every commit that the store still has. Raises ConfigError before the first step."""
    from deploy.plot import CURVES, png_plot, terminal_plot, values_of

    head = await head_of(services, run)
    records: list[Mapping[str, float]] = []
    with suppress(ObjectMissing):  # older commits may have been swept
        async for _, checkpoint in lineage(services.store, head.checkpoint):
            records.insert(0, checkpoint.record)
    if not records:
        raise ConfigError(f"run {run} has made no step yet, so there is nothing to draw")
    if as_json:
        for record in records:
            click.echo(json.dumps(record))
        return
    evaluations = await results_of(services.registry, services.store, head)
    told = [{f"eval_{name}": value for name, value in result.numbers().items()} for result in evaluations]
    chosen = list(names) or [name for name in CURVES if name in records[-1] or any(name in figures for figures in told)]
    records += [{"step": result.step, **figures} for result, figures in zip(evaluations, told, strict=True)]
    for name in chosen:
        steps, values = values_of(records, name)
        services.console.print(f"{name}, steps {steps[0]:.0f} to {steps[-1]:.0f}, last {values[-1]:.4g}")
        for line in terminal_plot(steps, values):
            services.console.print("  " + line)
    if out is not None:
        png_plot(out, run, records, chosen)
        services.console.print(f"drawn to {out}")


async def delete(services: Services, run: str) -> None:
    """Stop the learner, then remove streams, records and objects.

    A mark stays in the store, so that nothing of the run comes back: neither what a learner that was cut off writes
    later, nor what a deletion that was cut short left.
    """
    history = await history_of(services.store, run)
    if await services.registry.head(run) is None and (lost := await newest_head(services.store, run, history)):
        head = lost  # the broker has lost it
    else:
        head = await head_of(services, run)
    await services.registry.put_control(Control(run=run, wanted="delete"))
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(node.node == "learner" and node.run == run for node in await _present(services.registry)):
        if time.monotonic() > deadline:
            raise RunConflict(f"the learner {head.learner} of run {run} does not leave; stop it, then delete again")
        await asyncio.sleep(0.5)
    mark = msgspec.structs.replace(head, epoch=max(history.epoch, head.epoch), detail="deleted")
    kept = await services.store.put(prefix_of("deleted", mark), mark.encode())
    await services.bus.delete_stream(names.tasks_stream(run))
    await services.bus.delete_stream(names.groups_stream(run))
    objects = [entry for entry in await services.store.list(f"runs/{run}/") if entry[0] != kept.key]
    for start in range(0, len(objects), 64):
        await asyncio.gather(*(services.store.remove(key) for key, _ in objects[start : start + 64]))
    await services.registry.forget(run)
    services.console.print(f"run {run} is deleted, {len(objects)} objects with it")


async def adapters_list(services: Services, run: str, as_json: bool) -> None:
    """Every version of a run's present incarnation."""
    head = await head_of(services, run)
    records = await records_of(services, head)
    if as_json:
        click.echo(json.dumps([msgspec.to_builtins(record) for record in records]))
        return
    table = _table("version", "step", "state", "reward", "name", "MB", "key")
    for record in records:
        table.add_row(
            str(record.adapter.version), str(record.step), _state(record, head),
            f"{record.reward:.3f}" if record.reward is not None else "-",
            record.adapter.name, f"{record.adapter.size / 1e6:.1f}", record.adapter.key,
        )  # fmt: skip
    services.console.print(table)


def _state(record: VersionRecord, head: Head) -> str:
    version = record.adapter.version
    if version == head.active:
        return "active"
    return "loaded" if version in {ref.version for ref in head.live} else record.state


async def records_of(services: Services, head: Head) -> list[VersionRecord]:
    found = await services.registry.versions(head.run)
    return [
        record for record in found if record.incarnation == head.incarnation and record.adapter.version <= head.head
    ]


async def adapters_pull(services: Services, run: str, target: Path, number: int | None, merge: bool) -> None:
    """Fetch one version; verified by its sha256."""
    head = await head_of(services, run)
    records = {record.adapter.version: record for record in await records_of(services, head)}
    wanted = head.head if number is None else number
    if wanted not in records:
        there = f"{min(records)} to {max(records)}" if records else "none: no step was made yet"
        raise ConfigError(f"run {run} has no version {wanted}; versions there are: {there}")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{target} is not empty; name a new directory")
    ref = records[wanted].adapter
    data = await services.store.get(ref.blob)
    if not merge:
        write_adapter_directory(data, target)
        services.console.print(f"version {wanted} of {run} ({ref.name}) is in {target}")
        return
    await asyncio.to_thread(_merge, str(head.spec["run"]["model"]), data, target, services.console)
    services.console.print(f"version {wanted} of {run}, merged into its base model, is in {target}")


def _merge(model: str, data: bytes, target: Path, console: Console) -> None:
    """Write base model plus adapter as one plain model."""
    import tempfile

    try:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"--merge needs `pip install 'farflung[train]'`: {error}") from error
    files = resolve(model, console.print)
    with tempfile.TemporaryDirectory() as scratch:
        write_adapter_directory(data, Path(scratch) / "adapter")
        base = AutoModelForCausalLM.from_pretrained(files.directory, dtype="auto")
        merged = PeftModel.from_pretrained(base, str(Path(scratch) / "adapter")).merge_and_unload()
    merged.save_pretrained(target)
    AutoTokenizer.from_pretrained(files.directory).save_pretrained(target)


async def _group_objects(services: Services, head: Head) -> list[tuple[str, float, str]]:
    """(group id, time written, key) of every stored group, newest first."""
    prefix = f"{names.run_prefix(head.run, head.incarnation)}/groups/"
    objects = await services.store.list(prefix)
    return sorted(((names.group_of(key), written, key) for key, written in objects), reverse=True)


async def trajectories_list(services: Services, run: str, limit: int, as_json: bool) -> None:
    """The newest stored groups, with their rewards."""
    head = await head_of(services, run)
    chosen = (await _group_objects(services, head))[:limit]
    groups = [Group.from_blob(await services.store.read(key)) for _, _, key in chosen]
    if as_json:
        plain = [
            {"group": group.group, "version": group.version, "rewards": group.rewards, "key": key}
            for group, (_, _, key) in zip(groups, chosen, strict=True)
        ]
        click.echo(json.dumps(plain))
        return
    table = _table("group", "version", "episodes", "mean reward", "sampled tokens")
    for group in groups:
        table.add_row(
            group.group, str(group.version), str(len(group.episodes)),
            f"{sum(group.rewards) / len(group.rewards):.3f}",
            str(sum(episode.sampled_tokens for episode in group.episodes)),
        )  # fmt: skip
    services.console.print(table)


async def trajectories_show(services: Services, run: str, id: str | None, tokens: bool, as_json: bool) -> None:
    """One group's episodes."""
    head = await head_of(services, run)
    objects = await _group_objects(services, head)
    keys = [key for group, _, key in objects if id is None or group == id]
    if not keys:
        raise ConfigError(f"run {run} has no stored group {id or ''}; see `farflung trajectories list {run}`")
    group = Group.from_blob(await services.store.read(keys[0]))
    if as_json:
        click.echo(json.dumps(_group_plain(group)))
        return
    title = Text.assemble((group.group, "bold"), f"  version {group.version} ({group.adapter or 'base model'})")
    services.console.print(title)
    tokenizer = _tokenizer(head) if tokens else None
    for episode in group.episodes:
        _print_episode(services.console, episode, tokenizer)


def _tokenizer(head: Head) -> ChatTokenizer | None:
    try:
        return ChatTokenizer.from_directory(resolve(str(head.spec["run"]["model"])).directory)
    except FarflungError:
        return None


def _print_episode(console: Console, episode: Episode, tokenizer: ChatTokenizer | None) -> None:
    cut = ", truncated" if episode.truncated else ""
    figures = f"  reward {episode.reward:.3f}{cut}  on {', '.join(episode.replicas)}"
    console.print(Text.assemble("\n", (f"episode {episode.index}", "bold"), figures))
    for turn in episode.turns:
        console.print(Text.assemble(("  " + turn.role + ": ", "dim"), turn.content))
    if tokenizer is None:
        return
    for row in episode.rows:
        served, behaviour, trained = row.served_by, row.behaviour, row.trained
        for place in range(len(row)):
            text = tokenizer.token_text(int(row.ids[place]))
            mark = f"{behaviour[place]:8.4f}  v{served[place]}" if trained[place] else "  (given)"
            console.print(f"    {int(row.ids[place]):>7}  {mark:16} {text!r}")


def _group_plain(group: Group) -> dict[str, Any]:
    return {
        "group": group.group,
        "version": group.version,
        "adapter": group.adapter,
        "columns": group.columns,
        "episodes": [
            {
                "index": episode.index,
                "reward": episode.reward,
                "parts": episode.parts,
                "truncated": episode.truncated,
                "replicas": episode.replicas,
                "turns": [msgspec.to_builtins(turn) for turn in episode.turns],
                "rows": [
                    {
                        "token_ids": row.ids.tolist(),
                        "logprobs": row.behaviour.tolist(),
                        "trained": row.trained.tolist(),
                        "versions": row.served_by.tolist(),
                    }
                    for row in episode.rows
                ],
            }
            for episode in group.episodes
        ],
    }


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
