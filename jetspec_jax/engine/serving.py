"""Requests served to their ends by the one engine that a target keeps."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import Request


def engine_for(target: Target, plan: EnginePlan, proposer_weights: Any = None) -> Engine:
    """The target's engine if it serves the plan, or another in its place; called under the keeper's lock.

    A target keeps one engine, so that two sets of stores do not coexist: an idle one that does not serve goes
    before the next is made. While open streams hold the engine, those whom it can serve share it, and others
    get an engine of their own for as long as they keep it.

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
    fits = kept is not None and not kept.broken and kept.plan.serves(plan)
    if kept is None or not fits or kept.weights.proposer is not weights.proposer:
        target.keeper.engine = kept = None  # its stores go before others are made
        target.keeper.engine = kept = Engine(plan, weights)
    return kept


#: A progress bar on a terminal, if it takes a while.
BAR = functools.partial(tqdm, delay=2, disable=None, leave=False)


def complete(
    engine: Engine, requests: Sequence[Request], tokenizer: Any, bar: Callable[..., Any] | None = BAR
) -> list[Completion]:
    """Serves requests to their ends.

    Args:
        engine: The engine; it may serve others at the same time.
        requests: The requests.
        tokenizer: A transformers tokenizer, or None.
        bar: What makes a progress bar, called as tqdm is; None for no bar.
    """
    outputs = {request: Output(request, tokenizer) for request in requests}
    try:
        for request in requests:
            engine.admit(request)
        made = None if bar is None else bar(total=len(requests), unit=" completions")
        with contextlib.nullcontext() if made is None else contextlib.closing(made):
            left = len(requests)
            while left:
                for request in engine.step():
                    output = outputs.get(request)
                    if output is None:
                        continue
                    output.update()
                    if output.finish_reason is not None:
                        engine.cancel(request)  # a stop string is nothing that the engine knows of
                        left -= 1
                        if made is not None:
                            made.update(1)
    except BaseException:
        # Also an interrupt: the next call must not go on with these.
        for request in requests:
            request.abandoned = True
        raise
    return [output.completion() for output in outputs.values()]


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
    # Also called while a dropped trace is finalised, which must wait for nobody.
    if target.keeper.lock.acquire(blocking=False):
        try:
            target.keeper.engine = target.keeper.engine or engine
        finally:
            target.keeper.lock.release()
