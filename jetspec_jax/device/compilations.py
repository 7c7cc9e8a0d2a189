"""Counts the programs that this process compiles."""

import jax


class Compilations:
    """How many programs this process has compiled since some time."""

    def __init__(self) -> None:
        """Counts from now on."""
        self.restart()

    def restart(self) -> None:
        """Counts from now on."""
        self._before = _COUNT[0]

    @property
    def count(self) -> int:
        """How many."""
        return _COUNT[0] - self._before


_COUNT = [0]


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COUNT[0] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
