"""An `AsyncLLM` that says what a test wants."""

import asyncio

from jetspec_jax import Completion, Delta
from tests.serve.servers import Kept


class Scripted(Kept):
    """Says a text in pieces, or raises; keeps what it was asked for."""

    def __init__(self, target, text="", *, size=3, error=None, gate=None):
        super().__init__(target, max_slots=1)
        self.text, self.size, self.failure, self.gate = text, size, error, gate
        self.reason = "stop"
        self.asked, self.open, self.warmed = [], 0, []

    async def warm_up(self, sampling_params=None, *, background=False):
        self.warmed.append((sampling_params, background))

    async def generate(self, checked, **settings):
        ids = checked.prompt.ids.tolist()
        self.asked.append((self.llm.target.tokenizer.decode(ids), checked.params, settings))
        self.open, gate = self.open + 1, self.gate
        try:
            tokens = []
            for start in range(0, len(self.text), self.size):
                while gate is not None and not gate.acquire(blocking=False):
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0)
                tokens.append(1)
                yield Delta(self.text[start : start + self.size], [1])
            if self.failure is not None:
                raise self.failure
            whole = Completion(self.text, tokens or [0], self.reason, [1] * max(1, len(tokens)), [1], ids)
            yield Delta("", [], finish_reason=self.reason, completion=whole)
        finally:
            self.open -= 1
