"""Runs the methods of `python -m bench decode` in turn, and keeps what they did and how long it took.

A machine has slow spells of seconds. What is compared by the percent takes turns that are shorter than those.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.common.methods import Method
from bench.common.timing import peak_bytes
from bench.common.workload import Workload
from jetspec_jax import Completion, DecodeWeights, Head, Target
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.memory import check_engine_memory, state_bytes
from jetspec_jax.engine.planning import EnginePlan, plan_engine
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.serving import complete, groups_of
from jetspec_jax.engine.size import default_capacity, slots_for
from jetspec_jax.engine.stream import STREAM_ROUNDS

# Enough tokens for one round of every kind to compile.
WARM_UP_TOKENS = 4
# Prompts of a turn, for each slot: few, and enough that the slots are seldom idle at its end.
PROMPTS_PER_TURN = 8


@dataclass
class MethodRuns:
    """What a method did at one temperature.

    Attributes:
        completions: Of all prompts, in the first timed run.
        seconds: Of each timed run of all prompts.
        tokens: That each of them generated: in low precision two runs of an algorithm that chooses budgets
            need not agree.
        prompt_seconds: Of each prompt, in each timed run; empty where prompts decode at the same time.
        first_token_seconds: From the submission of a prompt to its first token, while nothing else runs; of
            every prompt, in every run. As in a stream, the first dispatch's rounds are in it.
        peak_bytes: The most that the process had in use on the device by the time the method had first run;
            None where the device does not say.
    """

    completions: list[Completion] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_seconds: list[list[float]] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


class Bench:
    """Target, draft head, and all that the methods have in common."""

    def __init__(
        self,
        target: Target,
        head: Head,
        works: Mapping[float, Workload],
        *,
        batch: int,
        implementation: str | None,
        together: bool = False,
    ):
        """Compiles nothing yet.

        Args:
            target: The target.
            head: The draft head.
            works: By temperature.
            batch: Most prompts that decode at the same time, with each copy of the models.
            implementation: Of tree attention.
            together: Whether the device holds the stores of all methods at once, which then take turns of a
                few prompts; else of one, which has all prompts in its turn.
        """
        self._target, self._head, self._works = target, head, works
        self._implementation, self._together = implementation, together
        self._groups = groups_of(target, head)
        most = max(len(work.ids) for work in works.values())
        self._slots = slots_for(-(-most // len(self._groups)), batch)
        # One for all temperatures: another capacity is another program.
        need = max(
            check_request(target, ids, own).tokens
            for work in works.values()
            for ids, own in zip(work.ids, work.params, strict=True)
        )
        self._capacity = default_capacity(target.config, need)

    def check(self, methods: Sequence[Method]) -> None:
        """Finds out, before anything is compiled, whether the device can hold what it has to hold of methods.

        Raises:
            DeviceMemoryError: It cannot; the message names the method.
        """
        largest = max(methods, key=lambda method: method.settings.budget)
        held = 0
        for nth, method in enumerate(methods if self._together else [largest]):
            plan = self._plan(method)
            before = {"stores of the methods before it": held} if held else {}
            try:
                check_engine_memory(plan, lambda _, before=before: before)
            except DeviceMemoryError as error:
                beside = f", beside the {nth} before it" if nth else ""
                raise DeviceMemoryError(f"{method.name}{beside}: {error}") from error
            held += state_bytes(plan)

    def measure(
        self, methods: Sequence[Method], repeats: int, step: Callable[[str, int], None]
    ) -> Iterator[dict[tuple[Method, float], MethodRuns]]:
        """Measures methods in turn, so that a slow moment of the machine falls on all of them alike.

        Args:
            methods: The methods.
            repeats: Timed runs of each at each temperature.
            step: Called with what comes next, a method's compilation or its turn, and the turn's prompts.

        Yields:
            What was measured so far: the same each time, with one more timed run of every method.
        """
        found = {(method, temperature): MethodRuns() for method in methods for temperature in self._works}
        for method in methods:
            step(f"compile {method.name}", 0)
            peak = self._warm_up(method)
            for temperature in self._works:
                found[method, temperature].peak_bytes = peak
        # Else two sets of stores may not fit the device.
        groups = [methods] if self._together else [[method] for method in methods]
        for _ in range(repeats):
            for group in groups:
                engines = {method: self._engines(method) for method in group}
                for temperature in self._works:
                    self._run(engines, temperature, found, step)
                del engines
            yield found

    def _run(
        self,
        engines: Mapping[Method, tuple[Engine, ...]],
        temperature: float,
        found: Mapping[tuple[Method, float], MethodRuns],
        step: Callable[[str, int], None],
    ) -> None:
        """One timed run of all prompts with each method's engines, then the first token of each alone."""
        work = self._works[temperature]
        seconds: dict[Method, list[float]] = {method: [] for method in engines}
        completions: dict[Method, list[Completion]] = {method: [] for method in engines}
        at_a_time = self._slots * len(self._groups)
        together = PROMPTS_PER_TURN * at_a_time if self._together else len(work.ids)
        for part in work.parts(1 if at_a_time == 1 else together):
            for method, own in engines.items():
                step(f"{method.name}, T = {temperature:g}", len(part.ids))
                started = time.perf_counter()
                completions[method] += self._complete(own, method, part)
                seconds[method].append(time.perf_counter() - started)
        for method, (engine, *_) in engines.items():
            measured = found[method, temperature]
            measured.seconds.append(sum(seconds[method]))
            if at_a_time == 1:
                measured.prompt_seconds.append(seconds[method])
            measured.tokens.append(sum(len(completion.token_ids) for completion in completions[method]))
            measured.completions = measured.completions or completions[method]
            measured.first_token_seconds += self._first_tokens(engine, method, work)

    def _plan(self, method: Method) -> EnginePlan:
        return plan_engine(
            self._target.config,
            None if method.settings.budget == 1 else self._head.config,
            method.settings,
            self._target.dtype,
            slots=self._slots,
            capacity=self._capacity,
            implementation=self._implementation,
            mesh=self._target.mesh,
        )

    def _engines(self, method: Method) -> tuple[Engine, ...]:
        """One for each copy of the models."""
        plan = self._plan(method)
        return tuple(
            Engine(plan.on(target.mesh), DecodeWeights(target.weights, head and head.weights))
            for target, head in self._groups
        )

    def _warm_up(self, method: Method) -> int | None:
        """Compiles all that a method runs; the most bytes that have been in use."""
        [work, *_] = next(iter(self._works.values())).parts(len(self._groups))
        most = min(WARM_UP_TOKENS, work.params[0].max_tokens or WARM_UP_TOKENS)
        params = [replace(own, max_tokens=most, ignore_eos=True) for own in work.params]
        work = replace(work, params=params)
        engines = self._engines(method)
        for engine in engines:
            engine.runner.compile_chunks()
        for _ in range(2):  # the second frees the slot of the first, which is a program too
            self._complete(engines, method, work)
        return peak_bytes()

    def _complete(self, engines: Sequence[Engine], method: Method, work: Workload) -> list[Completion]:
        return complete(engines, self._requests(engines[0], method, work), self._target.tokenizer)

    def _requests(self, engine: Engine, method: Method, work: Workload) -> list[Request]:
        requests = []
        for ids, params, hints in zip(work.ids, work.params, work.routing, strict=True):
            checked = check_request(self._target, ids, params, capacity=self._capacity)
            requests += checked.requests(method.settings, engine.plan.decoder, hints)
        return requests

    def _first_tokens(self, engine: Engine, method: Method, work: Workload) -> Iterator[float]:
        """Seconds to the first token of each prompt, one after another."""
        for request in self._requests(engine, method, work):
            started = time.perf_counter()
            engine.admit(request)
            while not request.tokens:
                engine.step(STREAM_ROUNDS)
            yield time.perf_counter() - started
            request.cancel()
