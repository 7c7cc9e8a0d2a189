"""TensorBoard's event files, in the folder ``tensorboard`` of a run."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboardX import RecordWriter
from tensorboardX.proto import event_pb2

from train.trackers.tracker import Row

# Protobuf makes its message classes at import, invisibly to type checkers.
_EVENTS: Any = event_pb2


class TensorBoard:
    """An event file that continues those of the folder, open for appending."""

    def __init__(self, folder: Path, kept_steps: int):
        """Begins a file.

        Args:
            folder: The run's folder.
            kept_steps: The step that the run resumes from; TensorBoard drops later steps of earlier files.
        """
        board = folder / "tensorboard"
        board.mkdir(exist_ok=True)
        # TensorBoard reads a folder's files in the order of their names.
        self._writer = RecordWriter(str(board / f"events.out.tfevents.{time.time_ns()}"))
        self._event(file_version="brain.Event:2")
        self._event(step=kept_steps + 1, session_log={"status": "START"})
        self._writer.flush()

    def log(self, rows: Sequence[Row]) -> None:
        """Writes rows."""
        for step, values in rows:
            scalars = [{"tag": tag, "simple_value": number} for tag, number in values.items()]
            self._event(step=step, summary={"value": scalars})
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Closes the file."""
        self._writer.close()

    def _event(self, **fields: Any) -> None:
        self._writer.write(_EVENTS.Event(wall_time=time.time(), **fields).SerializeToString())
