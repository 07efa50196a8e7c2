"""Every benchmark of this tree, one table: `make bench`. Keep the machine otherwise idle.

python -m tests.benchmarks.run [--json FILE] [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
from pathlib import Path

from tests.benchmarks import measure

BENCHMARKS = ("transport", "protocol", "router", "learner", "engine", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    rows: list[measure.Row] = []
    for name in options.names or BENCHMARKS:
        print(f"measuring {name} ...", flush=True)
        module = importlib.import_module(f"tests.benchmarks.bench_{name}")
        for row in module.run():
            if isinstance(row, measure.Row):
                rows.append(row)
            else:
                label, ours, raw, ratio = row
                rows.append(measure.Row(f"{name}: {label}", ours, raw, ratio, "tokens/s", module.TARGETS[label]))
    print(f"\n{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(measure.show(rows))
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=2))


if __name__ == "__main__":
    main()
