"""A process ends when it is told to, whatever its threads do."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

COMPUTES = """
import asyncio, time
from deploy import running

async def beside():
    try:
        await asyncio.Event().wait()
    finally:
        print("left", flush=True)

async def main():
    beside_it = asyncio.create_task(beside())
    await asyncio.sleep(0)
    print("computes", flush=True)
    await asyncio.to_thread(time.sleep, 60)
    return 0

running.end(running.run("x", "x", main))
"""

SENDS = """
import threading
from deploy import running

class Telemetry:
    def shutdown(self):
        threading.Event().wait(60)

async def main():
    print("computes", flush=True)
    return 0

running.TELEMETRY_SECONDS = 0.1
running.tracing.configure = lambda *_, **__: Telemetry()
running.end(running.run("x", "x", main))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_whose_threads_still_compute(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "computes\n"
            process.send_signal(number)
            assert process.wait(20) == 128 + number
            assert process.stdout.read() == "left\n", "the other tasks left in order"
        finally:
            process.kill()


def test_an_endpoint_that_takes_no_telemetry_does_not_keep_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", SENDS], stdout=subprocess.PIPE, timeout=45, check=False)
    assert (done.returncode, done.stdout) == (0, b"computes\n")
