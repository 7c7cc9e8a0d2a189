"""What a terminal shows of something that takes a while and cannot be counted; `tqdm` shows what can."""

import contextlib
import sys
import threading
from collections.abc import Iterator

from tqdm import tqdm

#: Seconds after which a wait is worth a line.
PATIENCE = 2.0
_hidden = threading.Event()


def hide() -> None:
    """Shows no progress in this process any more: another one shows it."""
    _hidden.set()


def unseen() -> bool | None:
    """What tqdm takes for ``disable``: nothing is shown but on a terminal, and nothing where it is hidden."""
    return True if _hidden.is_set() else None


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows on a terminal what is waited for, and how long by now, until the block ends; not if that is soon.

    Args:
        text: What is being done, as "compiling ...".
    """
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
