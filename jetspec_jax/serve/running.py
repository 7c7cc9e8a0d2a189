"""The life of a server process: bind, load, compile, listen, drain, end."""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn
from uvicorn.config import LOG_LEVELS

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.llm import PLAIN_NOTICE
from jetspec_jax.progress import SILENCE
from jetspec_jax.serve.app import make_app, progress_lines, warm_up
from jetspec_jax.serve.logs import log, show_logs
from jetspec_jax.serve.protocol import protocol_for
from jetspec_jax.serve.settings import ServeSettings

# Seconds between checks for running requests.
_LOOK = 0.05


class Stopping:
    """Handles signals: the first one makes the server drain, the second one ends the process at once.

    Before the server listens, the first signal ends the process. In a worker process the first signal does
    nothing, because the first process may be draining.
    """

    def __init__(self, *, follows: bool = False) -> None:
        """``follows``: this process is a worker, which ends when the first process does."""
        self._follows = follows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled = asyncio.Event()
        self._count = 0

    def __call__(self, signal: int) -> None:
        """Handles a signal; may be called in any thread."""
        self._count += 1
        if self._count > 1 or (self._loop is None and not self._follows):
            with contextlib.suppress(OSError):
                os.write(2, b"jetspec-jax: ended at once\n")
            os._exit(128 + signal)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._signalled.set)

    async def wait(self) -> None:
        """Waits for the first signal."""
        self._loop = asyncio.get_running_loop()
        await self._signalled.wait()


class Server(uvicorn.Server):
    """uvicorn's server without signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures no signals."""
        yield


def run(make_llm: Callable[[], AsyncLLM], settings: ServeSettings, name: str, stopping: Stopping) -> None:
    """Serves until a signal; ``make_llm`` is called after the port is bound."""
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        llm = make_llm()
        show_logs(LOG_LEVELS[settings.uvicorn_log_level])
        asyncio.run(serve_at(llm, listener, settings, name, stopping))


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address but does not listen yet."""
    try:
        [family, kind, protocol, _, address] = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    return OSError(f"cannot listen at {host}:{port}: {reason}; choose another --host or --port")


async def serve_at(
    llm: AsyncLLM,
    listener: socket.socket,
    settings: ServeSettings,
    name: str,
    stopping: Stopping,
) -> None:
    """Serves on a bound socket until a signal; the other arguments are those of `run`."""
    app = make_app(llm, settings, name=name)
    service = app.state.service
    if llm.llm.draft_head is not None and llm.llm.settings.budget == 1:
        print(f"jetspec-jax: {PLAIN_NOTICE}", file=sys.stderr)
    if llm.max_model_len < (limit := llm.llm.target.config.max_position_embeddings):
        context = f"context {llm.max_model_len} of {limit}; --max-model-len changes it"
        print(f"jetspec-jax: {context}", file=sys.stderr)
    if settings.warm_up != "none":
        print("jetspec-jax: compiling", file=sys.stderr, flush=True)
        if llm.has_workers:
            await warm_up(llm, settings)  # all processes compile the same, and no requests come meanwhile
        else:
            async with progress_lines(llm):
                await llm.warm_up(background=True)
    config = uvicorn.Config(
        app,
        http=protocol_for(settings),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # uvicorn's defaults depend on FORWARDED_ALLOW_IPS and WEB_CONCURRENCY in the environment.
        proxy_headers=False,
        forwarded_allow_ips=[],
        workers=1,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    host, port = listener.getsockname()[:2]
    serving = asyncio.create_task(server.serve([listener]))
    stop = asyncio.create_task(stopping.wait())
    while not (server.started or serving.done()):
        await asyncio.sleep(_LOOK / 5)
    if serving.done():
        stop.cancel()
        await llm.close()
        try:
            await serving
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        return
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    log("listening", url=url, model=service.names[0])
    served = f"{service.names[0]} is served at {url}/v1, with a page at {url}/playground"
    print(f"jetspec-jax: {served}", file=sys.stderr, flush=True)
    beside = _warm_up_beside(llm, settings), log_compilations(llm.llm.engines.compiling)
    tasks = [asyncio.create_task(each) for each in beside]
    await asyncio.wait((serving, stop), return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
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
    stop.cancel()
    await serving
    log("ended")


async def log_compilations(compiling: Callable[[], set[str]]) -> None:
    """Logs, once, each kind of programs that requests wait for at two successive looks."""
    told: set[str] = set()
    before: set[str] = set()
    while True:
        await asyncio.sleep(SILENCE)
        now = compiling()
        for kind in sorted((now & before) - told):
            log("compiling", programs=kind)
            told.add(kind)
        before = now


async def _warm_up_beside(llm: AsyncLLM, settings: ServeSettings) -> None:
    """Compiles the other programs while requests are served; after an error, each when it is needed."""
    if llm.has_workers:
        return
    try:
        await warm_up(llm, settings)
    except Exception as error:
        log("programs were not compiled ahead", logging.ERROR, error=error)


def draining_notice(requests: int, seconds: float) -> str:
    """The message on standard error when the server starts to drain."""
    after_the_key = "\n" if sys.stderr.isatty() else ""  # a terminal shows Ctrl-C as ^C
    if not requests:
        return f"{after_the_key}jetspec-jax: the server is shutting down; no requests are running"
    remaining = "1 running request has" if requests == 1 else f"{requests} running requests have"
    return (
        f"{after_the_key}jetspec-jax: the server is draining: it accepts no more requests, and {remaining} "
        f"{seconds:g} s to end; a second Ctrl-C ends it at once"
    )
