"""What a terminal is shown while something takes a while."""

import contextlib
import io
import threading

import pytest

from jetspec_jax import progress
from tests.events import PATIENCE, until


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


def waiting_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("waiting: ")]


@pytest.mark.parametrize("fails", [False, True])
def test_a_wait_is_a_line_that_goes_away(monkeypatch, watched, fails):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    terminal = watched(Terminal())
    with contextlib.suppress(ZeroDivisionError), progress.waiting("compiling {this}"):
        until(lambda: "compiling {this} ... 0" in terminal.getvalue(), terminal.getvalue)
        if fails:
            raise ZeroDivisionError
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().split("\r")[-2].strip() == ""
    assert waiting_threads() == []


def test_what_is_soon_over_is_not_mentioned(monkeypatch, watched):
    monkeypatch.setattr(progress, "PATIENCE", PATIENCE)
    terminal = watched(Terminal())
    with progress.waiting("this"):
        pass
    assert terminal.getvalue() == ""


def test_nothing_is_written_to_a_file(monkeypatch, watched):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    file = watched(io.StringIO())
    with progress.waiting("this"):
        assert waiting_threads() == []  # nobody is there who would write
    assert file.getvalue() == ""
