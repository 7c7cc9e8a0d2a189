"""Engines that stop where a test wants them, however long it takes what it does meanwhile."""

import contextlib
import threading

from jetspec_jax.engine.scheduler import Scheduler
from tests.events import PATIENCE, join, until


def begun(count):
    """Whether so many requests of an engine have a token."""
    return lambda requests: sum(bool(request.tokens) for request in requests) >= count


@contextlib.contextmanager
def halted(when, over=lambda: False):
    """No engine launches anything while ``when`` holds of its requests.

    That ends with the block, or when the event that this gives is set, or when ``over()`` holds.
    """
    next_batch, left = Scheduler.next_batch, threading.Event()

    def held(scheduler, *arguments, **settings):
        if when(scheduler.requests):
            until(lambda: over() or left.is_set())
        return next_batch(scheduler, *arguments, **settings)

    Scheduler.next_batch = held
    try:
        yield left
    finally:
        Scheduler.next_batch = next_batch
        left.set()


@contextlib.contextmanager
def paused(engines):
    """The first of some engines serves nobody until the block ends."""
    begins, left = threading.Event(), threading.Event()

    def work():
        begins.set()
        assert left.wait(PATIENCE)

    thread = threading.Thread(target=engines.engines()[0].run, args=(work,))
    thread.start()
    assert begins.wait(PATIENCE)
    try:
        yield
    finally:
        left.set()
        join(thread)
