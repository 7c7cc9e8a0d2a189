"""Requests served to their ends by the one engine that a target keeps, or by those of all its copies."""

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.budget_policy import ROUNDS_TO_AN_END
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import Request
from jetspec_jax.progress import unseen


class Bar(tqdm):
    """A progress bar with a lock of its own: an interrupt may leave tqdm's held, and others waiting."""

    def __init__(self, *arguments: Any, **settings: Any):
        """As tqdm's, on a terminal alone."""
        super().__init__(*arguments, **{"disable": unseen(), **settings})


Bar.set_lock(threading.RLock())


def engine_for(target: Target, plan: EnginePlan, proposer_weights: Any = None) -> Engine:
    """The target's engine if it serves the plan, or another in its place; called under the keeper's lock.

    A target keeps one engine, so that two sets of stores do not coexist: one that is broken, or idle and not
    fit to serve, goes before the next is made. While open streams hold the engine, those whom it can serve
    share it, and others get an engine of their own for as long as they keep it. An engine that stands serves
    all that fit it, and takes the place of one that streams hold.

    Args:
        target: The target.
        plan: What is needed.
        proposer_weights: Parameters of the plan's proposer.

    Raises:
        DeviceMemoryError: The device cannot hold the engine; the next call makes what worked before anew.
    """
    weights = DecodeWeights(target.weights, None if plan.decoder.proposer is None else proposer_weights)
    kept: Engine | None = target.keeper.engine
    if kept is not None and kept.busy and not kept.broken:
        same = kept.plan.has_trees_of(plan) and kept.weights.proposer is weights.proposer
        fits = kept.plan.serves(plan) if plan.stands else kept.plan.size.capacity >= plan.size.capacity
        if same and fits:
            return kept
        made = Engine(plan, weights)
        if plan.stands:
            target.keeper.engine = made  # streams hold the one that they have
        return made
    if kept is not None:
        fits = kept.plan.serves(plan) and kept.weights.proposer is weights.proposer
        if fits and not kept.broken:
            return kept
        kept.close()
    target.keeper.engine = kept = None  # its stores go before others are made
    target.keeper.engine = kept = Engine(plan, weights)
    return kept


#: A progress bar on a terminal, if it takes a while.
BAR = functools.partial(Bar, delay=2, miniters=0, leave=False)


class Group(NamedTuple):
    """Devices with a copy of the models.

    Attributes:
        target: The target there.
        head: The draft head there; None if there is none.
    """

    target: Target
    head: Head | None

    @property
    def work(self) -> int:
        """Requests that wait or run in the engine that the target keeps."""
        kept: Engine | None = self.target.keeper.engine
        return 0 if kept is None or kept.broken else len(kept.scheduler.requests)

    def driver(self, plan: EnginePlan) -> Any:
        """The driver that serves whoever comes with such an engine; None if there is none."""
        reference, mesh = self.target.keeper.driver, self.target.mesh
        driver = None if reference is None or spans(mesh) else reference()
        return driver if driver is not None and driver.serves(self, plan.on(mesh)) else None

    def engine(self, plan: EnginePlan) -> Engine:
        """As `engine_for`, for a plan of any group's."""
        weights = None if self.head is None else self.head.weights
        return engine_for(self.target, plan.on(self.target.mesh), weights)


def groups_of(target: Target, head: Head | None) -> list[Group]:
    """A target and its head, which `check_models` has checked, and all their copies."""
    heads = (None,) * len(target.meshes) if head is None else (head, *head.copies)
    return [Group(*own) for own in zip((target, *target.copies), heads, strict=True)]


def least_busy(groups: Sequence[Group], count: int) -> list[Group]:
    """So many of some groups, or all: those with the least work, in their order."""
    chosen = sorted(range(len(groups)), key=lambda number: groups[number].work)[:count]
    return [groups[number] for number in sorted(chosen)]


def serve(
    target: Target,
    head: Head | None,
    plan: EnginePlan,
    requests: Sequence[Request],
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """Serves requests to their ends, with the target and its copies, no more of them than requests.

    Where drivers serve others with the same engines, they serve these too, and all run together.

    Args:
        target: The target.
        head: Its draft head, or None.
        plan: Of the engine of each.
        requests: The requests.
        bar: As for `complete`.

    Raises:
        RuntimeError: As `complete`.
        DeviceMemoryError: As `engine_for`.
    """
    groups = least_busy(groups_of(target, head), len(requests))
    drivers = [group.driver(plan) for group in groups]
    if requests and None not in drivers:
        return _complete(_Driven(drivers), requests, target.tokenizer, bar)
    return _serve_locked(groups, groups, plan, requests, bar) if requests else []


def _serve_locked(
    groups: Sequence[Group],
    unlocked: Sequence[Group],
    plan: EnginePlan,
    requests: Sequence[Request],
    bar: Callable[..., Any] | None,
) -> list[Completion]:
    """Serves requests with all locks held: one inside of the other, always in the same order."""
    if unlocked:
        keeper = unlocked[0].target.keeper
        with keeper.line, keeper.lock:
            return _serve_locked(groups, unlocked[1:], plan, requests, bar)
    engines = [group.engine(plan) for group in groups]
    return complete(engines, requests, groups[0].target.tokenizer, bar)


def complete(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    tokenizer: Any,
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """Serves requests to their ends: first come, first served, by whichever engine has a free slot.

    Args:
        engines: The engines, at least one; they may serve others at the same time.
        requests: The requests.
        tokenizer: A transformers tokenizer, or None.
        bar: What makes a progress bar, called as tqdm is; None for no bar.

    Raises:
        RuntimeError: An engine was closed meanwhile.
    """
    return _complete(_Turns(engines), requests, tokenizer, bar)


def _complete(
    runs: "_Turns | _Driven", requests: Sequence[Request], tokenizer: Any, bar: Callable[..., Any] | None
) -> list[Completion]:
    outputs = [Output(request, tokenizer) for request in requests]
    left, line = outputs, deque(requests)
    try:
        made = None if bar is None else bar(total=len(requests), unit=" completions")
        with contextlib.nullcontext() if made is None else contextlib.closing(made):
            while left:
                if runs.collect():
                    going_on = _read(left)
                    if isinstance(made, Bar):  # so that a single long one is seen to go on
                        tokens = sum(len(each.token_ids) for each in outputs)
                        made.set_postfix_str(f"{tokens} tokens", refresh=False)
                    if made is not None:
                        made.update(len(left) - len(going_on))
                    left = going_on
                if left:
                    runs.launch(line)
    finally:
        # After an interrupt the next call must not go on with these.
        for request in requests:
            request.cancel()
    return [output.completion() for output in outputs]


class _Turns:
    """Engines that the thread of a call runs, one after the other."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines, self._turns = engines, itertools.cycle(engines)

    def collect(self) -> bool:
        """Goes on to the next engine; whether there may be news of it."""
        self._engine = next(self._turns)
        if not self._engine.runner.in_flight:
            return False
        self._engine.collect()
        return True

    def launch(self, line: deque[Request]) -> None:
        """Has the engine do what it has to do, after it was given some of those in line."""
        _seat(line, self._engines)
        _launch(self._engine, self._engines)


class _Driven:
    """Engines that drivers run: a call has no more requests there than slots, so others come in between."""

    def __init__(self, drivers: Sequence[Any]):
        self._seated: list[tuple[Any, list[Request]]] = [(driver, []) for driver in drivers]
        self._news = threading.Event()

    def collect(self) -> bool:
        """Waits for news."""
        if not any(own for _, own in self._seated):
            return False
        self._news.wait()
        self._news.clear()
        return True

    def launch(self, line: deque[Request]) -> None:
        """Submits some of those in line."""
        for _, own in self._seated:
            own[:] = [request for request in own if request.open]
        while line:
            driver, own = max(self._seated, key=lambda each: each[0].slots - len(each[1]))
            if len(own) == driver.slots:
                return
            own.append(line.popleft())
            own[-1].told = self._news.set
            driver.submit(own[-1:], guests=True)


def _read(outputs: Sequence[Output]) -> list[Output]:
    """Takes in what requests have got; those that go on."""
    for output in outputs:
        output.update()
        if output.finish_reason is not None:
            output.request.cancel()  # a stop string is nothing that an engine knows of
    return [output for output in outputs if output.finish_reason is None]


def _seat(line: deque[Request], engines: Sequence[Engine]) -> None:
    """Hands over those in front, each to the engine with the most free slots; one alone has its own queue."""
    while line:
        engine = max(engines, key=lambda each: each.scheduler.room)
        if len(engines) > 1 and engine.scheduler.room < 1:
            return
        engine.admit(line[0])
        line.popleft()


def _launch(engine: Engine, engines: Sequence[Engine]) -> None:
    """Launches what an engine has to do, if it has; one that was closed says so."""
    if not engine.runner.in_flight and (engine.busy or engine.broken):
        # Nobody knows which of several ends first, and the host waits for one after the other.
        alone = sum(each.busy for each in engines) == 1
        engine.launch(None if alone else ROUNDS_TO_AN_END, timed=len(engines) == 1)


def compile_chunks(target: Target) -> None:
    """Compiles the forwards of prompts of the engines that a target and its copies keep."""
    for own in (target, *target.copies):
        with own.keeper.line, own.keeper.lock:
            kept: Engine | None = own.keeper.engine
            if kept is not None and not kept.broken:
                kept.runner.compile_chunks()


def take_engine(target: Target, plan: EnginePlan, proposer_weights: Any = None) -> Engine:
    """As `engine_for`, for one caller alone, who gives the engine back by `give_back`.

    An engine that stands is never taken: those to come find it, and the caller's is made beside it.
    """
    kept: Engine | None = target.keeper.engine
    if kept is not None and not kept.broken and (kept.busy or kept.plan.stands):
        return Engine(plan, DecodeWeights(target.weights, proposer_weights))
    engine = engine_for(target, plan, proposer_weights)
    target.keeper.take()
    return engine


def give_back(target: Target, engine: Engine) -> None:
    """Keeps an engine that `take_engine` gave; where the target has another by now, it is freed."""
    if spans(target.mesh):
        engine.close()  # processes may drop a trace at different times, and must keep the same engine
        return
    # Also called while a dropped trace is finalised, which must wait for no lock.
    if engine.broken or not target.keeper.offer(engine):
        engine.close()
