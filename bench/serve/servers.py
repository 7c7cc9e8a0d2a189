"""Servers as processes of their own, one for each method."""

import json
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from bench.common.methods import AUTO, CHAIN
from bench.serve.replaying import MARK
from jetspec_jax.tree import DEFAULT_ALGORITHM

_READY = re.compile(r"is served at (http://\S+)/v1")
# Nodes of a chain, of a head whose blocks have 16 tokens.
_CHAIN = 16


def options_of(method: str, largest: int) -> list[str]:
    """What ``jetspec-jax serve`` is told of a method: "auto", "chain", "plain", or "tree N".

    Args:
        method: Its name.
        largest: Nodes of the largest trees of "auto".

    Raises:
        ValueError: There is no such method.
    """
    if method == "plain":
        return ["--budget", "1"]
    if method == AUTO:
        return ["--budget", str(largest), "--algorithm", AUTO]
    if method == CHAIN:
        return ["--budget", str(_CHAIN), "--width", "1", "--algorithm", DEFAULT_ALGORITHM]
    kind, _, nodes = method.partition(" ")
    if kind == "tree" and nodes.isdecimal() and int(nodes) > 1:
        return ["--budget", nodes, "--algorithm", DEFAULT_ALGORITHM]
    raise ValueError(f'methods are {AUTO}, {CHAIN}, plain, or a tree as "tree 64", not {method!r}')


class Spent(NamedTuple):
    """Processor seconds of a server that replays.

    Attributes:
        process: Of all its threads.
        engine: Of the engine's steps.
    """

    process: float
    engine: float


class Server:
    """A process that serves from when this is made until `close`."""

    def __init__(self, options: Sequence[str], *, replays: bool, seconds: float = 900.0):
        """Starts it, and waits until it listens.

        Args:
            options: Of ``jetspec-jax serve``, and of what is replayed.
            replays: Whether an engine replays; else it computes.
            seconds: To wait.

        Raises:
            RuntimeError: It has ended, or does not listen in time.
        """
        module = ["bench.serve.replaying"] if replays else ["jetspec_jax", "serve"]
        words = [sys.executable, "-m", *module, "--port", "0", *options]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        self._replays = replays
        self._last: deque[str] = deque(maxlen=20)
        self._ready, self._told = queue.Queue[str | None](), queue.Queue[str]()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            url = self._ready.get(timeout=seconds)
        except queue.Empty:
            url = None
        if url is None:
            self.close()
            raise RuntimeError(f"the server does not listen: {' '.join(self._last)[-1000:]}")
        self.url = url

    def spent(self) -> Spent | None:
        """What it has spent by now; None of one that computes, whose threads do more than serve."""
        if not self._replays:
            return None
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Spent(**json.loads(self._told.get(timeout=60)))

    def close(self) -> None:
        """Ends it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.startswith(MARK):
                self._told.put(line.removeprefix(MARK))
            else:
                self._last.append(line.strip())
                if found := _READY.search(line):
                    self._ready.put(found[1])
        self._ready.put(None)
