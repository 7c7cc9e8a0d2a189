"""Engines that stop where a test wants them, however long it takes what it does meanwhile."""

import contextlib
import threading

from jetspec_jax.engine.engine import Engine
from tests.events import until


def begun(count):
    """Whether so many requests of an engine have a token."""
    return lambda requests: sum(bool(request.tokens) for request in requests) >= count


@contextlib.contextmanager
def halted(when, over=lambda: False):
    """No engine launches anything while ``when`` holds of its requests.

    That ends with the block, or when the event that this gives is set, or when ``over()`` holds. An engine
    that waits holds its lock: calls and streams that need it wait too.
    """
    launch, left = Engine.launch, threading.Event()

    def held(engine, *arguments, **settings):
        if when(engine.scheduler.requests):
            until(lambda: over() or left.is_set())
        return launch(engine, *arguments, **settings)

    Engine.launch = held
    try:
        yield left
    finally:
        Engine.launch = launch
        left.set()
