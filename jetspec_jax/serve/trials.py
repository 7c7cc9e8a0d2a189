"""Grammars of clients, compiled in a process that may die before the engine compiles them."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.engine.grammars import vocabulary_of
from jetspec_jax.sampling import compiling
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.errors import ApiError

#: Memory that a grammar may take, beside the vocabulary's.
MOST_BYTES = 2**28
#: Requests that may wait for the trials of others.
MOST_WAITING = 16
#: Grammars whose outcome is kept.
MOST_KEPT = 256


class GrammarTrials:
    """Compiles grammars one after the other in a process of its own, which is started for the first of them.

    A process that a grammar has ended is started anew for the next one. It belongs to one event loop.
    """

    def __init__(self, target: Target, seconds: float):
        """Starts nothing.

        Args:
            target: The model whose tokens the grammars are for.
            seconds: Processor time of each grammar.
        """
        self._target, self._seconds = target, seconds
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[StructuredOutputsParams, str | None] = OrderedDict()

    async def check(self, wanted: StructuredOutputsParams) -> None:
        """Checks that a grammar compiles within its bounds.

        Raises:
            ApiError: Too many requests wait for the trials of others.
            ImportError: llguidance is not installed.
            ValueError: The grammar does not compile, or takes too much.
        """
        if wanted not in self._known:
            if self._waiting >= MOST_WAITING:
                message = f"{self._waiting} grammars wait to be compiled already; try again"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            self._waiting += 1
            try:
                async with self._turn:
                    if wanted not in self._known:
                        self._known[wanted] = await self._tried(wanted)
            finally:
                self._waiting -= 1
        self._known.move_to_end(wanted)
        while len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        if (problem := self._known[wanted]) is not None:
            raise ValueError(problem)

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def _tried(self, wanted: StructuredOutputsParams) -> str | None:
        """Why a grammar is refused; None if it is not."""
        kind, text = wanted.source
        if self._process is None:
            self._process = await self._started()
        grammar = {"kind": kind, "text": text, "flexible": not wanted.disable_any_whitespace}
        try:
            answer = await _asked(self._process, json.dumps(grammar))
        except BaseException:  # its answer is nobody's
            await self.close()
            raise
        if answer:
            return json.loads(answer)
        await self.close()
        return (
            f"structured_outputs: {kind} takes more than {self._seconds:g} seconds or {MOST_BYTES >> 20} MiB "
            "to compile, or is nested too deeply: make it smaller, with fewer repeats, alternatives and rules"
        )

    async def _started(self) -> Process:
        vocabulary = await asyncio.to_thread(vocabulary_of, self._target)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", compiling.__file__, str(self._seconds), str(MOST_BYTES)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=2**20,
            start_new_session=True,  # an interrupt on a terminal is the server's alone
        )
        assert process.stdin is not None
        process.stdin.write(vocabulary.serialized.encode() + b"\n")
        return process


async def _asked(process: Process, line: str) -> bytes:
    """The line that a process answers with; empty where it ends instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
    return await process.stdout.readline()
