"""What a terminal is shown while something takes a while."""

import contextlib
import io
import logging
import queue
import threading
import weakref

import pytest
from tqdm import tqdm

from jetspec_jax import LLM, SamplingParams, progress
from jetspec_jax.engine import engines, runner
from tests.decode.tiny import TINY, random_target, word_tokenizer
from tests.events import PATIENCE, until


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def watched(monkeypatch):
    """Makes standard error a stream; pytest puts its own there when a test begins."""
    # A bar that a failed call of another module has left open would take the first line.
    monkeypatch.setattr(tqdm, "_instances", weakref.WeakSet(), raising=False)

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


class TestProgressOfPrograms:
    @pytest.fixture
    def clock(self, monkeypatch):
        """Seconds, which pass where a test says so; tqdm's own clock included."""
        now = [1000.0]
        monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
        monkeypatch.setattr("tqdm.std.time", lambda: now[0])
        return now

    def test_a_file_has_a_line_now_and_then(self, watched, clock):
        file = watched(io.StringIO())
        with progress.Progress(total=100, desc="head", unit=" steps", mininterval=2) as bar:
            bar.set_postfix_str("compiling")
            for _ in range(100):
                clock[0] += 1
                bar.set_postfix(loss="1.5")
                bar.update()
        assert file.getvalue() == (
            "head: 29 of 100 steps after 00:30, loss=1.5\n"
            "head: 59 of 100 steps after 01:00, loss=1.5\n"
            "head: 89 of 100 steps after 01:30, loss=1.5\n"
            "head: 100 of 100 steps after 01:40, loss=1.5\n"
        )

    def test_what_is_soon_over_has_no_line(self, watched, clock):
        file = watched(io.StringIO())
        assert list(progress.Progress(range(9), desc="prompts", delay=1, leave=False)) == [*range(9)]
        assert file.getvalue() == ""

    def test_a_message_between_the_lines(self, watched, clock):
        file = watched(io.StringIO())
        with progress.Progress(total=2, desc="tune") as bar:
            progress.Progress.write("does not run", file=file)
            bar.update(2)
        assert file.getvalue() == "does not run\ntune: 2 of 2 it after 00:00\n"

    def test_what_breaks_off_is_not_done(self, watched, clock):
        file = watched(io.StringIO())
        with contextlib.suppress(ZeroDivisionError), progress.Progress(total=2) as bar:
            bar.update(1)
            raise ZeroDivisionError
        assert file.getvalue() == ""

    def test_a_terminal_has_tqdm_s_bar(self, watched):
        terminal = watched(Terminal())
        with progress.Progress(total=2, desc="head") as bar:
            bar.update(2)
        assert "100%|" in terminal.getvalue()
        assert terminal.getvalue().count("\n") == 1

    def test_disabled_says_nothing(self, watched):
        file = watched(io.StringIO())
        with progress.Progress(total=2, disable=True) as bar:
            bar.update(2)
        assert file.getvalue() == ""


class Compiled(logging.Handler):
    """Collects warnings of compilations; each program is compiled once there is one of its kind."""

    def __init__(self):
        super().__init__()
        self.records = []

    @property
    def texts(self):
        return [record.getMessage() for record in self.records]

    def emit(self, record):
        if "compiling" in record.getMessage():
            self.records.append(record)

    def compile(self, program):
        until(lambda: any(f" for {program.kind}," in text for text in self.texts))

    def __enter__(self):
        logging.getLogger("jetspec_jax").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("jetspec_jax").removeHandler(self)


@pytest.fixture
def impatient(monkeypatch):
    progress.log_once.cache_clear()
    monkeypatch.setattr(progress, "SILENCE", 0.001)
    yield
    progress.log_once.cache_clear()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_first_call_says_what_compiles(monkeypatch, impatient, streamed):
    """Once for each kind of program, whichever engine compiles it."""

    def call(params):
        with LLM(random_target(TINY, 0, tokenizer=word_tokenizer(TINY.vocab_size))) as llm:
            return list(llm.stream([1, 2], params)) if streamed else llm.generate([[1, 2]], params)

    with Compiled() as compiled:
        monkeypatch.setattr(runner.Lowering, "compile", lambda _, program: compiled.compile(program))
        for tokens in (2, 3):
            call(SamplingParams(max_tokens=tokens))
        call(SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=1))
    assert {(record.name, record.levelname) for record in compiled.records} == {("jetspec_jax", "WARNING")}
    kinds = "prompts", "rounds", "scores", "rounds logprobs"
    said = "compiling a program for {}, once per shape; LLM.warm_up() does it ahead"
    assert compiled.texts == [said.format(kind) for kind in kinds]


def test_calls_that_ask_for_no_bar_and_warm_up_say_nothing(monkeypatch):
    monkeypatch.setattr(engines, "next_of", lambda *_: pytest.fail("would warn"))
    with LLM(random_target(TINY, 0), max_slots=1) as llm:
        llm.warm_up(1)
        llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO(), None])
def test_it_is_said_once_wherever_standard_error_goes(impatient, watched, stream):
    class News(queue.SimpleQueue):
        misses = 2

        def get(self, block=True, timeout=None):
            self.misses -= 1
            if self.misses >= 0:
                raise queue.Empty
            return "news"

    watched(stream)
    with Compiled() as compiled:
        assert progress.next_of(News(), lambda: {"rounds"}) == "news"
    assert len(compiled.texts) == 1
