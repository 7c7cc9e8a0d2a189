"""MLflow; the extra ``mlflow``. ``MLFLOW_TRACKING_URI`` names a server, a folder or an SQLite file."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from train.trackers.tracker import Row, import_extra

# MLflow's limit on the metrics of a call.
MOST_METRICS, MOST_PARAMETERS = 1000, 100


class MLflow:
    """A run of MLflow, by its client: the fluent interface would log the user, the script and the repository.

    Attributes:
        run_id: The run's id, for a later ``resume``.
    """

    def __init__(self, project: str, recipe: Mapping[str, Any], resume: str | None):
        """Begins a run, or continues one.

        Args:
            project: The experiment; made if necessary.
            recipe: The run's settings, by their dotted names.
            resume: The id of the run to continue.

        Raises:
            ValueError: The package is not installed.
        """
        client = self._client = import_extra("mlflow", "mlflow").MlflowClient()
        self._entities = import_extra("mlflow.entities", "mlflow")
        if resume is not None:
            self.run_id = resume
            client.update_run(resume, status="RUNNING")
            return
        found = client.get_experiment_by_name(project)
        experiment = client.create_experiment(project) if found is None else found.experiment_id
        self.run_id = client.create_run(experiment).info.run_id
        parameters = [self._entities.Param(name, str(value)) for name, value in recipe.items()]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(self.run_id, params=parameters[start : start + MOST_PARAMETERS])

    def log(self, rows: Sequence[Row]) -> None:
        """Sends rows."""
        now = int(1000 * time.time())
        metrics = [
            self._entities.Metric(tag, number, now, step)
            for step, values in rows
            for tag, number in values.items()
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self.run_id, metrics=metrics[start : start + MOST_METRICS])

    def close(self, failed: bool) -> None:
        """Marks the run as finished or failed."""
        self._client.set_terminated(self.run_id, "FAILED" if failed else "FINISHED")
