"""Runs an engine by the clock: requests come when they are due, and what each sees of it is kept."""

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
class Followed:
    """A request, and what its caller sees of it; times in seconds after the beginning.

    Attributes:
        due: When it comes.
        request: The request.
        news: When it had got how many tokens.
    """

    due: float
    request: Request
    news: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token(self) -> float | None:
        """Seconds from when it was due to its first token; None if it has none."""
        return self.news[0][0] - self.due if self.news else None

    @property
    def decode_time(self) -> float:
        """Seconds from its first token to its last."""
        return self.news[-1][0] - self.news[0][0] if self.news else 0.0

    def gaps(self, start: float = 0.0, end: float = np.inf) -> list[float]:
        """Seconds between news of which the later one came between two moments."""
        times = [at for at, _ in self.news]
        return [after - before for before, after in itertools.pairwise(times) if start <= after <= end]


@dataclass
class Spent:
    """Where the time of the engine's thread went, one entry a dispatch, in seconds.

    Attributes:
        launch: To decide and to launch.
        wait: For the device.
        take: To fetch and to hand out.
        thread: Of this thread's own work, as the system counts it, without the wait.
        live: Slots that decoded.
        rounds: That ran, at most.
    """

    launch: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    take: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    live: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    @property
    def host(self) -> list[float]:
        """Seconds of each dispatch in which the device need not run."""
        return [one + other for one, other in zip(self.launch, self.take, strict=True)]


class Load:
    """An engine for many, driven by the clock."""

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
        """Makes the engine, which measures its rounds, and compiles what it serves with.

        Args:
            pair: The models.
            settings: Of its trees.
            slots: Requests that decode at the same time.
            capacity: Tokens of a slot.
            num_pages: Of all slots together; None is enough for all to be full.
            implementation: Of tree attention.
            chunks: Shapes of the forwards of prompts; None is the device's usual ones.
            **many: As for `EnginePlan.for_many`.
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
        self.engine.runner.compile_chunks()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.begun

    def begin(self) -> None:
        """Starts the clock anew."""
        self.begun, self.spent = time.monotonic(), Spent()

    def request(self, prompt: Sequence[int], params: SamplingParams, due: float | None = None) -> Followed:
        """A request that is followed; it has not come yet."""
        target, plan = self.pair.target, self.engine.plan
        [made] = check_request(target, list(prompt), params).requests(self.settings, plan.decoder)
        followed = Followed(self.now if due is None else due, made)
        made.told = lambda: followed.news.append((self.now, len(made.tokens)))
        return followed

    def admit(self, prompt: Sequence[int], params: SamplingParams, due: float | None = None) -> Followed:
        """A request that comes now, though it may have been due before."""
        followed = self.request(prompt, params, due)
        self.engine.admit(followed.request)
        return followed

    def step(self, most_rounds: int | None = None) -> None:
        """One dispatch, of at most so many rounds, whose parts are timed."""
        engine = self.engine
        began, worked = time.perf_counter(), time.thread_time()
        engine.launch(most_rounds)
        launched, own = time.perf_counter(), time.thread_time() - worked
        flight = engine.runner.in_flight
        assert flight is not None
        jax.block_until_ready((flight.records, engine.runner.state.active))
        waited, worked = time.perf_counter(), time.thread_time()
        engine.collect()
        spent = self.spent
        spent.take.append(time.perf_counter() - waited)
        spent.thread.append(own + time.thread_time() - worked)
        spent.launch.append(launched - began)
        spent.wait.append(waited - launched)
        spent.live.append(len(flight.batch.live))
        spent.rounds.append(flight.batch.rounds)

    def until(self, enough: Callable[[], bool]) -> None:
        """Dispatches until that is so.

        Raises:
            RuntimeError: All requests have ended before.
        """
        while not enough():
            if not self.engine.busy:
                raise RuntimeError("all requests have ended before what was waited for")
            self.step()

    def clear(self) -> None:
        """Takes all requests out, and frees their slots."""
        for request in self.engine.scheduler.requests:
            request.cancel()
        self.engine.step()

    def close(self) -> None:
        """Frees the stores."""
        self.engine.close()

    def serve(self, line: Sequence[Followed], concurrency: int | None = None) -> float:
        """Serves requests to their ends, when they are due or so many at a time; the seconds that it took."""
        self.begin()
        left, going = deque(line), list[Followed]()
        while left or self.engine.busy:
            going = [one for one in going if one.request.open]
            while left and (left[0].due <= self.now if concurrency is None else len(going) < concurrency):
                one = left.popleft()
                if concurrency is not None:
                    one.due = self.now
                self.engine.admit(one.request)
                going.append(one)
            if self.engine.busy:
                self.step()
            elif left:
                time.sleep(max(min(left[0].due - self.now, 0.01), 0.0))
        return self.now


def quantiles(seconds: Sequence[float] | np.ndarray) -> dict[str, float | None]:
    """Median, 90th percentile and largest, in milliseconds; None of nothing."""
    if not len(seconds):
        return {"p50_ms": None, "p90_ms": None, "max_ms": None}
    middle, late = np.quantile(1e3 * np.asarray(seconds), [0.5, 0.9])
    return {"p50_ms": float(middle), "p90_ms": float(late), "max_ms": 1e3 * float(max(seconds))}
