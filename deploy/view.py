"""How a run looks on a terminal: a live table, or plain lines where the output is no terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker.messages import Node
from deploy.snapshot import Snapshot
from learner.evaluation import Evaluation, sentence

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The last `width` values as a line of bars, scaled to their own range."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(SPARKS[min(7, int((value - low) / span * 7.999))] for value in shown)


def duration(seconds: float) -> str:
    """Seconds as a person writes them."""
    seconds = max(0, round(seconds))
    if seconds < 90:
        return f"{seconds} s"
    if seconds < 5400:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def step_line(step: Mapping[str, Any], snapshot: Snapshot | None) -> str:
    """One plain line for a step that was made. `step`: the learner's record of it."""
    line = (
        f"step {step['step']}  reward {step['reward']:.3f}  head {step['head']} active {step['active']}"
        f"  staleness {step['staleness']:.2f}  wait {step['seconds_wait']:.1f} s  train {step['seconds_train']:.1f} s"
        f"  commit {step['seconds_commit']:.2f} s"
    )
    if snapshot is None:
        return line
    return line + (
        f"  occupancy {snapshot.gauge('occupancy'):.0%}  rollout wait {snapshot.gauge('rollout_wait'):.0%}"
        f"  backpressure {snapshot.backpressure:.0%}  {snapshot.tokens_per_second:.0f} tok/s"
        f"  left {_left(step['seconds_left'], snapshot)}"
    )


def time_left(snapshot: Snapshot) -> str:
    """An honest estimate: what the remaining steps take at the recent pace; a target may end the run sooner."""
    return _left(snapshot.gauge("seconds_left"), snapshot)


def _left(seconds: float, snapshot: Snapshot) -> str:
    if seconds <= 0:
        return "unknown yet" if snapshot.head.step < 1 else "nothing"
    target = snapshot.head.spec.get("run", {}).get("target_reward")
    return f"{'at most ' if target is not None else ''}{duration(seconds)}"


def live(snapshot: Snapshot | None, rewards: Sequence[float], starting: str) -> RenderableType:
    """The live view: the run, its flow, its components."""
    if snapshot is None:
        return Panel(Text(starting), title="farflung")
    head = snapshot.head
    steps = max(1.0, snapshot.gauge("steps", 1.0))
    figures = Table.grid(padding=(0, 3))
    for _ in range(4):
        figures.add_column()
    cells = [
        ("step", f"{head.step} of {steps:.0f}"),
        ("reward", f"{snapshot.gauge('reward'):.3f}"),
        ("version", f"head {head.head}, active {head.active}"),
        ("time left", time_left(snapshot)),
        ("occupancy", f"{snapshot.gauge('occupancy'):.0%}"),
        ("rollout wait", f"{snapshot.gauge('rollout_wait'):.0%}"),
        ("backpressure", f"{snapshot.backpressure:.0%}"),
        ("staleness", f"{snapshot.gauge('staleness'):.2f} (max {snapshot.gauge('staleness_max'):.0f})"),
        ("sampling", f"{snapshot.tokens_per_second:.0f} tok/s"),
        ("training", f"{snapshot.gauge('tokens_per_second'):.0f} tok/s"),
        ("groups", _groups(snapshot)),
        ("truth", f"{snapshot.gauge('truth_mean'):.1e}"),
    ]
    for start in range(0, len(cells), 4):
        row = []
        for name, value in cells[start : start + 4]:
            row.append(Text.assemble((f"{name} ", "dim"), (value, "bold")))
        figures.add_row(*row)
    parts: list[RenderableType] = [
        ProgressBar(total=steps, completed=head.step),
        figures,
        Text.assemble(("reward ", "dim"), sparkline(rewards), (f"  {snapshot.verdict().sentence}", "italic")),
        _components(snapshot),
    ]
    gauges = snapshot.learner.gauges if snapshot.learner else {}
    parts += [Text(line) for line in evaluation_lines(gauges)]
    parts += [Text(line, style="dim") for line in lost_lines(gauges, gauges)]
    detail = snapshot.learner.detail if snapshot.learner else "the learner is not there"
    if detail:
        parts.append(Text(detail, style="yellow"))
    return Panel(Group(*parts), title=Text(f"farflung · {head.run} · {head.state}"))


def evaluation_lines(gauges: Mapping[str, float]) -> list[str]:
    """The learner's last evaluation and the one under way, as far as there are any."""
    lines = []
    if "eval_version" in gauges:
        figures = {name.removeprefix("eval_"): value for name, value in gauges.items() if name.startswith("eval_")}
        lines.append(f"evaluation of version {figures['version']:.0f}: {sentence(figures)}")
    if "evaluating" in gauges:
        lines.append(
            f"evaluating version {gauges['evaluating']:.0f}: {gauges['evaluating_done']:.0f} of "
            f"{gauges['evaluating_tasks']:.0f} tasks"
        )
    return lines


def _groups(snapshot: Snapshot) -> str:
    lost = sum(snapshot.gauge(name) for name in ("dropped", "failed", "expired"))
    return f"{snapshot.gauge('trained'):.0f} trained, {snapshot.gauge('skipped'):.0f} skipped, {lost:.0f} lost"


def lost_lines(groups: Mapping[str, float], tails: Mapping[str, float]) -> list[str]:
    """What was lost by length and duration beside what was used, a line for each kind: losing what is long is a bias.

    `groups`: how many had which outcome. `tails`: `learner.tails.Tails.figures`.
    """
    lines = []
    used = _lengths("used", tails)
    for kind in ("dropped", "failed", "expired"):
        if groups.get(kind) and (lost := _lengths(kind, tails)):
            lines.append(f"{kind}: {groups[kind]:.0f} groups, {lost}" + (f"; used: {used}" if used else ""))
    return lines


def _lengths(kind: str, tails: Mapping[str, float]) -> str:
    parts = []
    if f"{kind}_tokens_mean" in tails:
        mean, high = tails[f"{kind}_tokens_mean"], tails[f"{kind}_tokens_p99"]
        parts.append(f"{mean:.0f} sampled tokens an episode at the mean (p99 {high:.0f})")
    if f"{kind}_seconds_mean" in tails:
        mean, high = tails[f"{kind}_seconds_mean"], tails[f"{kind}_seconds_p99"]
        parts.append(f"{mean:.1f} s a group (p99 {high:.1f} s)")
    return ", ".join(parts)


def _components(snapshot: Snapshot) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("component", "state", "doing", "note"):
        table.add_column(name)
    for node in snapshot.nodes:
        doing = _doing(node)
        refused = "; ".join(f"{name}: {reason}" for name, reason in node.refused.items())
        style = {"ready": "green", "joining": "yellow"}.get(node.state, "red")
        lacking = f"lacks the active version {snapshot.head.active}" if snapshot.lacks_active(node) else ""
        note = "" if node.node == "learner" else "; ".join(part for part in (lacking, refused or node.detail) if part)
        table.add_row(Text(node.id), Text(node.state, style=style), Text(doing), Text(note[:80]))
    return table


def _doing(node: Node) -> str:
    gauge = node.gauges.get
    match node.node:
        case "learner":
            return f"step {gauge('step', 0):.0f}, {gauge('buffered', 0):.0f} groups buffered"
        case "actor":
            evaluating = f", {gauge('evaluating', 0):.0f} of an evaluation" if gauge("evaluating") else ""
            return f"{gauge('episodes', 0):.0f} of {node.capacity} episodes{evaluating}"
        case "replica":
            adapters = f"{len(node.confirmed)} of {node.slots} adapters"
            return f"{gauge('running', 0):.0f} running, {gauge('tokens_per_second', 0):.0f} tok/s, {adapters}"
        case "router":
            return f"{gauge('inflight', 0):.0f} in flight, {gauge('waiting', 0):.0f} waiting"
        case "evaluator":
            done, tasks = gauge("evaluating_done", 0.0), gauge("evaluating_tasks", 0.0)
            return f"version {gauge('evaluating', 0):.0f}: {done:.0f} of {tasks:.0f} tasks" if tasks else ""


def print_status(
    console: Console,
    snapshots: Sequence[Snapshot],
    closed: Sequence[tuple[Mapping[str, int], Mapping[str, float]]],
    evaluated: Sequence[Evaluation | None],
    nodes_elsewhere: int,
) -> None:
    """`farflung status` for people. `closed`: each run's ledger, and the lengths and durations of its groups;
    `evaluated`: its newest evaluation."""
    if not snapshots:
        console.print("no runs yet; start one with `farflung up CONFIG` or `farflung learner CONFIG`")
    for snapshot, (ledger, tails), result in zip(snapshots, closed, evaluated, strict=True):
        console.print(live(snapshot, [], ""))
        versions = ", ".join(f"{ref.version}" for ref in snapshot.head.live) or "base only"
        console.print(f"  versions kept loaded: {versions}    incarnation {snapshot.head.incarnation}")
        console.print("  groups: " + ", ".join(f"{number} {name}" for name, number in ledger.items()), markup=False)
        if result is not None and snapshot.learner is None:
            console.print(f"  evaluation of version {result.version}: {sentence(result.numbers())}", markup=False)
        for line in lost_lines(ledger, tails):
            console.print(f"  {line}", markup=False)
    if nodes_elsewhere:
        console.print(f"{nodes_elsewhere} nodes belong to fleets without a run")
