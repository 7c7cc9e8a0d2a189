"""Requests of a call, served to their ends by the loop of a target, or by those of all its copies."""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.loop import Call, EngineLoop, Flag, loop_for, wait
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
    def loop(self) -> EngineLoop:
        """That of its target."""
        return loop_for(self.target)

    @property
    def weights(self) -> DecodeWeights:
        """The parameters of its engine."""
        return DecodeWeights(self.target.weights, None if self.head is None else self.head.weights)

    def call(self, plan: EnginePlan, requests: Sequence[Request] = (), **settings: Any) -> Call:
        """A call for these devices, of a plan for any group's; the settings are those of `Call`."""
        return Call(self.loop, plan.on(self.target.mesh), self.weights, deque(requests), **settings)


def groups_of(target: Target, head: Head | None) -> list[Group]:
    """A target and its head, which `check_models` has checked, and all their copies."""
    heads = (None,) * len(target.meshes) if head is None else (head, *head.copies)
    return [Group(*own) for own in zip((target, *target.copies), heads, strict=True)]


def least_busy(groups: Sequence[Group], count: int) -> list[Group]:
    """So many of some groups, or all: those with the least work, in their order."""
    chosen = sorted(range(len(groups)), key=lambda number: groups[number].loop.open_requests)[:count]
    return [groups[number] for number in sorted(chosen)]


def serve(
    target: Target,
    head: Head | None,
    plan: EnginePlan,
    requests: Sequence[Request],
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """Serves requests to their ends, with the target and its copies, no more of them than requests.

    Args:
        target: The target.
        head: Its draft head, or None.
        plan: Of the engine of each.
        requests: The requests, first come, first served by whichever engine has a free slot.
        bar: What makes a progress bar, called as tqdm is; None for no bar.

    Raises:
        DeviceMemoryError: The device cannot hold the engine; the next call makes what worked before anew.
        Exception: Whatever is wrong with the engine.
    """
    groups = least_busy(groups_of(target, head), len(requests))
    return _complete([group.call(plan) for group in groups], requests, target.tokenizer, bar)


def complete(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    tokenizer: Any,
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """As `serve`, with engines of the caller's own, which serve nobody else meanwhile.

    Raises:
        RuntimeError: An engine is broken.
    """
    if any(engine.broken for engine in engines):
        raise RuntimeError(LOST)
    loops = [EngineLoop(engine.plan.decoder.mesh, engine) for engine in engines]
    calls = [Call(loop, own.plan, own.weights) for loop, own in zip(loops, engines, strict=True)]
    try:
        return _complete(calls, requests, tokenizer, bar)
    finally:
        for loop in loops:
            loop.settle()


def _complete(
    calls: Sequence[Call], requests: Sequence[Request], tokenizer: Any, bar: Callable[..., Any] | None
) -> list[Completion]:
    outputs = [Output(request, tokenizer) for request in requests]
    left, turns, queue, news = outputs, deque(calls), deque(requests), Flag()
    try:
        for request in requests:
            request.on_update = news.set
        for call in calls:
            call.queue, call.news, call.most_admitted = queue, news, -(-len(requests) // len(calls))
            call.loop.submit(call)
        made = None if bar is None else bar(total=len(requests), unit=" completions")
        with contextlib.nullcontext() if made is None else contextlib.closing(made):
            while left:
                wait(turns)
                turns.rotate(-1)
                going_on = _read(left)
                if isinstance(made, Bar):  # so that a single long one is seen to go on
                    tokens = sum(len(each.token_ids) for each in outputs)
                    made.set_postfix_str(f"{tokens} tokens", refresh=False)
                if made is not None:
                    made.update(len(left) - len(going_on))
                left = going_on
    finally:
        # After an interrupt nobody waits for these.
        for request in requests:
            request.cancel()
        for call in calls:
            call.ready.set()
    return [output.completion() for output in outputs]


def _read(outputs: Sequence[Output]) -> list[Output]:
    """Takes in what requests have got; those that go on."""
    for output in outputs:
        output.update()
        if output.finish_reason is not None:
            output.request.cancel()  # a stop string is nothing that an engine knows of
    return [output for output in outputs if output.finish_reason is None]


def compile_chunks(target: Target) -> None:
    """Compiles the forwards of prompts of the engines of a target and its copies, where there are any."""
    for loop in map(loop_for, (target, *target.copies)):
        loop.run(lambda loop=loop: loop.engine and loop.engine.runner.compile_chunks())
