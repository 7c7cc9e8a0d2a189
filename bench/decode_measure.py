"""Runs the methods of `python -m bench decode` in turn, and keeps what they did and how long it took."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax

from bench.methods import Method
from bench.prompt_work import Work
from jetspec_jax import Completion, Head, Target
from jetspec_jax.engine import Engine
from jetspec_jax.engine_size import default_capacity
from jetspec_jax.generate import slots_for
from jetspec_jax.llm import STREAM_ROUNDS
from jetspec_jax.memory import DeviceMemoryError

# Enough tokens for one round of every kind to compile.
WARM_UP_TOKENS = 4


@dataclass
class Measured:
    """What a method did at one temperature.

    Attributes:
        completions: Of all prompts, in the first timed run.
        seconds: Of each timed run of all prompts.
        first_token_seconds: From the submission of a prompt to its first token, while nothing else runs; of
            every prompt, in every run. As in a stream, the first dispatch's rounds are in it.
        peak_bytes: The most that the process had in use on the device by the time the method had first run;
            None where the device does not say.
    """

    completions: list[Completion] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


class Bench:
    """Target, draft head, and all that the methods have in common."""

    def __init__(
        self,
        target: Target,
        head: Head,
        works: Mapping[float, Work],
        *,
        batch: int,
        implementation: str | None,
    ):
        """Compiles nothing yet.

        Args:
            target: The target.
            head: The draft head.
            works: By temperature.
            batch: Most prompts that decode at the same time.
            implementation: Of tree attention.
        """
        self._target, self._head, self._works = target, head, works
        self._implementation = implementation
        self._slots = slots_for(max(len(work.ids) for work in works.values()), batch)
        # One for all temperatures: another capacity is another program.
        need = max(
            len(ids) + own.max_tokens
            for work in works.values()
            for ids, own in zip(work.ids, work.params, strict=True)
        )
        self._capacity = default_capacity(target.config, need)

    def check(self, methods: Sequence[Method]) -> None:
        """Finds out, before anything is compiled, whether the device can hold the largest of some methods.

        Raises:
            DeviceMemoryError: It cannot; the message names the method.
        """
        largest = max(methods, key=lambda method: method.settings.budget)
        try:
            self._engine(largest)
        except DeviceMemoryError as error:
            raise DeviceMemoryError(f"{largest.name}: {error}") from error

    def measure(
        self, methods: Sequence[Method], repeats: int, step: Callable[[str], None]
    ) -> Iterator[dict[tuple[Method, float], Measured]]:
        """Measures methods in turn, so that a slow moment of the machine falls on all of them alike.

        Args:
            methods: The methods.
            repeats: Timed runs of each at each temperature.
            step: Called with what comes next, once for the compilation of a method and once for each run.

        Yields:
            What was measured so far, after every turn: the same, with one more timed run.
        """
        found = {(method, temperature): Measured() for method in methods for temperature in self._works}
        for method in methods:
            step(f"compile {method.name}")
            peak = self._warm_up(method)
            for temperature in self._works:
                found[method, temperature].peak_bytes = peak
        for _ in range(repeats):
            for method in methods:
                engine = self._engine(method)
                for temperature, work in self._works.items():
                    step(f"{method.name}, T = {temperature:g}")
                    _run(engine, work, found[method, temperature])
                del engine  # two sets of stores may not fit the device
            yield found

    def _engine(self, method: Method) -> Engine:
        return Engine(
            self._target,
            None if method.settings.budget == 1 else self._head,
            method.settings,
            slots=self._slots,
            capacity=self._capacity,
            implementation=self._implementation,
        )

    def _warm_up(self, method: Method) -> int | None:
        """Compiles all that a method runs; the most bytes that have been in use."""
        engine, work = self._engine(method), next(iter(self._works.values()))
        # A request of one token, or one that ends with its first, has no round.
        most = min(WARM_UP_TOKENS, max(2, work.params[0].max_tokens))
        params = replace(work.params[0], max_tokens=most, ignore_eos=True)
        engine.complete(work.ids[:1], [params], work.routing[:1])
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _run(engine: Engine, work: Work, measured: Measured) -> None:
    """One timed run of all prompts, then the first token of each alone."""
    started = time.perf_counter()
    requests = engine.complete(work.ids, work.params, work.routing)
    measured.seconds.append(time.perf_counter() - started)
    if not measured.completions:
        measured.completions = [request.output.completion() for request in requests]
    for ids, params, routing in zip(work.ids, work.params, work.routing, strict=True):
        started = time.perf_counter()
        request = engine.submit(ids, params, routing)
        while not request.output.token_ids:
            engine.step(STREAM_ROUNDS)
        measured.first_token_seconds.append(time.perf_counter() - started)
        engine.cancel(request)
