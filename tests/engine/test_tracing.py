"""A thread that traces programs leaves the interpreter to engines that decode half of the time."""

import pytest

from jetspec_jax.engine import compiler as tracing
from jetspec_jax.engine.compiler import Tracing


class Clock:
    """A clock that sleeping moves; while it sleeps, an engine may launch rounds."""

    def __init__(self):
        self.now, self.slept, self.while_asleep = 100.0, 0.0, lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds
        self.while_asleep()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tracing, "time", clock)
    return clock


def trace(turns, clock, seconds):
    with turns:
        clock.now += seconds
    return clock.slept


def test_without_rounds_there_is_no_pause(clock):
    turns = Tracing()
    assert trace(turns, clock, 2.0) == 0
    turns.launched()
    assert trace(turns, clock, 2.0) == 0  # that launch was long ago


def test_a_slow_launch_is_decoding(clock):
    """It began before the turn ended, and takes its time beside it."""
    turns = Tracing()
    with turns:
        turns.launched()
        clock.now += 0.5
    assert clock.slept == pytest.approx(0.5, abs=0.02)


def test_a_pause_is_as_long_as_the_turn_while_rounds_are_launched(clock):
    turns = Tracing()
    clock.while_asleep = turns.launched
    with turns:
        clock.now += 1.5
        turns.launched()
    assert clock.slept == pytest.approx(1.5, abs=0.02)
    assert not turns.lock.locked()


def test_a_pause_ends_soon_after_the_last_round(clock):
    turns = Tracing()
    with turns:
        clock.now += 1.5
        turns.launched()
    assert clock.slept == pytest.approx(1.0, abs=0.02)


def test_an_error_of_a_turn_lets_the_next_one_begin(clock):
    turns = Tracing()
    with pytest.raises(KeyError), turns:
        raise KeyError
    assert not turns.lock.locked()
