"""Whether it learns: the addition demo under several objectives and seeds, and at several bounds of staleness.

    python -m tests.benchmarks.learning [--objectives NAME ...] [--seeds N ...] [--staleness N ...] [--record FILE]

Each run is `farflung up` on examples/addition.toml with another objective, seed or max_staleness, and nothing else
changed but what an objective needs below. A run has learned when the mean reward of five steps reaches 0.75
within 25 steps. Prints a line per run as it ends, then the tables of docs/learning.md; `--record` writes every run's
rewards as JSON, which `--tables FILE` prints again. Hours on two cores; `--steps 2 --seeds 0` shows in minutes that it
works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from learner.readings import STEP_LOG
from tests.command_line import to_toml

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET, WITHIN = 0.75, 25

GRPO = "ppo_clip"
OBJECTIVES: dict[str, dict[str, Any]] = {
    GRPO: {},
    "gspo": {"clip_low": 0.1, "clip_high": 0.15},  # its own bounds are made for replies of thousands of tokens
    "cispo": {},
}
"""What is compared, with what each changes in [algorithm]. ppo_clip with GRPO's advantages is GRPO."""


def run(directory: Path, *, objective: str, seed: int, staleness: int, steps: int) -> dict[str, Any]:
    """One run to its end. Returns its rewards by step."""
    plain = tomllib.loads((EXAMPLES / "addition.toml").read_text())
    name = f"{objective.replace('_', '-')}-s{seed}-m{staleness}"
    plain["run"] |= {"name": name, "seed": seed, "steps": steps, "target_reward": 2.0}
    plain["tasks"]["source"] = f"{EXAMPLES / 'addition.py'}:Tasks"
    plain["environment"]["rewards"] = [f"{EXAMPLES / 'addition.py'}:reward"]
    plain["algorithm"] |= {"objective": objective, "max_staleness": staleness, **OBJECTIVES.get(objective, {})}
    config = directory / f"{name}.toml"
    config.write_text(to_toml(plain))
    out = directory / name
    command = [sys.executable, "-m", "deploy.cli", "up", str(config), "--dir", str(out), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if ended.returncode != 0:
        raise SystemExit(f"{name} ended with {ended.returncode}: {ended.stderr[-2000:]}")
    records = [json.loads(line) for line in (out / STEP_LOG).read_text().splitlines()]
    return {
        "objective": objective,
        "seed": seed,
        "max_staleness": staleness,
        "rewards": [record["reward"] for record in records],
        "staleness": statistics.mean(record["staleness"] for record in records),
        "seconds": json.loads(ended.stdout.splitlines()[-1])["seconds"],
    }


def reached(rewards: list[float]) -> int | None:
    """The first step at which the mean of five steps reaches the target."""
    return next((n for n in range(5, len(rewards) + 1) if statistics.mean(rewards[n - 5 : n]) >= TARGET), None)


def tables(runs: list[dict[str, Any]]) -> str:
    """The tables of docs/learning.md."""
    lines = ["| objective | max_staleness | seed | steps to 0.75 | last five steps | mean staleness |"]
    lines.append("| --- " * 6 + "|")
    for one in runs:
        step = reached(one["rewards"]) or f"not within {len(one['rewards'])}"
        last = statistics.mean(one["rewards"][-5:])
        lines.append(
            f"| {one['objective']} | {one['max_staleness']} | {one['seed']} | {step} | {last:.2f} "
            f"| {one['staleness']:.2f} |"
        )
    lines += ["", "| objective | max_staleness | learned within 25 steps | mean reward at step 5 | 10 | 15 | 20 | 25 |"]
    lines += ["| --- " * 8 + "|"]
    for key in dict.fromkeys((one["objective"], one["max_staleness"]) for one in runs):
        group = [one for one in runs if (one["objective"], one["max_staleness"]) == key]
        learned = sum((reached(one["rewards"]) or WITHIN + 1) <= WITHIN for one in group)
        curve = " | ".join(_at(group, step) for step in (5, 10, 15, 20, 25))
        lines.append(f"| {key[0]} | {key[1]} | {learned} of {len(group)} | {curve} |")
    return "\n".join(lines)


def _at(group: list[dict[str, Any]], step: int) -> str:
    """Mean and standard deviation over seeds of the mean reward of the five steps up to `step`."""
    values = [statistics.mean(one["rewards"][step - 5 : step]) for one in group if len(one["rewards"]) >= step]
    if not values:
        return ""
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), metavar="NAME")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument("--staleness", nargs="+", type=int, default=[1], metavar="N")
    parser.add_argument("--steps", type=int, default=WITHIN)
    parser.add_argument("--record", type=Path, help="write every run's rewards here")
    parser.add_argument("--tables", type=Path, help="only print the tables of what was recorded here")
    options = parser.parse_args()
    if options.tables:
        print(tables(json.loads(options.tables.read_text())))
        return
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for objective in options.objectives:
            for staleness in options.staleness:
                for seed in options.seeds:
                    one = run(Path(scratch), objective=objective, seed=seed, staleness=staleness, steps=options.steps)
                    runs.append(one)
                    step = reached(one["rewards"])
                    print(
                        f"{objective}, max_staleness {staleness}, seed {seed}: 0.75 at step {step}, "
                        f"last reward {one['rewards'][-1]:.2f}, {one['seconds']:.0f} s",
                        flush=True,
                    )
                    if options.record:
                        options.record.write_text(json.dumps(runs, indent=1) + "\n")
    print("\n" + tables(runs))


if __name__ == "__main__":
    main()
