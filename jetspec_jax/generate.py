"""Token ids in, completions out: plain decoding and tree decoding of a list of prompts."""

from collections.abc import Iterable, Sequence

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.config import check_head_fits
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.engine.engine import MAX_SLOTS, Engine
from jetspec_jax.engine.output import Completion
from jetspec_jax.engine.request import TokenIds, check_request
from jetspec_jax.engine.size import default_capacity
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import Algorithm, Hints
from jetspec_jax.tree.routing import hints_of_each


def generate(
    target: Target,
    prompts: Iterable[TokenIds],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    max_slots: int = MAX_SLOTS,
    implementation: str | None = None,
) -> list[Completion]:
    """Plain decoding: the round with a tree of one node.

    Args:
        target: The target.
        prompts: Token ids of each prompt.
        sampling_params: One for all prompts, or one for each.
        max_slots: Most prompts that decode at the same time.
        implementation: Of tree attention; None picks the best.

    Raises:
        ValueError: A request cannot be served; nothing has been generated then.
        DeviceMemoryError: The device cannot hold the stores and what a round needs beside them.
    """
    return _run(target, None, prompts, sampling_params, PLAIN, max_slots, implementation)


def generate_tree(
    target: Target,
    draft_head: Head,
    prompts: Iterable[TokenIds],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    budget: int = 128,
    width: int = 7,
    depth: int | None = None,
    algorithm: str | Algorithm = "accum_logp",
    routing: Hints | Sequence[Hints | None] | None = None,
    max_slots: int = MAX_SLOTS,
    implementation: str | None = None,
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
        algorithm: How trees are built: a name of `jetspec_jax.tree.algorithm_names`, or what
            `jetspec_jax.tree.get_algorithm` makes of a name and options.
        routing: What is known of the prompts, for algorithms that look at that: one mapping for all or one
            for each, with any of "task", "mode" and "text".
        max_slots: Most prompts that decode at the same time.
        implementation: Of tree attention; None picks the best.

    Raises:
        ValueError: A setting is out of its range, the head does not fit the target, or a request cannot be
            served; nothing has been generated then.
        DeviceMemoryError: The device cannot hold the stores and what a round needs beside them.
    """
    settings = TreeSettings(budget, width, depth, algorithm)
    for value, kind in ((target, Target), (draft_head, Head)):
        if not isinstance(value, kind):
            raise ValueError(
                f"expected a {kind.__name__}, as its loader returns it, not {type(value).__name__}"
            )
    check_head_fits(draft_head.config, target.config)
    settings.check(target.config, draft_head.config.depth)
    return _run(target, draft_head, prompts, sampling_params, settings, max_slots, implementation, routing)


def per_prompt(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """One set of sampling parameters for each of ``count`` prompts."""
    if sampling_params is None:
        sampling_params = SamplingParams()
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if not isinstance(sampling_params, Sequence):
        raise ValueError(f"expected SamplingParams or a list of them, not {type(sampling_params).__name__}")
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
    prompts: Iterable[TokenIds],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    settings: TreeSettings,
    max_slots: int,
    implementation: str | None,
    routing: Hints | Sequence[Hints | None] | None = None,
) -> list[Completion]:
    prompts = list(prompts)
    params = per_prompt(sampling_params, len(prompts))
    hints = hints_of_each(routing, len(prompts), "prompts")
    slots = slots_for(len(prompts), max_slots)
    ids = [check_request(target, prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    if not ids:
        return []
    need = max(len(prompt) + own.max_tokens for prompt, own in zip(ids, params, strict=True))
    capacity = default_capacity(target.config, need)
    engine = Engine(target, head, settings, slots=slots, capacity=capacity, implementation=implementation)
    return [request.output.completion() for request in engine.complete(ids, params, hints)]
