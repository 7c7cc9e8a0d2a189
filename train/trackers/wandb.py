"""Weights & Biases; the extra ``wandb``. With ``WANDB_MODE=offline`` its files stay in the run's folder."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from train.trackers.tracker import Row, import_extra


class WandB:
    """A run of Weights & Biases.

    Attributes:
        run_id: The run's id, for a later ``resume``.
    """

    def __init__(self, folder: Path, project: str, recipe: Mapping[str, Any], resume: str | None):
        """Begins a run, or continues one.

        Args:
            folder: The run's folder; the library keeps its files in ``wandb`` there.
            recipe: The run's settings, by their dotted names.
            resume: The id of the run to continue.

        Raises:
            ValueError: The package is not installed.
        """
        wandb = import_extra("wandb", "wandb")
        self.run_id = resume or secrets.token_hex(8)
        # Otherwise wandb sends the command line, folders, repository, output and system metrics.
        private = wandb.Settings(
            host="-",
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=project,
            dir=str(folder),
            config=dict(recipe),
            id=self.run_id,
            resume="allow",
            settings=private,
        )

    def log(self, rows: Sequence[Row]) -> None:
        """Sends rows. Wandb drops steps before its last step; an earlier start sent the same figures."""
        for step, values in rows:
            if step >= self._run.step:
                self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        """Waits until everything is sent or, offline, written."""
        self._run.finish(exit_code=int(failed))
