"""Compares engines and requests between processes, so that all of them compute the same."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from jetspec_jax.device.mesh import describe_mesh
from jetspec_jax.device.processes import compare, spans
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.prompts import EncodedPrompt
from jetspec_jax.engine.request import Request

_REQUESTS = "new requests"


def check_alike_engines(plan: EnginePlan) -> None:
    """Checks that all processes make the same engine.

    Raises:
        ValueError: They differ, raised in every process; the message lists all differences.
    """
    compare(_engine_parts(plan), "a new engine", "an engine")


@contextlib.contextmanager
def refused_together(mesh: Mesh | None) -> Iterator[None]:
    """Raises an error of the block in all processes of a mesh; they call `check_alike_requests` after it."""
    try:
        yield
    except Exception as error:
        if spans(mesh):
            compare({}, _REQUESTS, "", refusal=f"{type(error).__name__}: {error}")
        raise


def check_alike_requests(
    plan: EnginePlan,
    prompts: Sequence[EncodedPrompt],
    params: Sequence[Any],
    hints: Sequence[Any],
    settings: Any,
    requests: Sequence[Request],
) -> None:
    """Checks that all processes serve the same requests.

    Raises:
        ValueError: Another process refused its requests, or got different ones.
    """
    parts = {**_engine_parts(plan), "the number of prompts": str(len(prompts))}
    parts |= {f"prompts[{number}]": prompt.ids.tolist() for number, prompt in enumerate(prompts)}
    parts |= {f"sampling_params[{number}]": each for number, each in enumerate(params)}
    parts["the tokens that end a sequence"] = [sorted(request.stop_ids) for request in requests]
    parts |= {"routing": list(hints), "the settings of the trees": settings}
    compare(parts, _REQUESTS, "the call")


def _engine_parts(plan: EnginePlan) -> dict[str, Any]:
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
