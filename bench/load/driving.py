"""Runs an engine against the clock: requests arrive when due, and the times of their tokens are recorded."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from bench.common.pair import Pair
from jetspec_jax import DecodeWeights, SamplingParams
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.planning import plan_engine
from jetspec_jax.engine.request import Request


@dataclass(eq=False)
class TimedRequest:
    """A request and the times of its tokens, in seconds after the start of the clock.

    Attributes:
        due: The arrival time.
        request: The request.
        deliveries: The time and the number of tokens so far, for every delivery of tokens.
    """

    due: float
    request: Request
    deliveries: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        """Seconds from the arrival time to the first token; None without tokens."""
        return self.deliveries[0][0] - self.due if self.deliveries else None

    @property
    def decode_time(self) -> float:
        """Seconds from the first token to the last."""
        return self.deliveries[-1][0] - self.deliveries[0][0] if self.deliveries else 0.0

    def gaps(self, start: float = 0.0, end: float = np.inf) -> list[float]:
        """Seconds between deliveries, for all whose later delivery is between ``start`` and ``end``."""
        times = [at for at, _ in self.deliveries]
        return [after - before for before, after in itertools.pairwise(times) if start <= after <= end]


@dataclass
class Spent:
    """Seconds of the engine's thread, with one entry per dispatch.

    Attributes:
        launch: Scheduling and launching.
        wait: Waiting for the device.
        collect: Fetching the records and delivering tokens.
        thread: The thread's processor time, without the wait.
        live: The number of decoding slots.
        rounds: The most rounds of the dispatch.
    """

    launch: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    collect: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    @property
    def host(self) -> list[float]:
        """Seconds of each dispatch on the host, during which the device may be idle."""
        return [launch + collect for launch, collect in zip(self.launch, self.collect, strict=True)]


class Load:
    """An engine for many requests, driven by the clock."""

    def __init__(
        self,
        pair: Pair,
        settings: TreeSettings,
        *,
        slots: int,
        capacity: int,
        num_pages: int | None = None,
        implementation: str | None = None,
        chunks: tuple[tuple[int, int], ...] | None = None,
        **many: Any,
    ):
        """Makes the engine, which measures its rounds, and compiles its programs.

        Args:
            pair: The models.
            settings: The tree settings.
            slots: The number of slots.
            capacity: Tokens per slot.
            num_pages: Pages of all slots together; None is enough for full slots.
            implementation: The implementation of tree attention.
            chunks: Shapes of prompt chunks; None is the device's default.
            **many: Arguments of `EnginePlan.for_many`.
        """
        target, head = pair
        plain = settings.budget == 1
        plan = plan_engine(
            target.config,
            None if plain else head.config,
            settings,
            target.dtype,
            slots=slots,
            capacity=capacity,
            num_pages=num_pages,
            implementation=implementation,
            chunks=chunks,
            mesh=target.mesh,
        ).for_many(**many)
        self.pair, self.settings = pair, settings
        self.engine = Engine(plan, DecodeWeights(target.weights, None if plain else head.weights))
        self.begun = time.monotonic()
        self.spent = Spent()
        self.engine.compiler.compile(self.engine.runner.programs([]))

    @property
    def now(self) -> float:
        """Seconds since the start of the clock."""
        return time.monotonic() - self.begun

    def begin(self) -> None:
        """Restarts the clock, and clears the recorded times."""
        self.begun, self.spent = time.monotonic(), Spent()

    def request(
        self, prompt: Sequence[int], params: SamplingParams, due: float | None = None
    ) -> TimedRequest:
        """A timed request, not yet submitted to the engine."""
        target, plan = self.pair.target, self.engine.plan
        [made] = check_request(target, list(prompt), params).requests(self.settings, plan.decoder)
        timed = TimedRequest(self.now if due is None else due, made)
        made.on_update = lambda: timed.deliveries.append((self.now, len(made.tokens)))
        return timed

    def admit(self, prompt: Sequence[int], params: SamplingParams, due: float | None = None) -> TimedRequest:
        """Submits a request now; its arrival time may be earlier."""
        timed = self.request(prompt, params, due)
        self.engine.admit(timed.request)
        return timed

    def step(self, most_rounds: int | None = None) -> None:
        """Launches as many dispatches as may be in flight, collects the oldest, and records their times.

        Each has at most ``most_rounds`` rounds.
        """
        engine = self.engine
        began, worked = time.perf_counter(), time.thread_time()
        while engine.has_room and engine.launch(most_rounds):
            pass
        launched, launch_work = time.perf_counter(), time.thread_time() - worked
        flight = engine.runner.in_flight[0]
        jax.block_until_ready((flight.records, flight.last))
        waited, worked = time.perf_counter(), time.thread_time()
        engine.collect()
        spent = self.spent
        spent.collect.append(time.perf_counter() - waited)
        spent.thread.append(launch_work + time.thread_time() - worked)
        spent.launch.append(launched - began)
        spent.wait.append(waited - launched)
        spent.live.append(len(flight.batch.live))
        spent.rounds.append(flight.batch.rounds)

    def until(self, enough: Callable[[], bool]) -> None:
        """Runs dispatches until ``enough()`` is true.

        Raises:
            RuntimeError: All requests have ended before that.
        """
        while not enough():
            if not self.engine.busy:
                raise RuntimeError("all requests have ended before the awaited event")
            self.step()

    def clear(self) -> None:
        """Cancels all requests, and frees their slots."""
        for request in self.engine.scheduler.requests:
            request.cancel()
        self.drain()
        self.engine.step()

    def drain(self) -> None:
        """Collects all dispatches in flight."""
        while self.engine.runner.in_flight:
            self.engine.collect()

    def close(self) -> None:
        """Frees the stores."""
        self.engine.close()

    def serve(self, requests: Sequence[TimedRequest], concurrency: int | None = None) -> float:
        """Serves requests to their ends, when due or ``concurrency`` at a time; returns the seconds."""
        self.begin()
        waiting, running = deque(requests), list[TimedRequest]()
        while waiting or self.engine.busy:
            running = [timed for timed in running if timed.request.open]
            while waiting and (
                waiting[0].due <= self.now if concurrency is None else len(running) < concurrency
            ):
                timed = waiting.popleft()
                if concurrency is not None:
                    timed.due = self.now
                self.engine.admit(timed.request)
                running.append(timed)
            if self.engine.busy:
                self.step()
            elif waiting:
                time.sleep(max(min(waiting[0].due - self.now, 0.01), 0.0))
        seconds = self.now
        self.drain()
        return seconds


def quantiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Median, 90th percentile and maximum in milliseconds; None without values."""
    if not len(seconds):
        return {"p50_ms": None, "p90_ms": None, "max_ms": None}
    middle, late = np.quantile(1e3 * np.asarray(seconds), [0.5, 0.9])
    return {"p50_ms": float(middle), "p90_ms": float(late), "max_ms": 1e3 * float(max(seconds))}
