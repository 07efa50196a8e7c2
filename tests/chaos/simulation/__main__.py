"""Play schedules by the thousand, or one of them with its story.

python -m tests.chaos.simulation --schedules 100000        every seed from 0 on, on all cores
python -m tests.chaos.simulation --seed 4711               one seed: its story, shrunk first if it fails
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.chaos.simulation.play import many, one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, help="Only this one, with its story.")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of strings have an order of their own in each process otherwise, and a seed would not replay.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.chaos.simulation", *sys.argv[1:]])
    if options.seed is not None:
        return one(options.seed)
    return 1 if many(options.first, options.schedules, options.jobs) else 0


if __name__ == "__main__":
    sys.exit(main())
