"""Waiting for what other threads and processes do: an event decides, and never how long it took."""

import time
from pathlib import Path

#: Seconds after which a wait has failed. Whatever is waited for takes seconds; a busy machine takes longer.
PATIENCE = 600.0


def until(condition, seen=lambda: ""):
    """Waits until a condition holds, and returns what made it true; ``seen`` says what there is instead."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < end, f"still waiting after {PATIENCE:.0f} s: {seen()!r}"
        time.sleep(0.01)
    return found


def join(*threads):
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), thread.name


def until_it_sleeps(process):
    """Waits until a process's main thread waits for something, where the system tells."""
    stat = Path(f"/proc/{process.pid}/stat")
    if stat.exists():
        until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", stat.read_text)
