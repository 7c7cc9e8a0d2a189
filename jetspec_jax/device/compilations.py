"""Counts the programs that this process compiles."""

import jax

_COUNT = [0]


def num_compiled() -> int:
    """The number of programs that this process has compiled since the import of this module."""
    return _COUNT[0]


def _listen(event: str, duration_secs: float, **_: str | int) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _COUNT[0] += 1


jax.monitoring.register_event_duration_secs_listener(_listen)
