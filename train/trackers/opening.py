"""Opens trackers, and continues a work folder's earlier runs in them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.config import read_json
from train.trackers.mlflow import MLflow
from train.trackers.tracker import Row, Tracker, import_extra
from train.trackers.wandb import WandB

_log = logging.getLogger("jetspec_jax.train")

#: The trackers besides TensorBoard, by the names of their packages and extras.
WANDB, MLFLOW = TRACKERS = ("wandb", "mlflow")
PROJECT = "jetspec-jax"
#: The file of a work folder with the ids of its runs in trackers.
RUNS = "trackers.json"


@dataclass(frozen=True)
class Tracking:
    """Trackers of a run besides TensorBoard.

    Attributes:
        names: Some of `TRACKERS`.
        project: The project or experiment of the run.
    """

    names: tuple[str, ...] = ()
    project: str = PROJECT

    def check(self) -> None:
        """Raises ValueError if a name is unknown or repeated, or its package is not installed."""
        for name in self.names:
            if name not in TRACKERS:
                raise ValueError(f"a tracker is one of {', '.join(TRACKERS)}, not {name!r}")
            if self.names.count(name) > 1:
                raise ValueError(f"the tracker {name} is named twice")
            import_extra(name, name)

    def open(self, folder: Path, recipe: Mapping[str, Any]) -> list[Tracker]:
        """Begins or continues the run of a work folder in each tracker.

        Args:
            folder: The work folder.
            recipe: The run's settings by dotted name. Trackers get only these and the figures.

        Raises:
            ValueError: As by `check`, or the folder's ``trackers.json`` is damaged.
            RuntimeError: A tracker cannot open the run.
        """
        self.check()
        runs, opened = _read(folder / RUNS), []
        for name in self.names:
            try:
                if name == WANDB:
                    tracker = WandB(folder, self.project, recipe, runs.get(name))
                else:
                    tracker = MLflow(self.project, recipe, runs.get(name))
                opened.append(Lenient(name, tracker))
                # Saved now, so that a later start continues this run even if the next tracker fails.
                write_json(folder / RUNS, {**runs, name: tracker.run_id})
            except Exception as error:  # each library has its own errors
                for earlier in opened:
                    earlier.close(failed=True)
                begun = f"continue run {runs[name]} of {folder / RUNS}" if name in runs else "begin a run"
                raise RuntimeError(f"{name} cannot {begun}: {type(error).__name__}: {error}") from error
            runs[name] = tracker.run_id
        return opened


UNTRACKED = Tracking()


class Lenient:
    """A tracker whose errors become warnings; ``log.jsonl`` has all rows anyway."""

    def __init__(self, name: str, tracker: Tracker):
        """Wraps a tracker; its name is for the warnings."""
        self._name, self._tracker = name, tracker

    def log(self, rows: Sequence[Row]) -> None:
        """Passes rows on."""
        try:
            self._tracker.log(rows)
        except Exception as error:
            steps = f"steps {rows[0].step} to {rows[-1].step}"
            _log.warning("%s did not take %s, which are in log.jsonl: %s", self._name, steps, error)

    def close(self, failed: bool) -> None:
        """Ends the run."""
        try:
            self._tracker.close(failed)
        except Exception as error:
            _log.warning("%s did not end its run: %s", self._name, error)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    try:
        runs = read_json(path)
        if not all(isinstance(run_id, str) for run_id in runs.values()):
            raise ValueError("its values must be the ids of runs")
    except ValueError as error:
        raise ValueError(
            f"{path} is damaged: {error}; remove it to begin new runs in the trackers"
        ) from error
    return runs
