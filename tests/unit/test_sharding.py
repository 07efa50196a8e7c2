"""Two processes of a node, over gloo on the CPU, against one process alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch

from learner.model import Policy
from learner.packing import pack
from learner.sharding import Shards
from tests.node_worker import BUDGET, SETTINGS, sequences, train


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def node(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes, started with torchrun's environment, have written."""
    directory, port = tmp_path_factory.mktemp("node"), free_port()
    started = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.node_worker", str(tiny_model), str(directory)]
        log = (directory / f"log-{rank}").open("w")
        started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(240) for process in started]
    finally:
        for process in started:
            process.kill()
    logs = "\n".join((directory / f"log-{rank}").read_text()[-2000:] for rank in range(2))
    assert codes == [0, 0], logs
    return directory


def test_two_processes_have_the_gradient_of_one(node: Path, tiny_model: Path) -> None:
    rows = len(pack(sequences(2), BUDGET).rows)
    assert rows > 2 and rows % 2 == 1, "one process has a row less than the other"
    gradients, alone = train(Policy(tiny_model, **SETTINGS))  # type: ignore[arg-type]
    found = safetensors.torch.load_file(node / "gradients")
    assert found.keys() == gradients.keys()
    for name, gradient in found.items():
        expected = gradients[name]
        assert (gradient - expected).norm() < 1e-4 * expected.norm(), name  # type: ignore[attr-defined, operator]
    figures = np.load(node / "figures.npz")
    np.testing.assert_allclose(figures["scores"], alone["scores"], atol=1e-4)  # type: ignore[arg-type]
    np.testing.assert_allclose(figures["probe"], alone["probe"], atol=1e-4)
    for name in ("loss", "kl", "k3"):
        np.testing.assert_allclose(figures[name], getattr(alone["stats"], name), rtol=1e-3, atol=1e-6)


def test_every_process_has_the_same_adapter_and_optimizer_and_a_part_of_the_base(node: Path) -> None:
    assert (node / "state-0").read_bytes() == (node / "state-1").read_bytes()
    assert float((node / "local").read_text()) == pytest.approx(0.5, abs=0.05)


def test_rows_are_shared_out_evenly_and_each_goes_to_one_process() -> None:
    shares = [Shards(rank, 3, None, None, None).own(list(range(7))) for rank in range(3)]  # type: ignore[arg-type]
    assert shares == [[0, 3, 6], [1, 4, None], [2, 5, None]]
    assert Shards(0, 2, None, None, None).own([]) == []  # type: ignore[arg-type]
