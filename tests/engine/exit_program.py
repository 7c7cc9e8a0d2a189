"""A program that forks, and then ends, while its `AsyncLLM` decodes: run by `test_exit.py`."""

import asyncio
import atexit
import contextlib
import dataclasses
import os
import sys
import threading
import traceback

import pytest


def report_threads():
    names = [thread.name for thread in threading.enumerate()]
    print("decodes" if "jetspec-engine" in names else "ended", flush=True)


# Before other libraries register theirs, so that it is called after them.
atexit.register(report_threads)

from jetspec_jax import AsyncLLM, SamplingParams, generate  # noqa: E402
from tests.decode.tiny import TINY, random_target, with_windows, word_tokenizer  # noqa: E402

# Many seconds of decoding.
CONTEXT = 2**16
PARAMS = SamplingParams(max_tokens=CONTEXT - 10, ignore_eos=True)


def decode(llm, begun):
    async def read():
        async for _ in llm.generate([3, 1, 4], PARAMS):
            begun.set()

    with contextlib.suppress(RuntimeError):  # the program ends meanwhile
        asyncio.run(read())


def fork_refuses(llm, target, stream):
    """Whether a fork is told what is wrong: by each way in, and without waiting for anything."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = 1
    try:
        for way in (
            lambda: generate(target, [[1]]),
            lambda: llm.llm.generate([[1]]),
            lambda: asyncio.run(anext(llm.generate([1]))),
            lambda: next(stream),
        ):
            with pytest.raises(RuntimeError, match="is a fork"):
                way()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    config = dataclasses.replace(with_windows(TINY, None), max_position_embeddings=CONTEXT)
    target, begun = random_target(config, 0, tokenizer=word_tokenizer(64)), threading.Event()
    llm = AsyncLLM(target, max_slots=1, capacity=CONTEXT)
    threading.Thread(target=decode, args=(llm, begun), daemon=True).start()
    begun.wait()
    refused = fork_refuses(llm, target, llm.llm.stream([1, 2]))
    print("refused" if refused else "served", flush=True)
    sys.exit(3)
