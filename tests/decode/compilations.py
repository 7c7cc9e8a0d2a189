"""Counts what is compiled."""

import contextlib

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
    """The list of the durations of all compilations inside the block, of which none is missed."""
    seen = []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda: 0)()
        assert seen, "the listener hears nothing"
        seen.clear()
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
