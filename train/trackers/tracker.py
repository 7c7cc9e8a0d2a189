"""What the log of a training run needs of a tracker."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable


class Row(NamedTuple):
    """The figures of a step or of an evaluation after it.

    Attributes:
        step: The step's number; rows come in the order of their steps.
        values: Finite numbers by their tags, such as "train/loss".
    """

    step: int
    values: Mapping[str, float]


@runtime_checkable
class Tracker(Protocol):
    """A run that is open in a tracker."""

    def log(self, rows: Sequence[Row]) -> None:
        """Takes rows, some of which an interrupted run may have sent before."""
        ...

    def close(self, failed: bool) -> None:
        """Ends the run, which may be resumed later.

        Args:
            failed: Whether an error ended it.
        """
        ...


def import_extra(module: str, extra: str) -> Any:
    """Imports a tracker's package.

    Raises:
        ValueError: It is not installed; the message names the extra that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f'the tracker {extra} needs {error.name}: pip install "jetspec-jax[{extra}]"'
        ) from error
