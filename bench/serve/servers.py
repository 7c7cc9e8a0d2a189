"""Servers as processes, one per method."""

import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence

import httpx

from bench.common.methods import AUTO, CHAIN
from jetspec_jax.tree import DEFAULT_ALGORITHM

_READY = re.compile(r"is served at (http://\S+)/v1")
# Nodes of a chain for heads with a block size of 16.
_CHAIN = 16
# The longest time to wait for a server.
_SECONDS = 900.0


def options_of(method: str, largest: int) -> list[str]:
    """The options of ``jetspec-jax serve`` for a method: "auto", "chain", "plain", or "tree N".

    Args:
        method: The method's name.
        largest: The most nodes of a tree of "auto".

    Raises:
        ValueError: The method is unknown.
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
    raise ValueError(f'methods are {AUTO}, {CHAIN}, plain, or a tree like "tree 64", not {method!r}')


class Server:
    """A server process, which runs until `close`."""

    def __init__(self, options: Sequence[str]):
        """Starts ``jetspec-jax serve`` with options, and waits until it listens and has compiled everything.

        Raises:
            RuntimeError: The process has ended, or is not ready in time.
        """
        words = [sys.executable, "-m", "jetspec_jax", "serve", "--port", "0", *options]
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._last: deque[str] = deque(maxlen=20)
        self._ready = queue.Queue[str | None]()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            url = self._ready.get(timeout=_SECONDS)
        except queue.Empty:
            url = None
        if url is None:
            self.close()
            raise RuntimeError(f"the server does not listen: {' '.join(self._last)[-1000:]}")
        self.url = url
        end = time.monotonic() + _SECONDS
        while not httpx.get(f"{url}/health", timeout=60).json()["warm"]:
            if time.monotonic() > end:
                self.close()
                raise RuntimeError("the server still compiles, or measures its rounds")
            time.sleep(0.5)

    def close(self) -> None:
        """Stops the process."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._last.append(line.strip())
                if found := _READY.search(line):
                    self._ready.put(found[1])
        self._ready.put(None)
