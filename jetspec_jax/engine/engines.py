"""The engines of a target, its draft head and their copies, and callers that wait for requests."""

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.peers import make_exchange
from jetspec_jax.device.processes import is_first
from jetspec_jax.engine.batch import Kind
from jetspec_jax.engine.engine import Engine, EngineClosed, State
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.plan import EnginePlan, with_slots_that_fit
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.stats import EngineStats
from jetspec_jax.engine.worker import Workers, follow
from jetspec_jax.progress import next_of, terminal_bar


class Engines:
    """One engine for each copy of the models, made when a request needs it; each request goes to one.

    After an error of its engine, the next request makes a new one. If slots are too short for a request, or
    pages too few, idle engines are made anew.
    """

    def __init__(
        self,
        target: Target,
        head: Head | None,
        plan: EnginePlan,
        *,
        longer_slots: bool = False,
        proposer_weights: Any = None,
        make: Callable[..., Engine] = Engine,
    ):
        """Engines without stores, of models that `check_models` has checked.

        The ``plan`` is that of each engine, on any of the meshes. With ``longer_slots`` slots become longer
        if a request needs it; else it is refused. A proposer other than the head's has ``proposer_weights``.
        """
        self.target, self.head = target, head
        #: The plan of the engines. The others have the slots that the memory does not hold, too.
        self.plan = self._first = self._wanted = plan
        self._fitted = False
        #: Whose engines they are, for errors.
        self.owner = "LLM"
        self.longer_slots, self._make = longer_slots, make
        self._proposer_weights = proposer_weights
        #: The other processes that share the models.
        self.workers = Workers(target.mesh)
        self._engines: list[Engine] = []
        self._past, self.closed = EngineStats(), False
        self._lock = threading.RLock()  # held while engines are made, closed or given requests

    @property
    def follows(self) -> bool:
        """Whether this process follows process 0."""
        return self.workers.there and not is_first()

    @property
    def failed(self) -> bool:
        """Whether an error has closed an engine, and no request has made a new one."""
        return any(engine.failed for engine in self._engines)

    @property
    def warm(self) -> bool:
        """Whether there are engines, which compile nothing in the background."""
        return bool(self._engines) and not any(engine.left for engine in self._engines)

    def engines(self, requests: Sequence[Request] = ()) -> list[Engine]:
        """The engines, made unless there are any, or anew if these have failed or the requests need it.

        Raises as `check_open`, and ValueError if the requests need longer slots while others are served.
        """
        with self._lock:
            self.check_open()
            copies = len(self.target.meshes)
            busy = any(each.open_requests for each in self._engines if each.state is not State.CLOSED)
            # After an error as at first: longer slots may have been too much for the memory.
            wanted = self._first if self.failed and not busy else self._wanted
            plan = wanted.holding(requests, copies) if self.longer_slots else wanted
            if busy and plan.size.capacity > wanted.size.capacity:
                need = max(request.most_tokens for request in requests)
                raise ValueError(
                    f"a request needs {need} tokens, and the slots have {wanted.size.capacity}, of an engine "
                    f"that serves other requests now: set capacity={plan.size.capacity} when the models are "
                    "loaded, or wait until the others have ended"
                )
            if plan != self._wanted and not busy:
                self._drop()
                self.plan = self._wanted = plan
                self._fitted = self.workers.there  # they would have to ask for the free memory too
            if not self._engines and not self._fitted:
                self.fit()
            self._engines = self._engines or [self._make_one(number) for number in range(copies)]
            for number, engine in enumerate(self._engines):
                if engine.state is State.CLOSED:
                    self._count(engine)
                    self._engines[number] = self._make_one(number)
            return list(self._engines)

    def fit(self, plan: EnginePlan | None = None) -> None:
        """Sets a plan, by default with the slots that fit, in all processes; else the first request does."""
        self.plan, self._fitted = plan or with_slots_that_fit(self._wanted, self.target.meshes), True

    def submit(self, requests: Sequence[Request], most_waiting: int | None = None) -> list[Engine]:
        """Deals requests among the engines, each to one with the fewest requests; returns the engine of each.

        Raises QueueFull if more than ``most_waiting`` would wait for a slot of the engine, or as `engines`.
        """
        places: dict[Request, Engine] = {}
        with self._lock:  # no other caller may close an engine before it has the requests
            while len(places) < len(requests):
                engines = self.engines(requests)
                counts = [engine.open_requests for engine in engines]
                dealt: list[list[Request]] = [[] for _ in engines]
                for request in requests:
                    if request not in places:
                        fewest = counts.index(min(counts))
                        counts[fewest] += 1
                        dealt[fewest].append(request)
                for engine, mine in zip(engines, dealt, strict=True):
                    with contextlib.suppress(EngineClosed):  # an error has closed it just now: dealt again
                        if mine:
                            engine.submit(mine, most_waiting)
                            places |= dict.fromkeys(mine, engine)
        return [places[request] for request in requests]

    def warm_up(self, kinds: Sequence[Kind], **settings: Any) -> None:
        """See `Engine.warm_up`."""
        for engine in self.engines():
            engine.warm_up(kinds, **settings)

    def stats(self) -> EngineStats:
        """Statistics of all engines together, past ones included; from any thread, without waiting."""
        engines, missing = self._engines, len(self.target.meshes) - len(self._engines)
        pages = EngineStats(pages=missing * self.plan.size.num_pages)
        return sum((engine.stats() for engine in engines), self._past + pages)

    def compiling(self) -> set[str]:
        """Kinds of programs that requests wait for."""
        return set().union(*(engine.compiling() for engine in self._engines))

    def follow(self) -> None:
        """Runs what process 0 runs, until it closes or ends; see `LLM.follow`."""
        if not self.workers.there:
            raise ValueError("this process shares its models with no other process, so it is not a worker")
        if is_first():
            raise ValueError("process 0 serves requests; call follow() in the other processes only")
        follow(self.plan, self._weights(0))

    def close(self) -> None:
        """Closes the engines for good: their requests fail, and their stores are freed."""
        with self._lock:
            if not self.closed and not self.follows:
                self.closed = True
                self._drop()
                self.workers.send("end")

    def check_open(self) -> None:
        """Raises ValueError if this process follows another, and RuntimeError if the owner was closed."""
        if self.follows:
            raise ValueError("requests go to process 0; this process is a worker: call follow()")
        if self.closed:
            raise RuntimeError(f"this {self.owner} is closed")

    def _drop(self) -> None:
        engines, self._engines = self._engines, []
        for engine in engines:
            self._count(engine)

    def _count(self, engine: Engine) -> None:
        engine.close()
        self._past += replace(engine.stats(), pages=0, bucket=0, live_slots=0, programs_left=0)

    def _make_one(self, number: int) -> Engine:
        plan = self.plan.on(self.target.meshes[number])
        return self._make(plan, self._weights(number))

    def _weights(self, number: int) -> DecodeWeights:
        target = (self.target, *self.target.copies)[number]
        exchange = make_exchange(self.target.meshes[number], target.config.hidden_size, self.plan.dtype)
        if self.head is None:
            return DecodeWeights(target.weights, self._proposer_weights, exchange)
        return DecodeWeights(target.weights, (self.head, *self.head.copies)[number].weights, exchange)


def complete(
    engines: Engines,
    requests: Sequence[Request],
    tokenizer: Any,
    bar: Callable[..., Any] | None = terminal_bar,
) -> list[Completion]:
    """Serves requests to their ends. The ``bar`` is called like tqdm; None is no bar.

    Raises an error of a request, or of the engine; the other requests are cancelled.
    """
    running = {request: Output(request, tokenizer) for request in requests}
    outputs, news = list(running.values()), queue.SimpleQueue[Request]()
    for request in requests:
        request.on_update = functools.partial(news.put, request)
    progress, tokens = None if bar is None else bar(total=len(requests), unit=" completions"), 0
    try:
        for engine in set(engines.submit(requests)):
            engine.check_can_wait()
        while running:
            request = news.get() if bar is None else next_of(news, engines.compiling)
            if (output := running.get(request)) is None:
                continue
            tokens -= len(output.token_ids)
            output.update()
            tokens += len(output.token_ids)
            if isinstance(progress, tqdm):  # shows progress of a single long completion
                progress.set_postfix_str(f"{tokens} tokens", refresh=False)
            if output.finish_reason is not None:
                request.cancel()  # engines do not know stop strings
                del running[request]
            if progress is not None:
                progress.update(int(request not in running))
    finally:
        for request in requests:  # after an error, nobody waits for the others
            request.cancel()
        if progress is not None:
            progress.close()
    return [output.completion() for output in outputs]


class Stream(Iterator[str]):
    """Pieces of text as they are accepted; tokens after the end are discarded.

    A stream that is closed, interrupted, left as a context, or dropped before its end frees its slot. It may
    be iterated and closed from any thread.

    Attributes:
        completion: The whole completion once the stream has ended, None before.
    """

    def __init__(self, engines: Engines, request: Request, tokenizer: Any):
        """Submits a request."""
        self.completion: Completion | None = None
        self._output, self._sent = Output(request, tokenizer), 0
        self._news = queue.SimpleQueue[None]()
        self._lock, self._closed = threading.RLock(), False
        request.on_update = functools.partial(self._news.put, None)
        self._engine: Engine | None = engines.submit([request])[0]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> str:
        """The next piece of text, never empty; raises an error of the request, or of the engine."""
        try:
            with self._lock:
                return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> str:
        output = self._output
        while not self._closed:
            output.update()
            if output.finish_reason is not None:
                self.completion = output.completion()
            if len(output.settled_text) > self._sent:
                sent, self._sent = self._sent, len(output.settled_text)
                return output.settled_text[sent:]
            if self.completion is not None:
                break
            if (engine := self._engine) is not None:
                engine.check_can_wait()
            del engine
            # Another thread may close the stream at any moment.
            next_of(self._news, lambda: engine.compiling() if (engine := self._engine) else ())
        raise StopIteration

    def close(self) -> None:
        """Ends the request, whose slot and pages are freed; does not wait."""
        self._closed, self._engine = True, None  # an ended stream keeps no engine
        self._output.request.cancel()
        self._news.put(None)  # a thread that iterates ends
