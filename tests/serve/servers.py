"""Servers with real sockets: in threads of the tests' process, and as processes."""

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
import time

import httpx

from jetspec_jax import AsyncLLM
from jetspec_jax.serve.running import Stopping, bind, serve_at
from jetspec_jax.serve.settings import ServeSettings
from tests.events import PATIENCE, join


class Served:
    """A server that listens; ``stop`` is what a signal does."""

    def __init__(self, llm, **settings):
        self.llm = llm
        self.settings = ServeSettings(**{"port": 0, "warm_up": "none", "drain_seconds": PATIENCE, **settings})
        self.stop, self.error = Stopping(), None
        self._socket = bind(self.settings.host, self.settings.port)
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        while self._thread.is_alive():
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{self.url}/version")
                return
            time.sleep(0.01)
        raise AssertionError("the server has ended") from self.error

    def _run(self):
        try:
            with contextlib.closing(self._socket):
                asyncio.run(serve_at(self.llm, self._socket, self.settings, "demo", self.stop))
        except BaseException as error:
            self.error = error

    def join(self):
        join(self._thread)
        if self.error is not None:
            raise self.error

    def client(self, **settings):
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **settings)


@contextlib.contextmanager
def served(llm, **settings):
    own = Served(llm, **settings)
    try:
        yield own
    finally:
        own.stop(15)
        own.join()


# The command; its engine launches nothing while a file exists, once so many requests have begun.
HELD = """
import sys
from pathlib import Path

from jetspec_jax.cli import main
from tests.engine.halting import begun, halted

hold, count = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
with halted(begun(count), over=lambda: not hold.exists()):
    sys.exit(main())
"""


class Command:
    """``jetspec-jax serve`` as a process, once it listens."""

    def __init__(self, *words, output=subprocess.PIPE, held=()):
        program = ["-c", HELD, *map(str, held)] if held else ["-m", "jetspec_jax"]
        self.process = subprocess.Popen(
            [sys.executable, *program, "serve", *words, "--port", "0"],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"served at (http://\S+)/v1", line):
                self.url = found[1]
                return
        raise AssertionError("".join(self.said))


class Kept(AsyncLLM):
    """One that servers share: none of them closes it."""

    async def close(self):
        pass
