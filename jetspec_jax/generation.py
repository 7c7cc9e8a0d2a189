"""Plain decoding and tree decoding of a list of prompts, from token ids to completions."""

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.arguments import check_type, refuse_unknown
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.proposer import Proposer, check_fits, check_given
from jetspec_jax.decode.settings import DEFAULT_BUDGET, PLAIN, TreeSettings
from jetspec_jax.device.mesh import without_mesh
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.admission import check_models, make_requests
from jetspec_jax.engine.engines import Engines, complete
from jetspec_jax.engine.plan import plan_engine
from jetspec_jax.engine.prompts import Prompt
from jetspec_jax.engine.size import MAX_SLOTS
from jetspec_jax.request_output import RequestOutput, by_prompt
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import DEFAULT_ALGORITHM, Algorithm
from jetspec_jax.tree.routing import ROUTING_INSTEAD


@without_mesh
def generate(
    target: Target,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_slots: int = MAX_SLOTS,
    implementation: str | None = None,
) -> list[RequestOutput]:
    """Plain decoding: rounds with trees of one node.

    Args:
        target: The target.
        prompts: Token ids of each prompt, or any other form that `LLM.generate` takes.
        sampling_params: One for all prompts, or one for each.
        max_slots: Most prompts that decode at the same time, per copy of the target.
        implementation: Tree attention implementation; None picks the best.

    Returns:
        One output for each prompt, in their order, with its ``n`` completions.

    Raises:
        TypeError: A value has a wrong type.
        ValueError: A request cannot be served; then nothing has been generated.
        DeviceMemoryError: The device cannot hold the stores and a round's workspace.
    """
    return _run(target, None, PLAIN, prompts, sampling_params, max_slots, implementation)


@without_mesh
def generate_tree(
    target: Target,
    draft_head: Head | None,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    budget: int = DEFAULT_BUDGET,
    width: int | None = None,
    depth: int | None = None,
    algorithm: str | Algorithm = DEFAULT_ALGORITHM,
    candidates: int | None = None,
    max_slots: int = MAX_SLOTS,
    implementation: str | None = None,
    proposer: Proposer | None = None,
    proposer_weights: Any = None,
    **unknown: object,
) -> list[RequestOutput]:
    """Tree decoding: the same tokens as `generate`, in fewer forwards of the target.

    Args:
        target: The target.
        draft_head: A draft head made for it; None with a proposer.
        prompts: Token ids of each prompt, or any other form that `LLM.generate` takes.
        sampling_params: One for all prompts, or one for each.
        budget: Most nodes of a tree, root included, 1..256; 1 is plain decoding.
        width: Most children of a node; None is all candidates.
        depth: Largest depth of a tree, at most the head's block size less one (the default).
        algorithm: Tree algorithm: a name of `jetspec_jax.tree.algorithm_names`, or an algorithm with options
            from `jetspec_jax.tree.get_algorithm`.
        candidates: Number of candidate tokens per draft row; None is the width, or without one the
            algorithm's default.
        max_slots: Most prompts that decode at the same time, per copy of the target.
        implementation: Tree attention implementation; None picks the best.
        proposer: A source of drafts in place of a draft head, see `jetspec_jax.Proposer`.
        proposer_weights: Its parameters; on a mesh, in shards of its ``weight_specs``.
        **unknown: Refused.

    Raises:
        TypeError: A value has a wrong type.
        ValueError: A setting is out of its range, the head does not fit the target, or a request cannot be
            served; then nothing has been generated.
        DeviceMemoryError: The device cannot hold the stores and a round's workspace.
    """
    refuse_unknown(generate_tree, unknown, {"routing": ROUTING_INSTEAD})
    check_given(proposer, proposer_weights)
    if proposer is None:
        check_type("the draft head", draft_head, Head, "a Head, as load_draft_head returns it")
    settings = TreeSettings(budget, width, depth, algorithm, candidates)
    given = target, draft_head, settings, prompts, sampling_params, max_slots, implementation
    return _run(*given, proposer, jax.tree.map(jnp.asarray, proposer_weights))


def _run(
    target: Target,
    head: Head | None,
    settings: TreeSettings,
    prompts: Prompt | Iterable[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    max_slots: int,
    implementation: str | None,
    proposer: Proposer | None = None,
    proposer_weights: Any = None,
) -> list[RequestOutput]:
    """Makes engines, serves the prompts, and closes the engines."""
    check_models(target, head)
    check_fits(proposer, target.config, len(target.meshes))
    if head is not None:
        head.check_finite()
    if spans(target.mesh):
        raise ValueError(
            "several processes share the target: use LLM, whose process 0 generates while the others call "
            "follow()"
        )
    models = target.config, None if head is None else head.config
    options = {"slots": max_slots, "implementation": implementation, "mesh": target.mesh}
    plan = plan_engine(*models, settings, target.dtype, proposer=proposer, **options)
    requests = make_requests(target, plan, settings, prompts, sampling_params)
    engines = Engines(target, head, plan, longer_slots=True, proposer_weights=proposer_weights)
    with contextlib.closing(engines):
        return by_prompt(complete(engines, requests, target.tokenizer))
