"""What must stay light stays light, and imports point one way."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "vllm", "peft")
PACKAGES = ("broker", "learner", "actors", "router", "observability", "deploy")
MAY_IMPORT = {
    "observability": set(),
    "broker": {"observability"},
    "router": {"broker", "observability"},
    "actors": {"broker", "observability"},
    "learner": {"broker", "observability"},
    "deploy": {"broker", "observability", "router", "actors", "learner"},
}


@pytest.mark.parametrize(
    "modules",
    [
        "router.service",
        "router.upstreams, router.fleet",
        "broker.registry, broker.store, broker.trajectories, broker.chat",
        "observability.tracing",
        "deploy.cli",
        "deploy.supervisor",
        "deploy.queries",
        "actors.service, actors.replica",
        "learner.service",
    ],
)  # fmt: skip
def test_what_a_router_an_observer_and_the_command_line_import_loads_no_torch(modules: str) -> None:
    code = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package}
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.split(".")[0]
                assert top not in PACKAGES or top in allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_says_what_lives_there_and_is_typed(package: str) -> None:
    assert (ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or "").strip()
    assert (ROOT / package / "py.typed").exists()
