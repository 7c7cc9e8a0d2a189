"""Checkpoints of a training run: the state to resume from, and the best weights so far.

They are written in the background. An incomplete checkpoint is ignored, and the previous one is kept. The
last file of a checkpoint has checksums of the others, which are verified before reading; a damaged checkpoint
is reported, and the previous one is read.

With several processes, the first writes the checksums after all processes have written their arrays; on
reading, each process verifies some of the files.
"""

import contextlib
import gc
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jetspec_jax.device.processes import gathered
from train.loop.checksums import ChecksumError, check_checksums, has_checksums, write_checksums, written_name

_log = logging.getLogger("jetspec_jax.train")

#: Errors of writing files, raised by the system or by Orbax's storage library.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)
# The system's error code in a message of the storage library.
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")
# In the name of a folder that Orbax has not finished.
_UNFINISHED = ".orbax-checkpoint-tmp"


class TrainingCheckpointError(RuntimeError):
    """A checkpoint could not be written (earlier ones are intact), or none in a folder is readable."""


class Best(NamedTuple):
    """The evaluation of the best weights so far.

    Attributes:
        step: Steps before it; 0 before the first evaluation.
        score: Its score.
    """

    step: int = 0
    score: float = float("-inf")


class Resumed(NamedTuple):
    """A restored checkpoint.

    Attributes:
        step: The number of completed steps.
        state: The state, with the requested shardings.
        host: The host's data.
    """

    step: int
    state: Any
    host: dict[str, Any]


class Checkpoints:
    """A folder with the last two checkpoints, and the last two of the best weights beside them.

    A checkpoint has two parts: the state, a pytree of possibly sharded arrays, and the host's data, as JSON.
    """

    def __init__(self, folder: Path, *, read_only: bool = False):
        """Opens or makes the folder, and removes leftovers of an interrupted write.

        ``read_only`` changes nothing, because another process may be writing.
        """
        self.folder, self.read_only = folder, read_only
        self._last = _Manager(folder / "checkpoints", read_only)
        self._best = _Manager(folder / "best", read_only)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._last.close()
            self._best.close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None without any."""
        return self._last.latest_step()

    def restore(self, state: Any) -> Resumed | None:
        """The newest intact checkpoint, with the shardings of ``state``; None if there is no checkpoint.

        Raises:
            TrainingCheckpointError: All checkpoints are damaged.
        """
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(placed_shapes(state)), host=ocp.args.JsonRestore()
        )
        found = self._newest(self._last, args)
        return None if found is None else Resumed(found[0], found[1]["state"], found[1]["host"])

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts writing a checkpoint in the background; afterwards the arrays may be donated.

        Raises:
            TrainingCheckpointError: This checkpoint or an earlier one could not be written.
        """
        # A run that resumes from here does not evaluate earlier weights again, so the best are written first.
        self._wait(self._best)
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        self._write(self._last, step, parts)

    def save_best(self, best: Best, weights: Any) -> None:
        """Starts writing the best weights so far, which replace the previous ones.

        Raises:
            TrainingCheckpointError: As for `save`.
        """
        # Not numbered by step: a resumed run may find better weights at an earlier step.
        number = (self._best.latest_step() or 0) + 1
        parts = ocp.args.Composite(
            weights=ocp.args.StandardSave(weights), best=ocp.args.JsonSave(best._asdict())
        )
        self._write(self._best, number, parts)

    def restore_best(self, weights: Any) -> tuple[Best, Any] | None:
        """The best weights so far, with the shardings of ``weights``, and their evaluation; None without any.

        They may be newer than the newest checkpoint.

        Raises:
            TrainingCheckpointError: They could not be written, or all copies are damaged.
        """
        self.wait()
        args = ocp.args.Composite(
            weights=ocp.args.StandardRestore(placed_shapes(weights)), best=ocp.args.JsonRestore()
        )
        found = self._newest(self._best, args)
        return None if found is None else (Best(**found[1]["best"]), found[1]["weights"])

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            TrainingCheckpointError: Something could not be written.
        """
        for manager in (self._last, self._best):
            self._wait(manager)

    def _newest(self, manager: "_Manager", args: Any) -> tuple[int, Any] | None:
        """The number and parts of the newest intact checkpoint; reports and removes damaged newer ones."""
        damaged: dict[int, str] = {}
        for number in sorted(manager.all_steps(), reverse=True):
            restored = None
            reasons = _all_reasons(_change(manager.place(number)), "the files of a checkpoint")
            if not reasons:
                restored, reason = _restore(manager, number, args)
                reasons = _all_reasons(reason, "a checkpoint")
            if reasons:
                damaged[number] = f"{manager.place(number)} is damaged ({reasons[0]})"
                continue
            for name, message in damaged.items():
                _log.warning("%s; going on with %s, the one before it", message, number)
                if not self.read_only:
                    manager.delete(name)  # its number will be written again
            if not has_checksums(manager.place(number)):
                _log.warning(
                    "%s has no checksums, as an earlier version wrote it; damage to arrays is not noticed",
                    manager.place(number),
                )
            return number, restored
        if damaged:
            raise TrainingCheckpointError(
                f"no checkpoint is whole: {'; '.join(damaged.values())}; bring back a copy of "
                f"{self.folder}, or name another folder to begin anew"
            )
        manager.refuse_renamed()
        return None

    def _wait(self, manager: "_Manager") -> None:
        try:
            manager.wait_until_finished()
        except WRITE_ERRORS as error:
            raise self._failure(error) from error

    def _write(self, manager: "_Manager", step: int, args: Any) -> None:
        try:
            manager.write(step, args)
        except WRITE_ERRORS as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> TrainingCheckpointError:
        step = self.latest()
        whole = "there is none before it" if step is None else f"the one of step {step} is whole"
        return TrainingCheckpointError(
            f"a checkpoint could not be written in {self.folder}: {_cause(error)}; {whole}, and the same "
            "command goes on from there"
        )


class _Manager(ocp.CheckpointManager):
    """Orbax's manager of numbered folders, with checksums in each."""

    def __init__(self, folder: Path, read_only: bool):
        self._writes = 0  # the number that is being written
        if not read_only and jax.process_index() == 0:
            # Orbax does this in a thread, which fails if an interrupted writer still removes the same folder.
            for left in folder.glob(f"*{_UNFINISHED}*"):
                shutil.rmtree(left, ignore_errors=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            create=not read_only,
            read_only=read_only,
            # Called only in the first process, once the files of all are there, and before the folder gets
            # its name.
            async_options=ocp.options.AsyncOptions(post_finalization_callback=self._add_checksums),
        )
        super().__init__(folder.absolute(), options=options)

    def place(self, number: int) -> Path:
        """The folder of a checkpoint."""
        return Path(self.directory) / str(number)

    def write(self, number: int, args: Any) -> None:
        """Starts writing a checkpoint after the previous one is written."""
        self.wait_until_finished()
        self._writes = number
        self.save(number, args=args, force=True)

    def refuse_renamed(self) -> None:
        """Refuses checkpoint folders that were renamed; otherwise the run would start from scratch.

        Raises:
            TrainingCheckpointError: A folder's name is not a number any more.
        """
        for folder in sorted(Path(self.directory).glob("*/")):
            if _UNFINISHED not in folder.name and has_checksums(folder):
                _refuse_renamed(folder)

    def _add_checksums(self) -> None:
        name = str(self._writes)
        write_checksums(Path(self.directory) / f"{name}{_UNFINISHED}", name)


def _change(place: Path) -> str | None:
    """The difference of this process's files of a checkpoint from their checksums; None if there is none.

    Raises:
        TrainingCheckpointError: The checkpoint's folder was renamed.
    """
    if not has_checksums(place):
        return None
    try:
        _refuse_renamed(place)
        check_checksums(place, part=jax.process_index(), parts=jax.process_count())
    except (ChecksumError, OSError) as error:
        return str(error)
    return None


def _refuse_renamed(place: Path) -> None:
    if (name := written_name(place)) != place.name:
        raise TrainingCheckpointError(f"{place} was written as {name}; rename the folder to {name}")


def _restore(manager: _Manager, number: int, args: Any) -> tuple[Any, str | None]:
    """The parts of a checkpoint, or None and the reason why they cannot be read."""
    with _unheard():
        try:
            return manager.restore(number, args=args), None
        except Exception as error:  # of many kinds, from Orbax, its storage library and JSON
            reason = f"{type(error).__name__}: {str(error).strip()[:120]}"
        gc.collect()  # objects of the failed read print warnings when they are collected
    return None, reason


def _all_reasons(reason: str | None, about: str) -> list[str]:
    """The reasons gathered from all processes, without None."""
    return [found for found in gathered(reason, about) if found is not None]


def _cause(error: Exception) -> str:
    """The reason of a failed write: the system's message, if the system raised the error."""
    if found := _SYSTEM_ERROR.search(str(error)):
        return os.strerror(int(found[1]))
    return (str(error).splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """Silences Orbax's log of errors that are raised anyway, and of its background tasks."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hooks = [logger.level for logger in loggers], (sys.unraisablehook, sys.excepthook)
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = sys.excepthook = lambda *_: None
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        sys.unraisablehook, sys.excepthook = hooks
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def placed_shapes(tree: Any) -> Any:
    """Shapes, dtypes and shardings of arrays, without their memory."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
