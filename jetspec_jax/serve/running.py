"""A server as a process: it binds, loads, compiles, listens, drains, and ends."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.llm import PLAIN_NOTICE
from jetspec_jax.serve.app import make_app, warm_up
from jetspec_jax.serve.logs import log, show_logs
from jetspec_jax.serve.protocol import protocol_for
from jetspec_jax.serve.settings import ServeSettings

# Seconds between two looks at what still runs.
_LOOK = 0.05


class Stopping:
    """What a process does on signals: the first one lets the server drain, a second one ends it at once.

    Before the server listens, the first one ends it. In a process that follows another, which may be told too
    and drain, the first one does nothing.
    """

    def __init__(self, *, follows: bool = False) -> None:
        """Nobody has asked yet; ``follows`` says that this process ends when the first process does."""
        self._follows = follows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = asyncio.Event()
        self._count = 0

    def __call__(self, signal: int) -> None:
        """Called with a signal's number, in any thread."""
        self._count += 1
        if self._count > 1 or (self._loop is None and not self._follows):
            with contextlib.suppress(OSError):
                os.write(2, b"jetspec-jax: ended at once\n")
            os._exit(128 + signal)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked.set)

    async def wait(self) -> None:
        """Waits for the first signal."""
        self._loop = asyncio.get_running_loop()
        await self._asked.wait()


class Server(uvicorn.Server):
    """uvicorn's, which leaves signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


def run(
    make_llm: Callable[[], AsyncLLM],
    settings: ServeSettings,
    *,
    name: str = "demo",
    capacity: int | None = None,
    stopping: Stopping | None = None,
) -> None:
    """Serves until it is told to stop.

    Args:
        make_llm: Loads the models, once the port is known to be free.
        settings: How to serve.
        name: Of the model.
        capacity: As the models are loaded with.
        stopping: Told of signals by whoever hears them; None is never told.

    Raises:
        OSError: The address is not to be had.
        Exception: All that ``make_llm`` raises.
    """
    with contextlib.closing(bind(settings.host, settings.port)) as own:
        llm = make_llm()
        show_logs(settings.log_level)
        asyncio.run(
            serve_at(llm, own, settings, name, capacity, Stopping() if stopping is None else stopping)
        )


def bind(host: str, port: int) -> socket.socket:
    """A socket with an address, which nobody can connect to yet.

    Raises:
        OSError: The address is not to be had.
    """
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        own = socket.socket(family, kind, protocol)
        try:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(address)
        except OSError:
            own.close()
            raise
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return own


def _cannot_listen(host: str, port: int, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(f"cannot listen at {host}:{port}: {reason}; choose others by --host and --port")


async def serve_at(
    llm: AsyncLLM,
    own: socket.socket,
    settings: ServeSettings,
    name: str,
    capacity: int | None,
    stopping: Stopping,
) -> None:
    """Serves at an address until it is told to stop; the other arguments are those of `run`.

    Raises:
        OSError: Another process listens there since.
    """
    if llm.llm.draft_head is not None and llm.llm.settings.budget == 1:
        print(f"jetspec-jax: {PLAIN_NOTICE}", file=sys.stderr)
    await warm_up(llm, settings)
    app = make_app(llm, settings, name=name, capacity=capacity)
    service = app.state.service
    config = uvicorn.Config(
        app,
        http=protocol_for(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    host, port = own.getsockname()[:2]
    serving = asyncio.create_task(server.serve([own]))
    told = asyncio.create_task(stopping.wait())
    while not (server.started or serving.done()):
        await asyncio.sleep(_LOOK / 5)
    if serving.done():
        told.cancel()
        await llm.close()
        try:
            await serving
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        return
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log("listening", url=url, model=service.names[0])
    print(f"jetspec-jax: {service.names[0]} is served at {url}/v1", file=sys.stderr, flush=True)
    await asyncio.wait((serving, told), return_when=asyncio.FIRST_COMPLETED)
    if not serving.done():
        service.draining = True
        log("draining", requests=service.running, seconds=settings.drain_seconds)
        print(draining_notice(service.running, settings.drain_seconds), file=sys.stderr, flush=True)
        end = time.monotonic() + settings.drain_seconds
        while service.running and time.monotonic() < end:
            await asyncio.sleep(_LOOK)
        if service.running:
            log("requests are ended", logging.WARNING, requests=service.running)
            await llm.close()
        server.should_exit = True
    told.cancel()
    await serving
    log("ended")


def draining_notice(requests: int, seconds: float) -> str:
    """What standard error says once the server has been told to stop: for how many seconds it drains."""
    after_the_key = "\n" if sys.stderr.isatty() else ""  # a terminal shows Ctrl-C as ^C
    if not requests:
        return f"{after_the_key}jetspec-jax: the server ends; no requests run"
    what = "1 running request has" if requests == 1 else f"{requests} running requests have"
    return (
        f"{after_the_key}jetspec-jax: the server drains: no request is accepted any more, and {what} "
        f"{seconds:g} s to end; a second Ctrl-C ends it at once"
    )
