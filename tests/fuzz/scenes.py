"""What the long programs do with a tiny pair, and what must hold afterwards."""

import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax

from jetspec_jax import LLM, SamplingParams, generate
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.tiny import (
    TINY,
    free_pages,
    free_slots,
    random_head,
    random_target,
    with_windows,
    word_tokenizer,
)
from tests.events import until

CONFIG = with_windows(TINY, None)


class Case(NamedTuple):
    """A prompt, how it is sampled, and what plain decoding alone makes of it."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[int]
    text: str | None


class WrongTokens(Exception):
    """An output differs from what plain decoding alone gives."""


class Scene:
    """A tiny pair under a tree and a plain `LLM` that share the target, and requests with known answers."""

    def __init__(self, seed: int, cases: int = 12):
        tokenizer = word_tokenizer(CONFIG.vocab_size)
        self.target, self.head = random_target(CONFIG, 0, tokenizer=tokenizer), random_head(CONFIG, 0)
        self.tree = LLM(self.target, self.head, budget=16, width=3, max_slots=2)
        self.plain = LLM(self.target, max_slots=2)
        rng = random.Random(seed)
        self.cases = []
        for number in range(cases):
            prompt = [rng.randrange(CONFIG.vocab_size) for _ in range(rng.choice([1, 5, 40, 140]))]
            params = SamplingParams(
                temperature=float(number % 2),
                seed=number,
                max_tokens=rng.choice([1, 7, 20, 60]),
                stop=["yc"] if number % 3 == 0 else None,
                ignore_eos=True,
            )
            [alone] = generate(self.target, [prompt], params)
            self.cases.append(Case(prompt, params, alone.token_ids, alone.text))

    def generate(self, rng: random.Random, llm: LLM | None = None) -> None:
        """A batch of one to three requests."""
        cases = rng.choices(self.cases, k=rng.randint(1, 3))
        llm = llm or rng.choice([self.tree, self.tree, self.plain])
        done = llm.generate([case.prompt for case in cases], [case.params for case in cases])
        for case, completion in zip(cases, done, strict=True):
            _expect((completion.token_ids, completion.text), (case.tokens, case.text))

    def stream(self, rng: random.Random) -> None:
        """A stream read to its end; after an interrupt what was read is a beginning."""
        case = rng.choice(self.cases)
        stream, text = self.tree.stream(case.prompt, case.params), ""
        try:
            for piece in stream:
                text += piece
        finally:
            if not case.text.startswith(text):
                raise WrongTokens(f"{text!r} is no beginning of {case.text!r}")
        _expect((text, stream.completion.token_ids), (case.text, case.tokens))

    def cancel(self, rng: random.Random) -> None:
        """A stream that is closed, left, or dropped before its end."""
        case, way = rng.choice(self.cases), rng.choice(["close", "leave", "drop"])
        stream = self.tree.stream(case.prompt, case.params)
        text = "".join(next(stream, "") for _ in range(rng.randint(0, 3)))
        if way == "close":
            stream.close()
        elif way == "leave":
            with stream:
                text += next(stream, "")
        if not case.text.startswith(text):
            raise WrongTokens(f"{text!r} is no beginning of {case.text!r}")

    def beside(self, rng: random.Random) -> None:
        """Calls of both kinds while a stream is open in the same thread."""
        case = rng.choice(self.cases)
        with self.tree.stream(case.prompt, case.params) as stream:
            text = next(stream)
            self.generate(rng)
            text += "".join(stream)
            _expect((stream.completion.token_ids, text), (case.tokens, case.text))

    def trace(self, rng: random.Random) -> None:
        """Traced decoding, to its end or left alone."""
        case = rng.choice(self.cases)
        rounds = trace_rounds(self.target, self.head, case.prompt, case.params, self.tree.settings)
        for _ in range(rng.choice([1, 1000])):
            if next(rounds, None) is None:
                _expect(rounds.completion.token_ids, case.tokens)
                break

    @property
    def acts(self) -> list[Callable[[random.Random], None]]:
        """All of the above."""
        return [self.generate, self.stream, self.cancel, self.beside, self.trace]

    def in_threads(self, threads: int, calls: int, seed: int) -> None:
        """So many calls of all kinds from each of so many threads at once; raises what any of them raised."""

        def use(number: int) -> None:
            rng = random.Random(f"{seed} {number}")
            for _ in range(calls):
                rng.choice(self.acts)(rng)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(use, range(threads)))

    def check(self, rng: random.Random) -> None:
        """Raises unless the next calls work, and slots, pages and stores are all back."""
        self.generate(rng, self.tree)
        self.stream(rng)
        [engine] = self.tree.engines.engines()
        until(lambda: not engine.open_requests)
        engine.run(lambda: None)
        scheduler, size = engine.scheduler, engine.plan.size
        assert not scheduler.requests, scheduler.requests
        assert free_pages(scheduler) == size.num_pages
        assert free_slots(scheduler) == list(range(size.slots))

    def bytes_held(self) -> int:
        """Bytes of all arrays on the device but those of the engines, which are closed."""
        for llm in (self.tree, self.plain):
            for engine in llm.engines.engines():
                engine.close()
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())


def _expect(got: object, expected: object) -> None:
    if got != expected:
        raise WrongTokens(f"{got} is not {expected}")
