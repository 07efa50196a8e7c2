"""Trackers, with stand-ins for the packages, and curves on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from broker.errors import ConfigError
from deploy.plot import png_plot, terminal_plot, values_of
from learner.trackers import TRACKERS, Trackers

FIGURES = {"reward": 0.5, "k3": 0.01}


class Told:
    """Stands in for a tracker's package and for what its functions return; keeps what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Told:
            self.calls.append((name, arguments, options))
            return self

        return call

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


def install(monkeypatch: pytest.MonkeyPatch, package: str) -> Told:
    told = Told()
    monkeypatch.setitem(sys.modules, package, told)  # type: ignore[arg-type]
    return told


def track(name: str, directory: Path) -> None:
    trackers = Trackers([name], "run", directory, {"run": {"name": "run"}})
    trackers.log(1, FIGURES)
    trackers.log(2, FIGURES)
    trackers.close()


def test_tensorboard_gets_a_scalar_per_figure_and_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = install(monkeypatch, "torch.utils.tensorboard")
    track("tensorboard", tmp_path)
    assert told.named("SummaryWriter") == [((str(tmp_path / "tensorboard"),), {})]
    scalars = [arguments for arguments, _ in told.named("add_scalar")]
    assert scalars == [("train/reward", 0.5, 1), ("train/k3", 0.01, 1), ("train/reward", 0.5, 2), ("train/k3", 0.01, 2)]
    assert told.calls[-1][0] == "close"


@pytest.mark.parametrize(
    ("name", "log", "end"),
    [("wandb", "log", "finish"), ("mlflow", "log_metrics", "end_run"), ("trackio", "log", "finish")],
)
def test_other_trackers_get_each_step_at_once_and_are_finished(
    name: str, log: str, end: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = install(monkeypatch, name)
    track(name, tmp_path)
    expected = {"train/reward": 0.5, "train/k3": 0.01}
    assert told.named(log) == [((expected,), {"step": 1}), ((expected,), {"step": 2})]
    assert told.calls[-1][0] == end


@pytest.mark.parametrize(("name", "log"), [("wandb", "log"), ("mlflow", "log_metrics"), ("trackio", "log")])
def test_an_evaluation_is_told_under_a_name_of_its_own_though_later_steps_were_told_before(
    name: str, log: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = install(monkeypatch, name)
    trackers = Trackers([name], "run", tmp_path, {})
    trackers.log(7, {"reward": 0.5})
    trackers.log(4, {"reward": 0.25}, kind="eval")
    trackers.close()
    last = {"wandb": (({"eval/reward": 0.25, "eval/step": 4},), {"commit": False})}
    assert told.named(log)[-1] == last.get(name, (({"eval/reward": 0.25},), {"step": 4}))


@pytest.mark.parametrize("name", list(TRACKERS))
def test_a_tracker_that_is_not_installed_is_refused_at_the_start(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = "torch.utils.tensorboard" if name == "tensorboard" else name
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name} is not installed"):
        Trackers([name], "run", tmp_path, {})


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = install(monkeypatch, "trackio")

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no route")

    run = SimpleNamespace(log=fail, finish=fail, define_metric=lambda *arguments, **options: None)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: run))  # type: ignore[arg-type]
    trackers = Trackers(["wandb", "trackio"], "run", tmp_path, {})
    for step in (1, 2):
        trackers.log(step, FIGURES)
    trackers.close()
    assert len(good.named("log")) == 2
    assert [record.message for record in caplog.records] == [
        "tracker wandb failed at step 1 and is left out from here: no route"
    ]


RECORDS = [{"step": step, "reward": step / 10, **({"kl": 0.1} if step > 3 else {})} for step in range(1, 11)]


def test_a_figure_that_was_logged_later_begins_where_it_does() -> None:
    assert values_of(RECORDS, "reward") == (list(range(1, 11)), [step / 10 for step in range(1, 11)])
    assert values_of(RECORDS, "kl")[0] == list(range(4, 11))
    with pytest.raises(ConfigError, match="the figures there are: kl, reward"):
        values_of(RECORDS, "rewrad")


def test_a_curve_that_rises_is_drawn_from_the_lower_left_to_the_upper_right() -> None:
    lines = terminal_plot(*values_of(RECORDS, "reward"), width=20, height=4)
    assert len(lines) == 4
    assert lines[0].startswith("  1 ┤") and lines[-1].startswith("0.1 ┤"), "the scale is at the left"
    dots = [[ord(character) - 0x2800 for character in line.split("┤")[1]] for line in lines]
    assert all(0 <= bits < 256 for line in dots for bits in line)
    # ten points on ten columns of dots
    assert all(len(line) == 5 for line in dots)
    assert dots[-1][0] and not dots[-1][-1]
    assert dots[0][-1] and not dots[0][0]


def test_curves_without_change_or_with_one_point_are_drawn_too() -> None:
    for values in ([2.0], [2.0, 2.0, 2.0]):
        lines = terminal_plot(list(range(len(values))), values, height=3)
        assert sum(bits != "\u2800" for bits in lines[-1].split("┤")[1]) >= 1
    assert terminal_plot([], []) == []


def test_a_long_run_is_averaged_into_the_columns_there_are() -> None:
    lines = terminal_plot(list(range(10_000)), [step % 2 for step in range(10_000)], width=30, height=5)
    assert all(len(line.split("┤")[1]) == 30 for line in lines)


def test_curves_are_drawn_to_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png_plot(tmp_path / "run.png", "run", RECORDS, ["reward", "kl"])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_png_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        png_plot(tmp_path / "run.png", "run", RECORDS, ["reward"])


def test_every_tracker_that_can_be_configured_exists() -> None:
    from broker.runspec import ObservabilitySection
    from deploy.config import check

    plain = {"run": {"name": "r", "model": "m"}, "tasks": {"source": "t"}, "environment": {"rewards": ["r.py:f"]}}
    spec = check(plain | {"observability": {"trackers": list(TRACKERS)}}, "x")
    assert spec.observability == ObservabilitySection(trackers=list(TRACKERS))  # type: ignore[arg-type]
