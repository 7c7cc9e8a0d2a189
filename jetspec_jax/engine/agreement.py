"""Compares engines and requests between processes, so that all of them compute the same."""

from collections.abc import Callable, Sequence
from typing import Any

from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import compare
from jetspec_jax.engine.request import Request

_REQUESTS = "new requests"


def check_alike_engines(plan: Any) -> None:
    """Checks that all processes make the same engine.

    Args:
        plan: An `EnginePlan`.

    Raises:
        ValueError: They differ, raised in every process; the message lists all differences.
    """
    compare(_engine_parts(plan), "a new engine", "an engine")


def share(
    make: Callable[[], tuple[Any, list[Request], Callable[[], dict[str, Any]]]],
) -> tuple[Any, list[Request]]:
    """Compares requests that several processes serve together.

    Args:
        make: Returns the engine plan, the requests, and a function that describes the call; raises if a
            request cannot be served.

    Raises:
        ValueError: Another process refused its requests, or got different ones.
    """
    try:
        plan, requests, describe = make()
    except Exception as error:
        compare({}, _REQUESTS, "", refusal=f"{type(error).__name__}: {error}")
        raise
    compare({**_engine_parts(plan), **describe()}, _REQUESTS, "what was asked for")
    return plan, requests


def described_call(
    prompts: Sequence[Any],
    params: Sequence[Any],
    hints: Sequence[Any],
    settings: Any,
    stops: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """A call's arguments by name, for the comparison."""
    parts: dict[str, Any] = {"the number of prompts": str(len(prompts))}
    parts |= {f"prompts[{number}]": prompt.ids.tolist() for number, prompt in enumerate(prompts)}
    parts |= {f"sampling_params[{number}]": each_params for number, each_params in enumerate(params)}
    parts |= {"the tokens that end a sequence": stops, "routing": list(hints)}
    return {**parts, "the settings of the trees": settings}


def _engine_parts(plan: Any) -> dict[str, Any]:
    decoder = plan.decoder
    return {
        "the mesh": describe_mesh(decoder.mesh),
        "the target's config": decoder.target,
        "the draft head's config": decoder.proposer,
        "the size": plan.size,
        "the dtype": str(plan.dtype),
        "the budget": str(decoder.bucket),
        "the trees": (decoder.breadth, decoder.depth, decoder.algorithm, plan.least_nodes),
        "the implementation": str(decoder.implementation),
    }
