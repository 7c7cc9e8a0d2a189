"""Counts the programs that this process compiles."""

import jax


class Compilations:
    """The number of programs that this process has compiled since the last start."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Resets the count."""
        self._before = _COUNT[0]

    @property
    def count(self) -> int:
        """The number of compiled programs."""
        return _COUNT[0] - self._before


_COUNT = [0]


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COUNT[0] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
