"""A program that ends while its `AsyncLLM` compiles in the background: run by `test_ready.py`."""

import asyncio
import sys
import threading

import tests.processes  # noqa: F401  (programs are compiled as in the tests)
from jetspec_jax import AsyncLLM, SamplingParams
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer

if __name__ == "__main__":
    config = with_windows(TINY, None)
    target = random_target(config, 0, tokenizer=word_tokenizer(64))
    # A width of its own, for which no other test has compiled anything.
    llm = AsyncLLM(target, random_head(config, 0), budget=32, width=5, algorithm="auto", max_slots=16)

    async def first():
        await llm.warm_up(background=True)
        async for _ in llm.generate([3, 1, 4], SamplingParams(max_tokens=1)):
            pass

    asyncio.run(first())
    names = {thread.name for thread in threading.enumerate()}
    print("compiling" if "jetspec-compiler" in names else "compiled", flush=True)
    sys.exit(3)
