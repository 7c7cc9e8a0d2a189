"""Serves requests by the clock: they arrive when due, and the times of their tokens are recorded."""

import itertools
import queue
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from bench.common.pair import Pair
from jetspec_jax import DecodeWeights, SamplingParams
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.admission import check_request
from jetspec_jax.engine.batch import Batch, Kind
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.plan import EnginePlan, plan_engine
from jetspec_jax.engine.request import Request


@dataclass(eq=False)
class TimedRequest:
    """A request and the times of its arrival and tokens, in seconds after the start of the clock.

    Attributes:
        deliveries: The time and the number of tokens so far, for every delivery of tokens.
    """

    due: float
    request: Request
    deliveries: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        """Seconds from the arrival time to the first token; None without tokens."""
        return self.deliveries[0][0] - self.due if self.deliveries else None

    def tokens(self, end: float) -> int:
        """Number of tokens until ``end``."""
        return next((count for at, count in reversed(self.deliveries) if at <= end), 0)

    def gaps(self, start: float = 0.0) -> list[float]:
        """Seconds between deliveries, for all whose later delivery is not before ``start``."""
        times = [at for at, _ in self.deliveries]
        return [after - before for before, after in itertools.pairwise(times) if start <= after]


@dataclass
class Spent:
    """Seconds of the engine's thread, with one entry per dispatch.

    Attributes:
        launch: Taking commands, scheduling and launching.
        wait: Waiting for the device.
        collect: Fetching the records and handing out tokens.
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


class TimedEngine(Engine):
    """An engine that times its thread.

    Attributes:
        spent: The recorded times.
        most_rounds: Most rounds of a dispatch; None leaves them to the policy.
    """

    def __init__(self, plan: EnginePlan, weights: DecodeWeights):
        """See `Engine`."""
        super().__init__(plan, weights)
        self.spent = Spent()
        self.most_rounds: int | None = None
        # The end of the last dispatch or pause, and the processor time until then.
        self._since = self._worked = 0.0

    def _run(self, command: Any) -> bool:
        self._since, self._worked = time.perf_counter(), time.thread_time()
        return super()._run(command)

    def _launch(self, batch: Batch) -> None:
        if self.most_rounds is not None:
            batch = batch._replace(rounds=min(batch.rounds, self.most_rounds))
        super()._launch(batch)

    def _collect(self) -> list[Request]:
        flight, spent = self.runner.in_flight[0], self.spent
        launched, work = time.perf_counter(), time.thread_time() - self._worked
        jax.block_until_ready((flight.records, flight.last))
        waited, worked = time.perf_counter(), time.thread_time()
        served = super()._collect()
        spent.launch.append(launched - self._since)
        self._since, self._worked = time.perf_counter(), time.thread_time()
        spent.wait.append(waited - launched)
        spent.collect.append(self._since - waited)
        spent.thread.append(work + self._worked - worked)
        spent.live.append(len(flight.batch.live))
        spent.rounds.append(flight.batch.rounds)
        return served


class Load:
    """An engine for many requests, and the clock by which they arrive."""

    def __init__(self, pair: Pair, settings: TreeSettings, **plan: Any):
        """Makes the engine, and compiles its programs; ``plan`` has arguments of `plan_engine`."""
        target, head = pair
        plain = settings.budget == 1
        planned = plan_engine(
            target.config, None if plain else head.config, settings, target.dtype, mesh=target.mesh, **plan
        )
        self.pair, self.settings = pair, settings
        self.engine = TimedEngine(planned, DecodeWeights(target.weights, None if plain else head.weights))
        self.begun = time.monotonic()
        # Submitted requests that have not ended, as far as their updates were read.
        self._running: set[TimedRequest] = set()
        self._updates = queue.SimpleQueue[TimedRequest]()
        self.engine.warm_up([Kind()])

    @property
    def now(self) -> float:
        """Seconds since the start of the clock."""
        return time.monotonic() - self.begun

    @property
    def spent(self) -> Spent:
        """The engine's recorded times."""
        return self.engine.spent

    def begin(self) -> None:
        """Restarts the clock, and clears the recorded times."""
        self.begun, self.engine.spent = time.monotonic(), Spent()

    def request(
        self, prompt: Sequence[int], params: SamplingParams, due: float | None = None
    ) -> TimedRequest:
        """A timed request, not yet submitted to the engine."""
        target, plan = self.pair.target, self.engine.plan
        [made] = check_request(target, list(prompt), params).requests(self.settings, plan.decoder)
        timed = TimedRequest(self.now if due is None else due, made)

        def update() -> None:
            timed.deliveries.append((self.now, len(made.tokens)))
            self._updates.put(timed)

        made.on_update = update
        return timed

    def submit(self, requests: Sequence[TimedRequest]) -> None:
        """Submits requests, all at once."""
        self._running.update(requests)
        self.engine.submit([timed.request for timed in requests])

    def admit(self, prompt: Sequence[int], params: SamplingParams, due: float | None = None) -> TimedRequest:
        """Submits a request now; its arrival time may be earlier."""
        timed = self.request(prompt, params, due)
        self.submit([timed])
        return timed

    def wait(self, timeout: float | None = None) -> None:
        """Waits for updates of requests, at most ``timeout`` seconds.

        Raises:
            Exception: A request's error.
        """
        try:
            updated = [self._updates.get(timeout=timeout)]
        except queue.Empty:
            return
        while not self._updates.empty():  # a dispatch updates many requests
            updated.append(self._updates.get())
        for timed in updated:
            if timed.request.error is not None:
                raise timed.request.error
            if timed.request.readable[1] is not None:
                self._running.discard(timed)

    def until(self, enough: Callable[[], bool]) -> None:
        """Waits until ``enough()`` is true, which is called after updates of requests.

        Raises:
            RuntimeError: All requests have ended before that.
        """
        while not enough():
            if not self._running:
                raise RuntimeError("all requests have ended before the awaited event")
            self.wait()

    def dispatches(self, count: int, most_rounds: int | None = None) -> None:
        """Waits for ``count`` more dispatches of at most ``most_rounds`` rounds."""
        self.engine.most_rounds = most_rounds
        enough = len(self.spent.rounds) + count
        self.until(lambda: len(self.spent.rounds) >= enough)
        self.engine.most_rounds = None

    def clear(self) -> None:
        """Cancels all requests, and waits for the batches in flight."""
        for timed in self._running:
            timed.request.cancel()
        self.engine.run(self._running.clear)
        while not self._updates.empty():
            self._updates.get()

    def close(self) -> None:
        """Frees the stores."""
        self.engine.close()

    def serve(
        self,
        requests: Iterable[TimedRequest],
        concurrency: int | None = None,
        seconds: float = np.inf,
    ) -> float:
        """Serves requests, when due or ``concurrency`` at a time; returns the seconds.

        After ``seconds`` the remaining requests are cancelled.
        """
        self.begin()
        coming = iter(requests)
        following = next(coming, None)
        while (following or self._running) and self.now < seconds:
            arrived: list[TimedRequest] = []
            while following and (
                following.due <= self.now
                if concurrency is None
                else len(self._running) + len(arrived) < concurrency
            ):
                if concurrency is not None:
                    following.due = self.now
                arrived.append(following)
                following = next(coming, None)
            if arrived:
                self.submit(arrived)
            self.wait(max(following.due - self.now, 0) if following and concurrency is None else None)
        ended = self.now
        self.clear()
        return ended


def quantiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Median, 90th percentile and maximum in milliseconds; None without values."""
    if not len(seconds):
        return {"p50_ms": None, "p90_ms": None, "max_ms": None}
    middle, late = np.quantile(1e3 * np.asarray(seconds), [0.5, 0.9])
    return {"p50_ms": float(middle), "p90_ms": float(late), "max_ms": 1e3 * float(max(seconds))}
