"""Serves the requests of a call to their ends, by the loops of a target and its copies."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.engine.call import Call, Flag
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.loop import EngineLoop, loop_for, wait
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.programs import Kind
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.worker import in_all_processes
from jetspec_jax.progress import unseen


class Bar(tqdm):
    """A bar on terminals with a separate lock: an interrupt may leave tqdm's held, and others waiting."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **{"disable": unseen(), **settings})


Bar.set_lock(threading.RLock())
#: A progress bar on a terminal, for long calls.
BAR = functools.partial(Bar, delay=2, miniters=0, leave=False)


class Group(NamedTuple):
    """Devices with a copy of the target, and of its draft head if there is one."""

    target: Target
    head: Head | None

    @property
    def loop(self) -> EngineLoop:
        """The loop of its target."""
        return loop_for(self.target)

    @property
    def weights(self) -> DecodeWeights:
        """The parameters of its engine."""
        return DecodeWeights(self.target.weights, None if self.head is None else self.head.weights)

    def call(self, plan: EnginePlan, requests: Sequence[Request] = (), **settings: Any) -> Call:
        """A call for these devices, from a plan for any group; the settings are those of `Call`."""
        return Call(self.loop, plan.on(self.target.mesh), self.weights, deque(requests), **settings)


def groups_of(target: Target, head: Head | None) -> list[Group]:
    """Groups of a target and its head, checked by `check_models`, and of all their copies."""
    heads = (None,) * len(target.meshes) if head is None else (head, *head.copies)
    return [Group(*models) for models in zip((target, *target.copies), heads, strict=True)]


def least_busy(groups: Sequence[Group], count: int) -> list[Group]:
    """At most ``count`` groups: those with the fewest requests, in their order."""
    chosen = sorted(range(len(groups)), key=lambda number: groups[number].loop.open_requests)[:count]
    return [groups[number] for number in sorted(chosen)]


def serve(
    target: Target,
    head: Head | None,
    plan: EnginePlan,
    requests: Sequence[Request],
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """Serves requests to their ends, with the target and its copies, at most one copy per request.

    Any engine with a free slot serves the next request. The ``bar`` is called like tqdm; None is no bar.

    Raises:
        DeviceMemoryError: The device cannot hold the engine; earlier calls still work.
    """
    groups = least_busy(groups_of(target, head), len(requests))
    if not groups:
        return []
    calls = [group.call(plan) for group in groups]
    work = functools.partial(_complete, calls, requests, target.tokenizer, bar)
    return in_all_processes(calls[0], "completions of prompts", work)


def complete(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    tokenizer: Any,
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """As `serve`, with the caller's engines, which serve no other call meanwhile.

    Raises:
        RuntimeError: An engine is broken.
    """
    loops = [EngineLoop(engine.plan.decoder.mesh, engine) for engine in engines]
    calls = [Call(loop, engine.plan, engine.weights) for loop, engine in zip(loops, engines, strict=True)]

    def work() -> list[Completion]:
        if any(engine.broken for engine in engines):  # known in process 0 only
            raise RuntimeError(LOST)
        return _complete(calls, requests, tokenizer, bar)

    try:
        return in_all_processes(calls[0], "completions by given engines", work)
    finally:
        for loop in loops:
            loop.settle()


def _complete(
    calls: Sequence[Call], requests: Sequence[Request], tokenizer: Any, bar: Callable[..., Any] | None
) -> list[Completion]:
    outputs = [Output(request, tokenizer) for request in requests]
    running, turns, queue, news = outputs, deque(calls), deque(requests), Flag()
    try:
        for request in requests:
            request.on_update = news.set
        for call in calls:
            call.queue, call.news, call.most_admitted = queue, news, -(-len(requests) // len(calls))
            call.loop.submit(call)
        progress = None if bar is None else bar(total=len(requests), unit=" completions")
        with contextlib.nullcontext() if progress is None else contextlib.closing(progress):
            while running:
                wait(turns)
                turns.rotate(-1)
                still_running = _read(running)
                if isinstance(progress, Bar):  # shows progress of a single long completion
                    tokens = sum(len(each.token_ids) for each in outputs)
                    progress.set_postfix_str(f"{tokens} tokens", refresh=False)
                if progress is not None:
                    progress.update(len(running) - len(still_running))
                running = still_running
    finally:
        # After an interrupt no caller waits for these.
        for request in requests:
            request.cancel()
        for call in calls:
            call.ready.set()
    return [output.completion() for output in outputs]


def _read(outputs: Sequence[Output]) -> list[Output]:
    """Reads new tokens of all outputs; returns the outputs that still run."""
    for output in outputs:
        output.update()
        if output.finish_reason is not None:
            output.request.cancel()  # engines do not know stop strings
    return [output for output in outputs if output.finish_reason is None]


def compile_ahead(target: Target, kinds: Sequence[Kind], counts: Sequence[int]) -> None:
    """Compiles the programs of a target's and its copies' engines, if these exist: see `Engine.compile`."""
    for loop in map(loop_for, (target, *target.copies)):

        def work(loop: EngineLoop = loop) -> None:
            if loop.engine is not None:
                loop.engine.compile(kinds, counts=counts)

        in_all_processes(Call(loop), "a warm-up", functools.partial(loop.run, work))
