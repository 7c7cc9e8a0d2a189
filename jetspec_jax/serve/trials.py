"""Compiles clients' grammars in a separate process that may die, before the engine compiles them."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.sampling import compiling
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.errors import ApiError

#: Most memory of a trial, in addition to the vocabulary's.
MOST_BYTES = 2**28
#: Most requests that may wait for a trial.
MOST_WAITING = 16
#: Most grammars whose result is cached.
MOST_KEPT = 256


class GrammarTrials:
    """Compiles grammars one at a time in a separate process, which is started for the first grammar.

    If a grammar ends the process, it is restarted for the next one. An instance belongs to one event loop.
    """

    def __init__(self, target: Target, seconds: float):
        """``seconds``: most processor time for each grammar."""
        self._target, self._seconds = target, seconds
        self._process: Process | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._known: OrderedDict[StructuredOutputsParams, str | None] = OrderedDict()

    async def check(self, grammar: StructuredOutputsParams, name: str = "") -> None:
        """Checks that a grammar compiles within the limits; errors have its ``name``."""
        if grammar not in self._known:
            if self._waiting >= MOST_WAITING:
                message = f"{self._waiting} grammars are waiting to be compiled; try again"
                raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
            self._waiting += 1
            try:
                async with self._turn:
                    if grammar not in self._known:
                        self._known[grammar] = await self._tried(grammar)
            finally:
                self._waiting -= 1
        self._known.move_to_end(grammar)
        while len(self._known) > MOST_KEPT:
            self._known.popitem(last=False)
        if (problem := self._known[grammar]) is not None:
            raise ValueError(problem.replace(": ", f": {name}: ", 1) if name else problem)

    async def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None

    async def _tried(self, outputs: StructuredOutputsParams) -> str | None:
        """The reason to refuse a grammar, or None."""
        kind, text = outputs.source
        if self._process is None:
            self._process = await self._started()
        grammar = {"kind": kind, "text": text, "flexible": not outputs.disable_any_whitespace}
        try:
            answer = await _ask(self._process, json.dumps(grammar))
        except BaseException:  # the pending answer must not be read as the next grammar's
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
        vocabulary = await asyncio.to_thread(lambda: self._target.vocabulary)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", compiling.__file__, str(self._seconds), str(MOST_BYTES)),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            limit=2**20,
            start_new_session=True,  # so that Ctrl-C in a terminal reaches only the server
        )
        assert process.stdin is not None
        process.stdin.write(vocabulary.serialized.encode() + b"\n")
        return process


async def _ask(process: Process, line: str) -> bytes:
    """The process's answer to a line; empty if the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(line.encode() + b"\n")
        await process.stdin.drain()
    return await process.stdout.readline()
