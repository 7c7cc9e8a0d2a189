"""Checkpoints of a training run: where to go on, and the best weights so far.

They are written in the background. A checkpoint that could not be written whole does not count, and the one
before it stays.
"""

from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

#: Raised when files cannot be written, by the system or by Orbax's storage library.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; earlier ones are intact."""


class Best(NamedTuple):
    """The evaluation of the best weights so far.

    Attributes:
        step: Steps before it; 0 before the first evaluation.
        score: Its score.
    """

    step: int = 0
    score: float = float("-inf")


class Checkpoints:
    """A folder with the last two checkpoints, and the best weights beside them.

    A checkpoint has two parts: the state, a pytree of arrays that may be spread over devices, and the host's
    data, which are plain JSON.
    """

    def __init__(self, folder: Path):
        """Opens or makes the folder; what an interrupted write left there is removed."""
        self.folder = folder
        self._last = _manager(folder / "checkpoints", keep=2)
        self._best = _manager(folder / "best", keep=1)

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

    def restore(self, state: Any) -> tuple[Any, dict[str, Any]]:
        """The newest checkpoint: its state, placed as the arrays of ``state`` are, and the host's data."""
        restored = self._last.restore(
            self.latest(),
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(_abstract(state)), host=ocp.args.JsonRestore()
            ),
        )
        return restored["state"], restored["host"]

    def save(self, step: int, state: Any, host: dict[str, Any]) -> None:
        """Begins to write a checkpoint; the arrays may be donated afterwards.

        Raises:
            CheckpointError: This one cannot be written, or one before it could not.
        """
        # A run that resumes from here does not evaluate earlier weights again, so the best are written first.
        self._wait(self._best)
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), host=ocp.args.JsonSave(host))
        self._write(self._last, step, parts)

    def best(self) -> Best:
        """The evaluation of the best weights so far, which may be later than the newest checkpoint."""
        number = self._best.latest_step()
        if number is None:
            return Best()
        restored = self._best.restore(number, args=ocp.args.Composite(best=ocp.args.JsonRestore()))
        return Best(**restored["best"])

    def save_best(self, best: Best, weights: Any) -> None:
        """Begins to write the best weights so far, in place of the previous ones.

        Raises:
            CheckpointError: As for `save`.
        """
        # Not numbered by step: a resumed run may find better weights at an earlier step.
        number = (self._best.latest_step() or 0) + 1
        parts = ocp.args.Composite(
            weights=ocp.args.StandardSave(weights), best=ocp.args.JsonSave(best._asdict())
        )
        self._write(self._best, number, parts)

    def restore_best(self, weights: Any) -> Any:
        """The best weights, placed as ``weights`` are.

        Raises:
            CheckpointError: They could not be written.
        """
        self.wait()
        args = ocp.args.Composite(weights=ocp.args.StandardRestore(_abstract(weights)))
        return self._best.restore(self._best.latest_step(), args=args)["weights"]

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            CheckpointError: Something could not be written.
        """
        for manager in (self._last, self._best):
            self._wait(manager)

    def _wait(self, manager: ocp.CheckpointManager) -> None:
        try:
            manager.wait_until_finished()
        except WRITE_ERRORS as error:
            raise self._failure(error) from error

    def _write(self, manager: ocp.CheckpointManager, step: int, args: Any) -> None:
        try:
            manager.save(step, args=args, force=True)
        except WRITE_ERRORS as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> CheckpointError:
        step = self.latest()
        whole = "there is none before it" if step is None else f"the one of step {step} is whole"
        return CheckpointError(
            f"a checkpoint could not be written in {self.folder}: {str(error).splitlines()[0]}; {whole}, and "
            "the same command goes on from there"
        )


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
