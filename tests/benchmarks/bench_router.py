"""The router beside others, beside the bound, and at scale: `python -m tests.benchmarks.bench_router [PART ...]`.

- `cost`: what one placement takes, for 2 to 512 replicas with their mirrors full.
- `simulated`: the scenarios s1 to s7 in simulated time: ours with and without a named group, the published rule, round
  robin, and the bound of one infinite cache. Exact and repeatable, whatever else the machine does.
- `several`: two and four routers of one fleet beside a single one.
- `spill`: what the spill threshold is worth.
- `fleet`: 512 replicas, 100,000 groups, a replica dying every 5,000 requests. Minutes.
- `peers`: the same scenarios over HTTP through a harness of mock replicas (its folder in FARFLUNG_ROUTER_BENCH), beside
  vllm-router and sglang-router, each in an environment of its own (their folder in FARFLUNG_ROUTER_VENVS). An hour.
- `saturation`: requests per second of one core through the stand-alone HTTP face, beside vllm-router's cache_aware.
- `crash`: a replica killed and restarted under load, over HTTP.

`make bench` measures `cost` and `simulated`, and `saturation` where the harness and the peer are there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from router.placement import Placer, Request
from tests.benchmarks.contenders import Ours, Published, RoundRobin
from tests.benchmarks.fleet import replay
from tests.benchmarks.measure import Row
from tests.benchmarks.traces import BASE, SCENARIOS, asks, bound, stream

ROOT = Path(__file__).parents[2]
HARNESS = Path(os.environ.get("FARFLUNG_ROUTER_BENCH", "router-bench"))
VENVS = Path(os.environ.get("FARFLUNG_ROUTER_VENVS", "/tmp"))
PLACEMENT_SECONDS = 40e-6
"""What a placement of 400 tokens may cost with 64 replicas and a million blocks."""

SLOWED = '{"decode_us":4500,"prefill_us":100,"base_ms":5}'
"""Replicas five times slower than the harness has them: routers are then compared by what they decide, not by how they
share two cores with the load."""


def cost(replicas: int, blocks: int = 1_000_000) -> tuple[float, float, float]:
    """CPU seconds of a placement: of a group's first member, of a sibling; and bytes accounted per mirrored block."""
    placer = Placer(max_bytes=1 << 34)
    for number in range(replicas):
        placer.update_replica(f"r{number}", confirmed=["v"], accepts=True, cache_tokens=blocks // replicas * 16)
    numbers = np.random.default_rng(0)
    template = numbers.integers(0, 30_000, 23, dtype=np.int32)

    def prompt() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.concatenate([template, numbers.integers(0, 30_000, 377, dtype=np.int32)])

    running: list[str] = []
    count = 0
    while placer.mirrored_blocks() < blocks * 0.97:
        placer.place(Request(f"f{count}", prompt(), 400, "v", f"f{count}", 1), 0.0)
        running.append(f"f{count}")
        count += 1
        if len(running) > 4 * replicas:
            placer.complete(running.pop(0), output_tokens=100, cached_tokens=16, prompt_tokens=400)
    size = placer.memory() / placer.mirrored_blocks()
    first = sibling = float("inf")
    for repeat in range(7):
        requests = [Request(f"{repeat}.{n}.0", prompt(), 400, "v", f"{repeat}.{n}", 8) for n in range(400)]
        began = time.process_time()
        for request in requests:
            placer.place(request, 0.0)
        first = min(first, (time.process_time() - began) / len(requests))
        others = [
            Request(f"{request.id}.{n}", request.prompt, 400, "v", request.group, 8)
            for request in requests[:100]
            for n in range(7)
        ]
        began = time.process_time()
        for request in others:
            placer.place(request, 0.0)
        sibling = min(sibling, (time.process_time() - began) / len(others))
        for request in [*requests, *others]:
            placer.complete(request.id, output_tokens=100, cached_tokens=384, prompt_tokens=400)
    return first, sibling, size


def run() -> list[Row]:
    """What `make bench` shows. More is better in each row; balance therefore as mean over most."""
    rows = []
    for replicas in (2, 64, 512):
        first, sibling, _ = cost(replicas)
        mean = (first + 7 * sibling) / 8
        rows.append(
            Row(f"place 400 tokens, {replicas} replicas, 1M blocks", 1 / mean, 1 / PLACEMENT_SECONDS,
                PLACEMENT_SECONDS / mean, "1/s", 1.0)
        )  # fmt: skip
    for name, scenario in SCENARIOS.items():
        ours, published = Ours(scenario, told=False), Published(scenario)
        mine, theirs = replay(scenario, ours), replay(scenario, published)
        rows.append(
            Row(f"{name}: hit rate, against the published rule", mine.hit * 100, theirs.hit * 100,
                mine.hit / theirs.hit, "%", 1.0)
        )  # fmt: skip
        rows.append(
            Row(f"{name}: balance, mean over most, against that", 100 / mine.balance, 100 / theirs.balance,
                theirs.balance / mine.balance, "%", 1.0)
        )  # fmt: skip
    if _can_run(("vllm", "mock")):
        found = {row["label"]: row for row in _harness(["sat"], ["ours", "vllm_cache_aware"])}
        mine_rps, their_rps = (
            found[label]["rps"] / max(1e-9, found[label]["router_cores"]) for label in ("ours", "vllm_cache_aware")
        )
        rows.append(
            Row("HTTP requests per core, against vllm-router", mine_rps, their_rps, mine_rps / their_rps, "1/s", 1.0)
        )
    return rows


# ------------------------------------------------------------------------------------------------------------- parts


def show_cost() -> None:
    """Print the cost of a placement and the memory of a block."""
    for replicas in (2, 16, 64, 256, 512):
        first, sibling, size = cost(replicas)
        print(
            f"{replicas:4} replicas: first member {first * 1e6:5.1f} us, sibling {sibling * 1e6:5.1f} us, "
            f"{size:.1f} bytes a mirrored block"
        )


def show_simulated(seeds: int = 1) -> None:
    """Print hit rate, balance and kinds of placement of each scenario and rule."""
    for name, scenario in SCENARIOS.items():
        for seed in range(seeds):
            limit = f", bound {bound(asks(scenario, seed)):.4f}" if scenario.turns == 1 else ""
            print(f"{name} (seed {seed}{limit})")
            makes: dict[str, Callable[[], Ours | Published | RoundRobin]] = {
                "round robin": lambda: RoundRobin(scenario),  # noqa: B023
                "published rule": lambda: Published(scenario),  # noqa: B023
                "ours": lambda: Ours(scenario, told=False),  # noqa: B023
                "ours, group named": lambda: Ours(scenario),  # noqa: B023
            }
            for label, make in makes.items():
                router = make()
                outcome = replay(scenario, router, seed=seed)
                kinds = ", ".join(f"{kind} {100 * n / outcome.requests:.2f}%" for kind, n in router.placements.items())
                print(f"  {label:18} hit {outcome.hit:.4f}  balance {outcome.balance:.3f}  {kinds}", flush=True)


def show_several() -> None:
    """Print hit rate and balance of several routers beside one."""
    for name in ("s2", "s3", "s4"):
        scenario = SCENARIOS[name]
        for routers in (1, 2, 4):
            outcome = replay(scenario, Ours(scenario, routers=routers))
            print(f"{name} {routers} routers: hit {outcome.hit:.4f}  balance {outcome.balance:.3f}", flush=True)


def show_spill() -> None:
    """Print what the spill threshold does."""
    for name in ("s2", "s4", "s5", "s7"):
        scenario = SCENARIOS[name]
        for spill in (0.0, 2.0, 4.0, 8.0, 16.0, 64.0):
            router = Ours(scenario, told=False, spill=spill)
            outcome = replay(scenario, router)
            share = 100 * router.placements["spill"] / outcome.requests
            figures = f"hit {outcome.hit:.4f}  balance {outcome.balance:.3f}  spilled {share:.2f}%"
            print(f"{name} spill {spill:4.0f}: {figures}", flush=True)


def show_fleet(groups: int = 100_000) -> None:
    """Print what a large fleet does, with and without dying replicas, beside the bound of one infinite cache.

    Whole groups of 8 where 32 requests are in flight on each replica: a replica is at most a group ahead of the
    lightest, half a group ahead of the mean, so that no placement of whole groups is balanced better than about 1.125.
    """
    scenario = replace(
        BASE, replicas=512, slots=64, blocks=4096, groups=groups, prompts=groups, most=400, shortest=100, longest=400,
        version_every=8 * groups // 20, spread=512, in_flight=512 * 32,
    )  # fmt: skip
    print(f"bound of one infinite cache: hit {bound(stream(scenario)):.4f}", flush=True)
    for label, told, die_every in (
        ("a death every 5,000 requests", True, 5000), ("steady", True, 0), ("steady, groups not named", False, 0)
    ):  # fmt: skip
        router = Ours(scenario, told=told)
        began = time.process_time()
        outcome = replay(scenario, router, trace=stream(scenario), die_every=die_every)
        placer = router.placers[0]
        print(
            f"{label}: {outcome.requests} requests, {outcome.deaths} deaths, hit {outcome.hit:.4f}, "
            f"balance {outcome.balance:.3f}, "
            f"{placer.mirrored_blocks()} blocks mirrored in {placer.memory() / 1e6:.1f} MB "
            f"({placer.memory() / placer.mirrored_blocks():.1f} bytes each), "
            f"{time.process_time() - began:.0f} CPU s for router and simulation",
            flush=True,
        )


def show_peers(scenarios: list[str]) -> None:
    """Print the harness's table for each scenario."""
    routers = ["ours", "vllm_cache_aware", "vllm_sll_group", "vllm_sll", "sgl_cache_aware", "sgl_manual_group",
               "published", "round_robin"]  # fmt: skip
    for scenario in scenarios:
        _harness([scenario], routers, slowed=True, show=True)


def _can_run(venvs: tuple[str, ...]) -> bool:
    return (HARNESS / "run_bench.py").exists() and all(
        (VENVS / f"venv-router-{name}" / "bin" / "python").exists() for name in venvs
    )


def _harness(
    scenarios: list[str], routers: list[str], *, slowed: bool = False, show: bool = False
) -> list[dict[str, Any]]:
    """Run the harness and return its rows; peers that are not installed are left out by it."""
    if not _can_run(("mock",)):
        sys.exit(f"expected the harness in {HARNESS} and its needs in {VENVS}/venv-router-mock; its README says which")
    out = VENVS / f"router-bench-{os.getpid()}.jsonl"
    vllm = f"{VENVS}/venv-router-vllm/bin/vllm-router --host 127.0.0.1 --port {{port}} --worker-urls {{upstreams}} "
    vllm += "--prometheus-port 8218 --log-level error --policy"
    sglang = f"{VENVS}/venv-router-sglang/bin/sglang-router launch --host 127.0.0.1 --port {{port}} --worker-urls "
    sglang += "{upstreams} --prometheus-host 127.0.0.1 --prometheus-port 8218 --log-level error --policy"
    plain = "{py} {here}/ref_router.py --port {port} --upstream {upstreams} --policy"
    commands = {
        "ours": (f"{sys.executable} -m tests.benchmarks.stand_alone --port {{port}} --upstream {{upstreams}}", ""),
        "vllm_cache_aware": (f"{vllm} cache_aware", ""),
        "vllm_sll": (f"{vllm} sticky_least_loaded", ""),
        "vllm_sll_group": (f"{vllm} sticky_least_loaded", "--session group"),
        "sgl_cache_aware": (f"{sglang} cache_aware", "--api text"),
        "sgl_manual_group": (
            f"{sglang} manual --assignment-mode min_load",
            "--api text --session group --session-header x-smg-routing-key",
        ),
        "published": (f"{plain} prefix", ""),
        "round_robin": (f"{plain} round_robin", ""),
    }
    arguments = ["--scenario", *scenarios, "--routers", *routers, "--out", str(out), "--logdir", str(VENVS)]
    for label, (command, drive) in commands.items():
        more = f"--mock-config {SLOWED}" if slowed else ""
        arguments += ["--extra", f"{label}={command}::{drive} {more}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    python = VENVS / "venv-router-mock" / "bin" / "python"
    try:
        subprocess.run([python, HARNESS / "run_bench.py", *arguments], env=environment, check=True,
                       stdout=None if show else subprocess.DEVNULL)  # fmt: skip
        return [json.loads(line) for line in out.read_text().splitlines()]
    finally:
        out.unlink(missing_ok=True)


def main() -> None:
    parts: dict[str, Callable[[], object]] = {
        "cost": show_cost,
        "simulated": show_simulated,
        "several": show_several,
        "spill": show_spill,
        "fleet": lambda: show_fleet(options.groups),
        "peers": lambda: show_peers(options.scenario),
        "saturation": lambda: _harness(["sat"], ["ours", "vllm_cache_aware", "published"], show=True),
        "crash": lambda: _harness(["fail"], ["ours", "vllm_cache_aware", "published"], show=True),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"which of {', '.join(parts)}; default: the first three"
    )
    parser.add_argument("--scenario", nargs="+", default=list(SCENARIOS), help="of `peers`")
    parser.add_argument("--groups", type=int, default=100_000, help="of `fleet`")
    options = parser.parse_args()
    for part in options.parts or list(parts)[:3]:
        if part not in parts:
            parser.error(f"expected parts of {', '.join(parts)}, got {part!r}")
        parts[part]()


if __name__ == "__main__":
    main()
