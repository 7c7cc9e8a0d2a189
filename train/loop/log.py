"""The training log: ``log.jsonl``, TensorBoard's event files beside it, and other trackers.

The file holds a JSON object per optimiser step and per evaluation, each with its "step". Infinity and NaN
become null, because JSON has neither.
"""

import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetspec_jax.checkpoint.files import replacing
from train.loop.stages import OutOfTime
from train.trackers.tensorboard import TensorBoard
from train.trackers.tracker import Row, Tracker

FILE = "log.jsonl"
#: Figures that the log adds to a step: its seconds, tokens per second, and the peak memory in GiB.
MEASURED = ("seconds", "tokens_per_second", "memory_gib")
#: Counts of a step for which the log adds the rate per second.
COUNTED = ("real_tokens", "learnable_tokens", "distinct_anchors")
#: Its keys are names of sources, possibly of local files: trackers besides TensorBoard get numbers instead.
TAU_BY_SOURCE = "tau_by_source"

Record = dict[str, Any]

# Of every line.
_BEGINNING = b'{"step": '


class NonFiniteLoss(FloatingPointError):
    """The loss of a step, or the norm of its gradient, is infinite or not a number."""


class TrainingLog:
    """Queues metrics without waiting for the device, and writes them in batches.

    A context manager: it writes pending steps on exit, unless an error is raised.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kept_steps: int,
        main: bool = True,
        trackers: Callable[[], Sequence[Tracker]] = tuple,
    ):
        """Opens a new log or an existing one.

        Args:
            folder: The folder of ``log.jsonl`` and ``tensorboard/``; made if necessary.
            kept_steps: The step that the run resumes from; records of later steps are dropped.
            main: Whether this process writes. The other processes only check the losses.
            trackers: Opens trackers besides TensorBoard; called only in the writing process. The log closes
                them.

        Raises:
            ValueError: A line is damaged; only the last line may be cut off.
        """
        self._files = _Files(folder, kept_steps, trackers) if main else None
        self._pending: list[tuple[int, Record, int]] = []
        self._loss, self._since = math.nan, time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, Any], tokens: int) -> None:
        """Queues the metrics of a step, whose computation may still run.

        Args:
            step: The step's number, greater than all before it.
            metrics: Scalars and short vectors, as device arrays or numbers, including "loss".
            tokens: Tokens of the step's windows, including padding, in all processes.
        """
        self._pending.append((step, dict(metrics), tokens))

    def flush(self) -> float:
        """Waits for pending steps and writes them.

        Returns:
            The newest loss; NaN before the first step.

        Raises:
            NonFiniteLoss: A loss or gradient norm is not finite. Only the steps before it are written.
        """
        if not self._pending:
            return self._loss
        fetched = jax.device_get([metrics for _, metrics, _ in self._pending])
        now = time.perf_counter()
        # Avoids a division by zero if the clock did not advance.
        seconds = max((now - self._since) / len(fetched), 1e-9)
        memory = round(peak_memory_gib(), 3)
        failures = [_failure(values) for values in fetched]
        good = next((i for i, failure in enumerate(failures) if failure), len(failures))
        rows = []
        for (step, metrics, tokens), values in zip(self._pending[:good], fetched, strict=False):
            measured = (round(seconds, 6), round(tokens / seconds, 1), memory)
            # JAX sorts the keys of dictionaries; the file keeps the given order.
            record = {name: values[name] for name in metrics} | dict(zip(MEASURED, measured, strict=True))
            counted = [name for name in COUNTED if name in values]
            record |= {f"{name}_per_second": round(int(values[name]) / seconds, 1) for name in counted}
            rows.append(("train", step, record))
        self._write(rows)
        # A step that failed stays pending, so that a later flush raises again.
        self._pending, self._since = self._pending[good:], now
        if self._pending:
            step = self._pending[0][0]
            raise NonFiniteLoss(f"the {failures[good]} at step {step}; no later step was logged")
        self._loss = float(fetched[-1]["loss"])
        return self._loss

    def write(self, kind: str, step: int, record: Mapping[str, Any]) -> None:
        """Writes an evaluation, after all pending steps.

        Args:
            kind: TensorBoard's group, such as "evaluation"; keys that begin with ``validation_`` are shown in
                the group of that name.
            step: The step before the evaluation.
            record: Numbers, arrays, text, and lists and mappings of them.

        Raises:
            NonFiniteLoss: As by `flush`.
        """
        self.flush()
        self._write([(kind, step, dict(record))])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of the block, such as an evaluation, from the seconds of steps.

        Raises:
            NonFiniteLoss: As by `flush`, which is called first.
        """
        self.flush()
        begun = time.perf_counter()
        yield
        self._since += time.perf_counter() - begun

    def __enter__(self) -> "TrainingLog":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Writes what is pending, unless there was an error, and closes the files."""
        failed = error is not None and not isinstance(error, OutOfTime)
        try:
            if error is None:
                self.flush()
        except BaseException:
            failed = True
            raise
        finally:
            if self._files is not None:
                self._files.close(failed)

    def _write(self, rows: Sequence[tuple[str, int, Record]]) -> None:
        if self._files is not None and rows:
            self._files.write([(kind, step, _plain(record)) for kind, step, record in rows])


def _failure(metrics: Mapping[str, Any]) -> str | None:
    """The first metric that is not finite, of loss and gradient norm, and its value.

    A bad gradient makes the loss bad only one step later.
    """
    for name in ("loss", "gradient_norm"):
        if name in metrics and not math.isfinite(value := float(metrics[name])):
            return f"{name.replace('_', ' ')} is {value}"
    return None


class _Files:
    """The files of a log, open for appending, and its trackers."""

    def __init__(self, folder: Path, kept_steps: int, trackers: Callable[[], Sequence[Tracker]]):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        if path.exists():
            kept = [line for line, record in _lines(path) if record["step"] <= kept_steps]
            with replacing(path) as partial, partial.open("wb") as file:
                file.writelines(line.removesuffix(b"\n") + b"\n" for line in kept)
        self.folder = folder
        with self._named():
            self.board = TensorBoard(folder, kept_steps)
        self.lines = path.open("ab")
        self.trackers: Sequence[Tracker] = ()
        try:
            self.trackers = trackers()
        except BaseException:
            self.close(failed=True)
            raise

    def write(self, rows: Sequence[tuple[str, int, Record]]) -> None:
        with self._named():
            for _, step, record in rows:
                self.lines.write(json.dumps({"step": step, **record}, allow_nan=False).encode() + b"\n")
            self.lines.flush()
            self.board.log([_row(*row) for row in rows])
        for tracker in self.trackers:
            tracker.log([_row(kind, step, _unnamed(record)) for kind, step, record in rows])

    def close(self, failed: bool) -> None:
        # Closes everything, even if something fails.
        with self._named(), ExitStack() as stack:
            for tracker in (*self.trackers, self.board):
                stack.callback(tracker.close, failed)
            self.lines.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Adds the folder to errors without a file name, such as a full disk's."""
        try:
            yield
        except OSError as error:
            if error.filename is None:
                error.filename = str(self.folder)
            raise


def read_log(path: Path) -> list[Record]:
    """The records of a log in order, except a last line that was cut off.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Another line is not a record; the message has its number.
    """
    return [record for _, record in _lines(path)]


def peak_memory_gib() -> float:
    """Peak memory of the first local device in GiB; if the device reports none, of this process."""
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if peak is None:
        # In bytes on macOS, in KiB elsewhere.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak / 2**30


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line.decode(), parse_constant=_no_number)
                if not isinstance(record, dict) or type(record.get("step")) is not int:
                    raise ValueError("it is not an object with a step")
            except (ValueError, RecursionError) as error:
                # The incomplete last line of a stopped process.
                if not line.endswith(b"\n") and line[: len(_BEGINNING)] == _BEGINNING[: len(line)]:
                    return
                raise ValueError(
                    f"{path}, line {number} is not a record of a training log: {error}; each line should be "
                    'an object with a whole number "step", as {"step": 1, "loss": 2.5}. Remove the line, or '
                    "bring back a copy of the file"
                ) from None
            yield line, record


def _no_number(token: str) -> None:
    raise ValueError(f"{token} is not JSON")


def _plain(value: Any) -> Any:
    """The value for JSON; float32 values are exact."""
    if isinstance(value, Mapping):
        return {str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    array = np.asarray(value)
    return _plain((array if array.dtype.kind in "biu" else array.astype(np.float64)).tolist())


def _row(kind: str, step: int, record: Record) -> Row:
    return Row(step, dict(pair for key, value in record.items() for pair in _scalars(_tag(kind, key), value)))


def _unnamed(record: Record) -> Record:
    """The record with numbers instead of its sources' names."""
    return {key: list(value.values()) if key == TAU_BY_SOURCE else value for key, value in record.items()}


def _tag(kind: str, key: str) -> str:
    name = key.removeprefix("validation_")
    return f"{kind}/{key}" if name == key else f"validation/{name}"


def _scalars(tag: str, value: Any) -> Iterator[tuple[str, float]]:
    """Tags and numbers; elements of a list are numbered from 1, as depths are."""
    if isinstance(value, int | float):
        yield tag, float(value)
    elif isinstance(value, dict | list):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value, 1):
            yield from _scalars(f"{tag}/{key}", x)
