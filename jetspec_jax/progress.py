"""What is shown of something that takes a while: a bar or a line on a terminal, and lines in a file."""

import contextlib
import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")
#: Seconds after which a wait is worth a line.
PATIENCE = 2.0
#: Seconds between two lines about one thing in a file.
LINE_SECONDS = 30.0
#: Seconds without news after which a log names what is compiled.
SILENCE = 3.0
_hidden = threading.Event()


def hide() -> None:
    """Shows no progress in this process any more: another one shows it."""
    _hidden.set()


def unseen() -> bool | None:
    """What tqdm takes for ``disable``: nothing is shown but on a terminal, and nothing where it is hidden."""
    return True if _hidden.is_set() else None


def terminal_bar(**settings: Any) -> tqdm:
    """A progress bar on a terminal, for long calls."""
    return tqdm(delay=2, miniters=0, leave=False, disable=unseen(), **settings)


@functools.cache
def log_once(level: int, text: str) -> None:
    """Logs a text once per process."""
    logging.getLogger("jetspec_jax").log(level, "%s", text)


def next_of(news: queue.SimpleQueue[T], compiling: Callable[[], Iterable[str]]) -> T:
    """The next item of a queue. A wait that takes long logs the kinds of programs that compile."""
    while True:
        try:
            return news.get(timeout=SILENCE)
        except queue.Empty:
            for kind in sorted(compiling()):
                text = f"compiling a program for {kind}, once per shape; LLM.warm_up() does it ahead"
                log_once(logging.WARNING, text)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows on a terminal what is waited for, and how long by now, unless the block ends soon."""
    if _hidden.is_set() or sys.stderr is None or not sys.stderr.isatty():
        yield
        return
    done = threading.Event()

    def show() -> None:
        if done.wait(PATIENCE):
            return
        # A bar without a bar: several of them keep to lines of their own.
        words = text.replace("{", "{{").replace("}", "}}")
        with tqdm(bar_format=words + " ... {elapsed}", delay=PATIENCE, leave=False) as line:
            # That much is over already.
            line.start_t, line.delay = line.start_t - PATIENCE, 0
            line.refresh()
            while not done.wait(1.0):
                line.refresh()

    thread = threading.Thread(target=show, name=f"waiting: {text}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Progress(tqdm):
    """The progress of a program that runs for long: tqdm's bar on a terminal, and in a file lines.

    A line comes every `LINE_SECONDS`, and when all is done. Commands that answer in a moment show nothing in
    a file, and use tqdm itself.
    """

    def __init__(self, *arguments: Any, **settings: Any):
        file = settings.get("file") or sys.stderr
        self._in_lines, self._line, self._line_at = not file.isatty(), "", time.monotonic()
        super().__init__(*arguments, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Shows the state; in a file only if the line before is old enough."""
        if not self._in_lines:
            return super().display(msg, pos)
        if time.monotonic() >= self._line_at + LINE_SECONDS:
            self._write_line()
        return True

    def clear(self, nolock: bool = False) -> None:
        """Takes a bar off the terminal; lines stay."""
        if not self._in_lines:
            super().clear(nolock)

    def close(self) -> None:
        """Ends with the last state, if all is done and was long enough to be worth a line."""
        if self._in_lines and not self.disable:
            about = self.format_dict
            if about["n"] == about["total"] and about["elapsed"] >= self.delay:
                self._write_line()
            self.disable = True  # tqdm would add an empty line
        super().close()

    def _write_line(self) -> None:
        about = self.format_dict
        name, of = about["prefix"].removesuffix(": "), f" of {about['total']}" if about["total"] else ""
        line = f"{name}{name and ': '}{about['n']}{of} {about['unit'].strip()}"
        if line != self._line:
            more = f", {about['postfix']}" if about["postfix"] else ""
            print(f"{line} after {self.format_interval(about['elapsed'])}{more}", file=self.fp, flush=True)
            self._line, self._line_at = line, time.monotonic()
