"""Shares, rates, the diagnosis, and the files that stand in for a collector."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from observability.diagnosis import Bottleneck, Readings, diagnose
from observability.shares import Rate, Share

CALM = Readings(
    steps=10, occupancy=0.3, rollout_wait=0.1, backpressure=0.0, credit_spent=False, slots_idle=0.1,
    outside_generation=0.1, inflight=0.5, replica_load=0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "none"),
        ({"steps": 1}, "unknown"),
        ({"rollout_wait": 0.0, "occupancy": 0.9, "backpressure": 0.6}, "learner"),
        ({"rollout_wait": 0.8, "occupancy": 0.0}, "generation"),
        ({"rollout_wait": 0.8, "credit_spent": True, "slots_idle": 0.8}, "window"),
        ({"rollout_wait": 0.8, "inflight": 1.0, "replica_load": 0.2}, "inflight cap"),
        ({"rollout_wait": 0.8, "outside_generation": 0.9}, "environment"),
    ],
)
def test_each_bottleneck_is_named(changes: dict[str, Any], expected: Bottleneck) -> None:
    verdict = diagnose(replace(CALM, **changes))
    assert verdict.bottleneck == expected
    assert verdict.sentence


def test_a_share_follows_what_was_so_lately() -> None:
    share = Share(memory=10.0)
    share.set(1.0, 0.0)
    assert share.read(5.0) == pytest.approx(1.0)
    share.set(0.0, 5.0)
    assert share.read(10.0) == pytest.approx(0.378, abs=0.01)
    assert share.read(1000.0) < 1e-6


def test_a_rate_settles_at_what_comes_in_per_second() -> None:
    rate = Rate(memory=10.0)
    for second in range(100):
        rate.add(50.0, float(second))
    assert rate.read(100.0) == pytest.approx(50.0, rel=0.06)
    assert Rate().read(1.0) == 0.0


def test_spans_join_across_processes_and_land_as_otlp_json_lines(tmp_path: Path) -> None:
    code = """
import sys, json, pathlib
from observability import tracing, metrics
here = pathlib.Path(sys.argv[1])
telemetry = tracing.configure("part", sys.argv[2], directory=here)
parent = json.loads(sys.argv[3])
with tracing.span(sys.argv[2], parent=parent, links=[parent] if parent else [], run="r"):
    print(json.dumps(tracing.headers()))
    metrics.count("farflung.groups", 2, outcome="trained")
telemetry.shutdown()
"""

    def process(name: str, parent: dict[str, str]) -> dict[str, str]:
        command = [sys.executable, "-c", code, str(tmp_path), name, json.dumps(parent)]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        return dict(json.loads(done.stdout))

    headers = process("first", {})
    process("second", headers)
    spans = {}
    for path in tmp_path.glob("traces-*.jsonl"):
        for line in path.read_text().splitlines():
            for resource in json.loads(line)["resourceSpans"]:
                for scope in resource["scopeSpans"]:
                    spans |= {span["name"]: span for span in scope["spans"]}
    assert spans["second"]["traceId"] == spans["first"]["traceId"] == headers["traceparent"].split("-")[1]
    assert spans["second"]["parentSpanId"] == spans["first"]["spanId"]
    assert spans["second"]["links"][0]["spanId"] == spans["first"]["spanId"]
    assert spans["first"]["kind"] == 1, "OTLP JSON writes enums as numbers"
    assert "farflung.groups" in (tmp_path / "metrics-first.jsonl").read_text()


def test_nobody_is_blamed_while_a_run_is_paused_stopped_or_without_a_learner() -> None:
    from broker.messages import Node
    from deploy.snapshot import snapshot_of
    from tests.unit.test_learner_parts import head

    def learner(detail: str) -> Node:
        gauges = {"step": 9.0, "rollout_wait": 0.9}
        return Node(
            id="l", node="learner", fleet="f", host="h", pid=1, state="ready", run="r", detail=detail, gauges=gauges
        )

    assert snapshot_of(head(), [learner("")]).verdict().bottleneck == "generation"
    assert snapshot_of(head(), [learner("paused by request")]).verdict().sentence == "the run is paused"
    assert snapshot_of(head(state="stopped"), [learner("")]).verdict().sentence == "the run is stopped"
    assert snapshot_of(head(), []).verdict().sentence == "no learner is present"
