"""Checkpoints of a training run: the state to resume from, and the best weights so far.

They are written in the background. An incomplete checkpoint is ignored, and the previous one is kept. The
last file of a checkpoint has checksums of the others, which are verified before reading.

A checkpoint also has the number of the best weights at its time. A run resumes from the newest checkpoint
that is intact and whose best weights, or better ones, are intact, and reports what is damaged.

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
from collections.abc import Callable, Iterator
from pathlib import Path
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
# In the host's data: the number of the best weights at the time of a checkpoint, 0 if there were none.
_BEST = "best"
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
    """A restored checkpoint, or the beginning of a run.

    Attributes:
        step: The number of completed steps; 0 at the beginning.
        state: The state, with the requested shardings.
        host: The host's data; empty at the beginning.
        best: The evaluation of the best weights so far, which may be newer than the checkpoint.
    """

    step: int
    state: Any
    host: dict[str, Any]
    best: Best


class Checkpoints:
    """A folder with the last two checkpoints, and the last two of the best weights beside them.

    A checkpoint has two parts: the state, a pytree of possibly sharded arrays, and the host's data, as JSON.
    """

    def __init__(self, folder: Path, *, read_only: bool = False):
        """Opens or makes the folder, and removes leftovers of an interrupted write.

        ``read_only`` changes nothing, because another process may be writing.
        """
        self.folder = folder
        self._last = _Manager(folder / "checkpoints", read_only)
        self._best = _Manager(folder / "best", read_only)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            self._last.close()
            self._best.close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint; None without any."""
        return self._last.latest_step()

    def restore(self, state: Any) -> Resumed:
        """The newest usable checkpoint, with the shardings of ``state``; without any, ``state`` itself.

        Unusable checkpoints and damaged best weights that are newer are removed: the run makes them again.

        Raises:
            TrainingCheckpointError: There are checkpoints or best weights, but none are usable. Nothing is
                removed.
        """
        number, parts, damaged = self._newest(self._best, ocp.args.Composite(best=ocp.args.JsonRestore()))
        best = Best(**parts["best"]) if number else Best()

        def lacks_best(parts: Any) -> str | None:
            # Earlier versions did not write the number.
            needed = parts["host"].pop(_BEST, max([number, *damaged]))
            return None if needed <= number else f"needs {self._best.place(needed)}, which is not intact"

        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(placed_shapes(state)), host=ocp.args.JsonRestore()
        )
        step, parts, unusable = self._newest(self._last, args, lacks_best)
        if (unusable and not step) or (damaged and not (step or number)):
            raise TrainingCheckpointError(
                f"no checkpoint is whole: {'; '.join([*unusable.values(), *damaged.values()])}; bring back a "
                f"copy of {self.folder}, or name another folder to begin anew"
            )
        self._remove(self._best, damaged, number)
        self._remove(self._last, unusable, step)
        return Resumed(step, parts["state"], parts["host"], best) if step else Resumed(0, state, {}, best)

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Starts writing a checkpoint in the background; afterwards the arrays may be donated.

        Raises:
            TrainingCheckpointError: This checkpoint or an earlier one could not be written.
        """
        # A run that resumes from here does not evaluate earlier weights again, so the best are written first.
        self._try(self._best.wait_until_finished)
        host = {**host, _BEST: self._best.latest_step() or 0}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        self._try(self._last.write, step, parts)

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
        self._try(self._best.write, number, parts)

    def restore_best(self, weights: Any) -> tuple[Best, Any] | None:
        """The best weights so far, with the shardings of ``weights``, and their evaluation; None without any.

        They may be newer than the newest checkpoint.

        Raises:
            TrainingCheckpointError: They could not be written, or are damaged: weights before them are not
                the best.
        """
        self.wait()
        args = ocp.args.Composite(
            weights=ocp.args.StandardRestore(placed_shapes(weights)), best=ocp.args.JsonRestore()
        )
        if (number := self._best.latest_step()) is None:
            self._best.refuse_renamed()
            return None
        parts, reason = self._read(self._best, number, args)
        if reason is not None:
            raise TrainingCheckpointError(
                f"{reason}; bring back a copy of it, or run the training again: an unfinished run resumes "
                "from a checkpoint before it, if there is one"
            )
        return Best(**parts["best"]), parts["weights"]

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            TrainingCheckpointError: Something could not be written.
        """
        for manager in (self._last, self._best):
            self._try(manager.wait_until_finished)

    def _newest(
        self, manager: "_Manager", args: Any, check: Callable[[Any], str | None] = lambda _: None
    ) -> tuple[int, Any, dict[int, str]]:
        """The newest usable checkpoint.

        Args:
            manager: The checkpoints.
            args: The parts to restore.
            check: Says why an intact checkpoint is unusable, from its parts; None if it is usable.

        Returns:
            Its number, or 0 if none is usable; its parts; and why each newer one is unusable.
        """
        unusable: dict[int, str] = {}
        for number in sorted(manager.all_steps(), reverse=True):
            parts = None  # frees the arrays of an unusable one
            parts, reason = self._read(manager, number, args)
            if reason is None and (why := check(parts)) is not None:
                reason = f"{manager.place(number)} {why}"
            if reason is None:
                return number, parts, unusable
            unusable[number] = reason
        if not unusable:
            manager.refuse_renamed()
        return 0, None, unusable

    def _read(self, manager: "_Manager", number: int, args: Any) -> tuple[Any, str | None]:
        """The parts of a checkpoint, and None; or None and the reason why it is damaged."""
        parts = None
        reasons = _all_reasons(_change(manager.place(number)), "the files of a checkpoint")
        if not reasons:
            parts, reason = _restore(manager, number, args)
            reasons = _all_reasons(reason, "a checkpoint")
        if reasons:
            return None, f"{manager.place(number)} is damaged ({reasons[0]})"
        if not has_checksums(manager.place(number)):
            _log.warning(
                "%s has no checksums, as an earlier version wrote it; damage to arrays is not noticed",
                manager.place(number),
            )
        return parts, None

    def _remove(self, manager: "_Manager", unusable: dict[int, str], usable: int) -> None:
        """Reports and removes unusable checkpoints: their numbers will be written again."""
        instead = f"{usable}, the one before it" if usable else "none, as there is none before it"
        for number, reason in unusable.items():
            _log.warning("%s; going on with %s", reason, instead)
            manager.delete(number)

    def _try(self, write: Callable[..., None], *given: Any) -> None:
        try:
            write(*given)
        except WRITE_ERRORS as error:
            step = self.latest()
            whole = "there is none before it" if step is None else f"the one of step {step} is whole"
            raise TrainingCheckpointError(
                f"a checkpoint could not be written in {self.folder}: {_cause(error)}; {whole}, and the same "
                "command goes on from there"
            ) from error


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
