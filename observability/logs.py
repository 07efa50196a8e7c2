"""Logging: one line per event a person would act on, to standard error."""

from __future__ import annotations

import logging
import sys


def configure(component: str, *, level: int = logging.INFO) -> None:
    """Send this process's log lines to standard error, each with time, level and component."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {component}: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    for package in ("broker", "learner", "actors", "router", "observability", "deploy"):
        logging.getLogger(package).setLevel(level)
