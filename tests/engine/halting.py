"""Engines that stop where a test wants them, however long it takes what it does meanwhile."""

import contextlib
import threading

from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.loop import loop_for
from tests.events import PATIENCE, join, until


def begun(count):
    """Whether so many requests of an engine have a token."""
    return lambda requests: sum(bool(request.tokens) for request in requests) >= count


@contextlib.contextmanager
def halted(when, over=lambda: False):
    """No engine launches anything while ``when`` holds of its requests.

    That ends with the block, or when the event that this gives is set, or when ``over()`` holds.
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


@contextlib.contextmanager
def paused(target):
    """The loop of a target serves nobody until the block ends."""
    begins, left = threading.Event(), threading.Event()

    def work():
        begins.set()
        assert left.wait(PATIENCE)

    thread = threading.Thread(target=loop_for(target).run, args=(work,))
    thread.start()
    assert begins.wait(PATIENCE)
    try:
        yield
    finally:
        left.set()
        join(thread)
