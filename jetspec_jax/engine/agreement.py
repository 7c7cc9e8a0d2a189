"""Requests and engines of several processes: compared, so that all of them compute the same."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import brief, check_alike, compare, follow, gathered
from jetspec_jax.engine.request import Request

_ENGINE, _REQUESTS = "a new engine", "new requests"


def check_alike_engines(plan: Any) -> None:
    """Checks that all processes make the same engine.

    Args:
        plan: An `EnginePlan`.

    Raises:
        ValueError: They do not, in every process; all that differs is named.
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
    """Requests that several processes serve together.

    Args:
        make: Returns the engine's plan, the requests, and what tells by name what was asked for; raises what
            is wrong with it.

    Raises:
        ValueError: Another process refuses what it was asked for, or was asked for something else.
    """
    try:
        plan, requests, asked = make()
    except Exception as error:
        gathered([f"{type(error).__name__}: {error}", {}, []], _REQUESTS)
        raise
    said: list[Any] = gathered(["", brief(asked()), [request.params.seed for request in requests]], _REQUESTS)
    for process, (refusal, _, _) in enumerate(said):
        if refusal:
            raise ValueError(f"process {process} refused its requests: {refusal}")
    check_alike([parts for _, parts, _ in said], "what was asked for")
    for request, seed in zip(requests, said[0][2], strict=True):
        # Those that were drawn are the first process's.
        request.params, request.shared = replace(request.params, seed=seed), True
        follow(request)
    return plan, requests


def asked_for(
    prompts: Sequence[Any],
    params: Sequence[Any],
    hints: Sequence[Any],
    settings: Any,
    size: Any,
    stops: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """What a call asks for, by name."""
    parts: dict[str, Any] = {"the number of prompts": str(len(prompts))}
    parts |= {f"prompts[{number}]": prompt.ids.tolist() for number, prompt in enumerate(prompts)}
    parts |= {f"sampling_params[{number}]": own for number, own in enumerate(params)}
    parts |= {"the tokens that end a sequence": stops, "routing": list(hints)}
    return {**parts, "the settings of the trees": settings, "the size": size}
