"""Requests and engines of several processes: compared, so that all of them compute the same."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jetspec_jax
from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import check_alike, environment, follow, gathered
from jetspec_jax.engine.request import Request

# Longer values are compared by their digests.
_SHORT = 64
_ENGINE, _REQUESTS = "a new engine", "new requests"


def check_alike_engines(plan: Any) -> None:
    """Checks that all processes make the same engine, of the same versions and kinds of devices.

    Args:
        plan: An `EnginePlan`.

    Raises:
        ValueError: They do not, in every process; all that differs is named.
    """
    decoder = plan.decoder
    parts = {
        **environment(),
        "the version of jetspec_jax": jetspec_jax.__version__,
        "the mesh": describe_mesh(decoder.mesh),
        "the target's config": decoder.target,
        "the draft head's config": decoder.proposer,
        "the size": plan.size,
        "the dtype": str(plan.dtype),
        "the budget": str(decoder.bucket),
        "the trees": (decoder.breadth, decoder.depth, decoder.algorithm),
        "the implementation": str(decoder.implementation),
    }
    check_alike(gathered(_brief(parts), _ENGINE), "an engine")


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
    said: list[Any] = gathered(
        ["", _brief(asked()), [request.params.seed for request in requests]], _REQUESTS
    )
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
    prompts: Sequence[Any], params: Sequence[Any], hints: Sequence[Any], settings: Any, size: Any
) -> dict[str, Any]:
    """What a call asks for, by name."""
    parts: dict[str, Any] = {"the number of prompts": str(len(prompts))}
    parts |= {f"prompts[{number}]": prompt.ids.tolist() for number, prompt in enumerate(prompts)}
    parts |= {f"sampling_params[{number}]": own for number, own in enumerate(params)}
    return {**parts, "routing": list(hints), "the settings of the trees": settings, "the size": size}


def _brief(parts: dict[str, Any]) -> dict[str, str]:
    """Values as short texts, equal in all processes if the values are."""
    brief = {}
    for name, value in parts.items():
        # Objects that show their address are told apart by what else they show.
        text = value if isinstance(value, str) else re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        brief[name] = text if len(text) <= _SHORT else hashlib.sha256(text.encode()).hexdigest()[:16]
    return brief
