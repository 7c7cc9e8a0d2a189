"""Requests served to their ends by the one engine that a target keeps."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.processes import spans
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
    share it, and others get an engine of their own for as long as they keep it.

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
        same = kept.plan.decoder == plan.decoder and kept.weights.proposer is weights.proposer
        return kept if same and kept.plan.size.capacity >= plan.size.capacity else Engine(plan, weights)
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


def complete(
    engine: Engine, requests: Sequence[Request], tokenizer: Any, bar: Callable[..., Any] | None = BAR
) -> list[Completion]:
    """Serves requests to their ends.

    Args:
        engine: The engine; it may serve others at the same time.
        requests: The requests.
        tokenizer: A transformers tokenizer, or None.
        bar: What makes a progress bar, called as tqdm is; None for no bar.

    Raises:
        RuntimeError: The engine was closed meanwhile.
    """
    outputs = [Output(request, tokenizer) for request in requests]
    try:
        for request in requests:
            engine.admit(request)
        made = None if bar is None else bar(total=len(requests), unit=" completions")
        with contextlib.nullcontext() if made is None else contextlib.closing(made):
            left = outputs
            while left:
                engine.step()
                for output in left:
                    output.update()
                    if output.finish_reason is not None:
                        engine.cancel(output.request)  # a stop string is nothing that the engine knows of
                going_on = [output for output in left if output.finish_reason is None]
                if isinstance(made, Bar):  # so that a single long one is seen to go on
                    tokens = sum(len(each.token_ids) for each in outputs)
                    made.set_postfix_str(f"{tokens} tokens", refresh=False)
                if made is not None:
                    made.update(len(left) - len(going_on))
                left = going_on
    finally:
        # After an interrupt the next call must not go on with these.
        for request in requests:
            engine.cancel(request)
    return [output.completion() for output in outputs]


def take_engine(target: Target, plan: EnginePlan, proposer_weights: Any = None) -> Engine:
    """As `engine_for`, for one caller alone, who gives the engine back by `give_back`."""
    kept: Engine | None = target.keeper.engine
    if kept is not None and kept.busy and not kept.broken:
        return Engine(plan, DecodeWeights(target.weights, proposer_weights))
    engine = engine_for(target, plan, proposer_weights)
    target.keeper.engine = None
    return engine


def give_back(target: Target, engine: Engine) -> None:
    """Keeps an engine that `take_engine` gave, unless the target has another by now."""
    if spans(target.mesh):
        engine.close()  # processes may drop a trace at different times, and must keep the same engine
        return
    # Also called while a dropped trace is finalised, which must wait for nobody.
    if target.keeper.lock.acquire(blocking=False):
        try:
            if not engine.broken:
                target.keeper.engine = target.keeper.engine or engine
        finally:
            target.keeper.lock.release()
