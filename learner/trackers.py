"""Experiment trackers: where else the figures of each step go, by the names in `observability.trackers`.

Each is used as its makers document it and found by its own settings (WANDB_PROJECT, MLFLOW_TRACKING_URI, ...). A
tracker that fails once the run is under way is reported and left alone: the run goes on without it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from broker.errors import ConfigError

log = logging.getLogger(__name__)

PROJECT = "farflung"
"""The project, or experiment, that a run is filed under."""


class Tracker(Protocol):
    """Takes the figures of one step after the other; those of an evaluation come when later steps were told already."""

    def log(self, step: int, figures: Mapping[str, float], kind: str) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in the folder `tensorboard` of the run's directory."""

    def __init__(self, run: str, directory: Path, spec: Mapping[str, Any]) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(directory / "tensorboard"))

    def log(self, step: int, figures: Mapping[str, float], kind: str) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A run of the same name and id, which a resumed learner goes on with."""

    def __init__(self, run: str, directory: Path, spec: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=PROJECT, id=run, name=run, dir=str(directory), config=dict(spec), resume="allow"
        )  # fmt: skip
        # It takes no step that is behind the newest: an evaluation has an axis of its own.
        self._run.define_metric("eval/step")
        self._run.define_metric("eval/*", step_metric="eval/step")

    def log(self, step: int, figures: Mapping[str, float], kind: str) -> None:
        named = {f"{kind}/{name}": value for name, value in figures.items()}
        if kind == "train":
            self._run.log(named, step=step)
        else:
            self._run.log({**named, f"{kind}/step": step}, commit=False)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of the same name in the experiment PROJECT."""

    def __init__(self, run: str, directory: Path, spec: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(PROJECT)
        self._mlflow.start_run(run_name=run)

    def log(self, step: int, figures: Mapping[str, float], kind: str) -> None:
        self._mlflow.log_metrics({f"{kind}/{name}": value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class Trackio:
    """A run of the same name in the project PROJECT."""

    def __init__(self, run: str, directory: Path, spec: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=run, config=dict(spec), resume="allow")

    def log(self, step: int, figures: Mapping[str, float], kind: str) -> None:
        self._trackio.log({f"{kind}/{name}": value for name, value in figures.items()}, step=step)

    def close(self) -> None:
        self._trackio.finish()


TRACKERS: dict[str, Callable[[str, Path, Mapping[str, Any]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By the names that `observability.trackers` gives."""


class Trackers:
    """All of a run's trackers. They work in a thread of their own: one that is slow keeps nobody waiting."""

    def __init__(self, names: Sequence[str], run: str, directory: Path, spec: Mapping[str, Any]) -> None:
        """Raises ConfigError for a tracker that is not installed."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trackers")
        self._trackers: dict[str, Tracker] = {}
        for name in names:
            try:
                self._trackers[name] = TRACKERS[name](run, directory, spec)
            except ImportError as error:
                raise ConfigError(
                    f"observability.trackers: {name} is not installed here ({error}). `pip install {name}`, or leave "
                    "it out"
                ) from error

    def log(self, step: int, figures: Mapping[str, float], *, kind: Literal["train", "eval"] = "train") -> None:
        """Tell every tracker of a step, or of the evaluation of the version it made, soon."""
        if self._trackers:
            self._thread.submit(self._log, step, dict(figures), kind)

    def _log(self, step: int, figures: Mapping[str, float], kind: str) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                tracker.log(step, figures, kind)
            except Exception as error:  # noqa: BLE001
                log.warning("tracker %s failed at step %d and is left out from here: %s", name, step, error)
                del self._trackers[name]

    def close(self) -> None:
        """Wait until every step is told, then close them all."""
        self._thread.shutdown()
        for name, tracker in self._trackers.items():
            try:
                tracker.close()
            except Exception as error:  # noqa: BLE001
                log.warning("tracker %s could not be closed: %s", name, error)
