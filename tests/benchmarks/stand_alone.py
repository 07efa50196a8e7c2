"""Our stand-alone router with the arguments that the HTTP harness gives a router: --port P --upstream URL URL ...

python -m tests.benchmarks.stand_alone --port 8210 --upstream http://127.0.0.1:8200 http://127.0.0.1:8201
"""

from __future__ import annotations

import argparse

from deploy.cli import cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--upstream", nargs="+", required=True)
    options = parser.parse_args()
    upstreams = [word for url in options.upstream for word in ("--upstream", url)]
    cli(["router", "--http", f"127.0.0.1:{options.port}", *upstreams])


if __name__ == "__main__":
    main()
