"""Counts what is compiled."""

import contextlib
import threading

import jax

from tests.events import until

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
    """The list of the durations of all compilations inside the block, of which none is missed.

    Engines that other tests have used may still compile in the background: that ends before.
    """
    until(lambda: not any(thread.name == "jetspec-compiler" for thread in threading.enumerate()))
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
