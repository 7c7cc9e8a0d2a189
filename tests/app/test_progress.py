"""What a terminal is shown while something takes a while."""

import contextlib
import io
import threading
import time

import pytest

from jetspec_jax import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watched(monkeypatch):
    """Makes standard error a stream; pytest puts its own there when a test begins."""

    def watch(stream):
        monkeypatch.setattr("sys.stderr", stream)
        return stream

    return watch


def wait_for(text, stream):
    deadline = time.monotonic() + 30
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.01)


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_is_a_line_that_goes_away(monkeypatch, watched, fails):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    terminal = watched(Terminal())
    with contextlib.suppress(ZeroDivisionError), progress.waiting("compiling {this}"):
        wait_for("compiling {this} ... 00:0", terminal)
        if fails:
            raise ZeroDivisionError
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-2].strip() == ""
    assert "waiting: compiling {this}" not in [thread.name for thread in threading.enumerate()]


def test_what_is_soon_over_is_not_mentioned(watched):
    terminal = watched(Terminal())
    with progress.waiting("this"):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_written_to_a_file(monkeypatch, watched):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    file = watched(io.StringIO())
    with progress.waiting("this"):
        time.sleep(0.05)
    assert file.getvalue() == ""
