"""Compares requests and engines between processes, so that all of them compute the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import brief, check_alike, compare, gathered, shared_cancel
from jetspec_jax.engine.request import Request

_ENGINE, _REQUESTS = "a new engine", "new requests"


def check_alike_engines(plan: Any) -> None:
    """Checks that all processes make the same engine.

    Args:
        plan: An `EnginePlan`.

    Raises:
        ValueError: They differ, raised in every process; the message lists all differences.
    """
    decoder = plan.decoder
    parts = {
        "the mesh": describe_mesh(decoder.mesh),
        "the target's config": decoder.target,
        "the draft head's config": decoder.proposer,
        "the size": plan.size,
        "the dtype": str(plan.dtype),
        "the budget": str(decoder.bucket),
        "the trees": (decoder.breadth, decoder.depth, decoder.algorithm, plan.least_nodes),
        "the implementation": str(decoder.implementation),
    }
    compare(parts, _ENGINE, "an engine")


def share(make: Any) -> tuple[Any, list[Request]]:
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
        gathered([f"{type(error).__name__}: {error}", {}, []], _REQUESTS)
        raise
    replies: list[Any] = gathered(
        ["", brief(describe()), [request.params.seed for request in requests]], _REQUESTS
    )
    for process, (refusal, _, _) in enumerate(replies):
        if refusal:
            raise ValueError(f"process {process} refused its requests: {refusal}")
    check_alike([parts for _, parts, _ in replies], "what was asked for")
    for request, seed in zip(requests, replies[0][2], strict=True):
        # All processes use the first one's random seeds.
        request.params = replace(request.params, seed=seed)
        request.shared_cancel = shared_cancel(request)
    return plan, requests


def described_call(
    prompts: Sequence[Any],
    params: Sequence[Any],
    hints: Sequence[Any],
    settings: Any,
    size: Any,
    stops: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """A call's arguments by name, for the comparison."""
    parts: dict[str, Any] = {"the number of prompts": str(len(prompts))}
    parts |= {f"prompts[{number}]": prompt.ids.tolist() for number, prompt in enumerate(prompts)}
    parts |= {f"sampling_params[{number}]": each_params for number, each_params in enumerate(params)}
    parts |= {"the tokens that end a sequence": stops, "routing": list(hints)}
    return {**parts, "the settings of the trees": settings, "the size": size}
