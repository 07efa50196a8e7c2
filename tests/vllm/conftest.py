"""A real vLLM server on the CPU, and a model small enough to start it in seconds."""

from __future__ import annotations

import os
import sys

import pytest

from broker.models import ModelFiles, resolve
from tests.tiny import build_tiny_model

PYTHON = os.environ.get("FARFLUNG_VLLM_PYTHON") or sys.executable


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """The tiny model with heads of a size that vLLM has kernels for."""
    return resolve(str(build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", hidden=128, heads=2, std=0.15)))
