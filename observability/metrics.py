"""Metrics: the instruments, by the design's names. Made on first use, so that set-up can come first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Observation

GAUGES = {
    "farflung.queue.occupancy": "Finished, untrained groups over the credit window (0..1)",
    "farflung.backpressure": "Share of actor slot time without a task while credit is spent and a step is buffered",
    "farflung.rollout.wait": "Share of the learner's time spent waiting for groups",
    "farflung.run.step": "Optimizer steps made",
    "farflung.run.head": "Newest committed version",
    "farflung.run.active": "Newest version the fleet serves",
    "farflung.run.reward": "Mean reward of the last step",
    "farflung.run.staleness": "Mean staleness of the last step's tokens, in versions",
    "farflung.run.credit": "Groups that may still be issued",
    "farflung.run.open": "Groups issued and not closed",
    "farflung.learner.tokens_per_second": "Computed tokens per second of the last step",
    "farflung.actor.slots_busy": "Episodes running",
    "farflung.actor.slots": "Episodes that may run at once",
    "farflung.actor.evaluating": "Episodes of evaluations running",
    "farflung.replica.running": "Requests in the replica's batch",
    "farflung.replica.waiting": "Requests waiting in the replica",
    "farflung.replica.tokens_per_second": "Sampled tokens per second",
    "farflung.router.waiting": "Requests without an eligible replica",
    "farflung.router.inflight": "Requests placed and not ended",
    "farflung.router.mirrored_blocks": "KV blocks that replicas are believed to hold",
    "farflung.router.mirror_bytes": "Memory that the router's mirrors of them take",
}
"""Every gauge's name and meaning."""

COUNTERS = {
    "farflung.groups": "Groups closed, by outcome",
    "farflung.groups.late": "Groups that arrived with an id that is not open",
    "farflung.episodes": "Episodes ended, by outcome",
    "farflung.tokens.sampled": "Tokens sampled",
    "farflung.tokens.cached": "Prompt tokens whose KV was reused",
    "farflung.tokens.prompt": "Prompt tokens asked for",
    "farflung.router.placements": "Requests placed, by kind",
}
"""Every counter's name and meaning."""

HISTOGRAMS = {
    "farflung.generate.seconds": "A generation request, as the asker sees it",
    "farflung.episode.seconds": "An episode, from reset to reward",
    "farflung.step.seconds": "Parts of a step, by part",
    "farflung.group.age": "Versions from the one that sampled a trained group to the head that its step's commit left",
}
"""Every histogram's name and meaning."""


@cache
def _meter() -> metrics.Meter:
    return metrics.get_meter("farflung")


@cache
def _counter(name: str) -> Counter:
    return _meter().create_counter(name, description=COUNTERS[name])


@cache
def _histogram(name: str) -> Histogram:
    return _meter().create_histogram(name, description=HISTOGRAMS[name])


def count(name: str, amount: float = 1, **attributes: str) -> None:
    """Add to a counter of COUNTERS."""
    _counter(name).add(amount, attributes)


def record(name: str, value: float, **attributes: str) -> None:
    """Record one value of a histogram of HISTOGRAMS."""
    _histogram(name).record(value, attributes)


def observe(read: Callable[[], Mapping[str, float]], **attributes: str) -> None:
    """Report gauges of GAUGES: at each collection `read` gives name to value, and leaves out what it does not know."""

    def callback(name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def report(_: CallbackOptions) -> Iterable[Observation]:
            values = read()
            if name in values:
                yield Observation(values[name], attributes)

        return report

    for name, meaning in GAUGES.items():
        _meter().create_observable_gauge(name, callbacks=[callback(name)], description=meaning)
