"""Token ids in, completions out: plain decoding and tree decoding of a list of prompts."""

from collections.abc import Sequence

from jetspec_jax.checkpoint import Head, Target
from jetspec_jax.completion import Completion
from jetspec_jax.config import check_head_fits
from jetspec_jax.engine import (
    MAX_SLOTS,
    PLAIN,
    Engine,
    TreeSettings,
    check_request,
    default_capacity,
)
from jetspec_jax.sampling import SamplingParams


def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_slots: int = MAX_SLOTS,
) -> list[Completion]:
    """Plain decoding: the round with a tree of one node.

    Args:
        target: The target.
        prompts: Token ids of each prompt.
        sampling_params: One for all prompts, or one for each.
        max_slots: Most prompts that decode at the same time.

    Raises:
        ValueError: A request cannot be served; nothing has been generated then.
    """
    return _run(target, None, prompts, sampling_params, PLAIN, max_slots)


def generate_tree(
    target: Target,
    draft_head: Head,
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    budget: int = 128,
    width: int = 7,
    depth: int | None = None,
    algorithm: str = "accum_logp",
    max_slots: int = MAX_SLOTS,
) -> list[Completion]:
    """Tree decoding: the same tokens as `generate`, in fewer forwards of the target.

    Args:
        target: The target.
        draft_head: A draft head made for it.
        prompts: Token ids of each prompt.
        sampling_params: One for all prompts, or one for each.
        budget: Most nodes of a tree, root included, 1..256; 1 is plain decoding.
        width: Most children of a node.
        depth: Largest depth of a tree, at most the head's block size less one (the default).
        algorithm: How trees are built.
        max_slots: Most prompts that decode at the same time.

    Raises:
        ValueError: A setting is out of its range, the head does not fit the target, or a request cannot be
            served; nothing has been generated then.
    """
    settings = TreeSettings(budget, width, depth, algorithm)
    check_head_fits(draft_head.config, target.config)
    settings.check(target.config, draft_head.config.depth)
    return _run(target, draft_head, prompts, sampling_params, settings, max_slots)


def per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One set of sampling parameters for each of ``count`` prompts."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if len(sampling_params) != count:
        raise ValueError(f"{len(sampling_params)} sampling_params for {count} prompts")
    return list(sampling_params)


def slots_for(count: int, max_slots: int) -> int:
    """Slots for ``count`` prompts: a power of two, so that few programs serve all batch sizes."""
    if max_slots < 1:
        raise ValueError(f"max_slots must be at least 1, not {max_slots}")
    return min(1 << max(count - 1, 0).bit_length(), max_slots)


def _run(
    target: Target,
    head: Head | None,
    prompts: Sequence[Sequence[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    settings: TreeSettings,
    max_slots: int,
) -> list[Completion]:
    params = per_prompt(sampling_params, len(prompts))
    slots = slots_for(len(prompts), max_slots)
    for prompt, own in zip(prompts, params, strict=True):
        check_request(target, prompt, own)
    if not prompts:
        return []
    need = max(len(prompt) + own.max_tokens for prompt, own in zip(prompts, params, strict=True))
    engine = Engine(target, head, settings, slots=slots, capacity=default_capacity(target.config, need))
    return [request.output.completion() for request in engine.complete(prompts, params)]
