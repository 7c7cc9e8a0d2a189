"""The interface of trackers."""

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
        """Logs rows; an interrupted run may have logged some of them before."""
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
        ValueError: The package is not installed; the message has the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(
            f'the tracker {extra} needs {error.name}: pip install "jetspec-jax[{extra}]"'
        ) from error
