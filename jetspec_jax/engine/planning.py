"""The front door: what an engine and its requests need, checked before anything is done."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.settings import TreeSettings, make_decoder
from jetspec_jax.device.memory import Bytes
from jetspec_jax.engine.budget_policy import MAX_ROUNDS
from jetspec_jax.engine.memory import check_engine_memory
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import MAX_SLOTS, EngineSize, default_capacity, slots_for
from jetspec_jax.sampling.params import SamplingParams, draw_seed
from jetspec_jax.tree import Auto, Hints, algorithm_of, tree_buckets
from jetspec_jax.tree.routing import Routing, hints_of_each

#: A prompt: a list of token ids, or an array of them.
TokenIds = ArrayLike | Sequence[int]


@dataclass(frozen=True)
class EnginePlan:
    """All that an engine is, but for its weights.

    Attributes:
        decoder: Of the largest trees that it may build.
        size: How much it holds.
        dtype: Of the weights, and so of the stores.
    """

    decoder: TreeDecoder
    size: EngineSize
    dtype: jnp.dtype

    @property
    def auto(self) -> Auto | None:
        """The algorithm, where it chooses among the buckets up to the decoder's."""
        algorithm = algorithm_of(self.decoder.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.decoder.bucket > 1 else None

    @property
    def decoders(self) -> tuple[TreeDecoder, ...]:
        """Those that the engine chooses from: with "auto" one for each bucket up to the decoder's."""
        auto = self.auto
        if auto is None:
            return (self.decoder,)
        plain = replace(self.decoder, bucket=1, algorithm=auto.shape)
        trees = (
            replace(self.decoder, bucket=bucket, algorithm=auto.shape, observes=True)
            for bucket in tree_buckets(self.decoder.bucket)
        )
        return (plain, *trees)

    def check_memory(self, weights: Callable[[], Bytes] = dict) -> None:
        """Checks that the device can hold it, beside weights that it does not hold yet.

        Raises:
            DeviceMemoryError: It cannot. The message lists all parts, their sum, and what would fit.
        """
        check_engine_memory(self.decoder, self.size, self.dtype, weights=weights)

    def serves(self, other: "EnginePlan") -> bool:
        """Whether an engine of this plan does what one of the other would do, in the same programs."""
        mine, wanted = self.size, other.size
        return (
            (self.decoder, self.dtype, mine.slots) == (other.decoder, other.dtype, wanted.slots)
            and mine.capacity >= wanted.capacity
            and mine.num_pages >= wanted.num_pages
        )


def plan_engine(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    dtype: jnp.dtype,
    *,
    slots: int = 1,
    capacity: int | None = None,
    num_pages: int | None = None,
    proposer: Proposer | None = None,
    implementation: str | None = None,
) -> EnginePlan:
    """An engine for some trees.

    Args:
        target: The target.
        head: A draft head; None decodes plainly unless a proposer is given.
        settings: The trees.
        dtype: Of the weights.
        slots: Requests that decode at the same time.
        capacity: Tokens that a slot can hold, prompt and output together; None is the usual number.
        num_pages: Pages of all slots together; None is enough for every slot to be full.
        proposer: A proposer other than the head's.
        implementation: Of tree attention; None picks the best.

    Raises:
        ValueError: The head does not fit, or a setting is out of its range.
    """
    decoder = make_decoder(target, head, settings, proposer=proposer, implementation=implementation)
    decoder = replace(decoder, max_rounds=MAX_ROUNDS)
    return EnginePlan(decoder, EngineSize.of(target, slots, capacity, num_pages), dtype)


def plan_requests(
    target: Target,
    head: Head | None,
    settings: TreeSettings,
    prompts: Iterable[TokenIds],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    routing: Hints | Sequence[Hints | None] | None = None,
    *,
    max_slots: int = MAX_SLOTS,
    capacity: int | None = None,
    proposer: Proposer | None = None,
    implementation: str | None = None,
) -> tuple[EnginePlan, list[Request]]:
    """Requests, and the engine that serves them together.

    Args:
        target: The target.
        head: A draft head; None decodes plainly unless a proposer is given.
        settings: The trees.
        prompts: Token ids of each prompt.
        sampling_params: One for all prompts, or one for each.
        routing: What is known of the prompts, for all or for each: see `jetspec_jax.generate_tree`.
        max_slots: Most prompts that decode at the same time.
        capacity: Tokens that a slot can hold; None is as many as the requests need, or the usual number.
        proposer: A proposer other than the head's.
        implementation: Of tree attention; None picks the best.

    Raises:
        ValueError: A setting is out of its range, the head does not fit, or a request cannot be served.
    """
    if not isinstance(target, Target):
        raise ValueError(f"expected a Target, as load_target returns it, not {type(target).__name__}")
    if head is not None and not isinstance(head, Head):
        raise ValueError(f"expected a Head, as load_draft_head returns it, not {type(head).__name__}")
    prompts = list(prompts)
    params = _of_each(sampling_params, len(prompts))
    hints = hints_of_each(routing, len(prompts), "prompts")
    ids = [
        check_request(target, prompt, own, capacity=capacity)
        for prompt, own in zip(prompts, params, strict=True)
    ]
    need = max((len(prompt) + own.max_tokens for prompt, own in zip(ids, params, strict=True)), default=0)
    plan = plan_engine(
        target.config,
        None if head is None else head.config,
        settings,
        target.dtype,
        slots=slots_for(len(ids), max_slots),
        capacity=default_capacity(target.config, need) if capacity is None else capacity,
        proposer=proposer,
        implementation=implementation,
    )
    return plan, [
        make_request(target, plan.decoder, settings, *own) for own in zip(ids, params, hints, strict=True)
    ]


def make_request(
    target: Target,
    decoder: TreeDecoder,
    settings: TreeSettings,
    prompt: np.ndarray,
    params: SamplingParams,
    hints: Hints | None = None,
) -> Request:
    """A request of a prompt that was checked; draws a seed if it has none."""
    stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else target.eos_token_ids)}
    if params.seed is None:
        params = replace(params, seed=draw_seed())
    depth = decoder.depth if settings.depth is None else settings.depth
    return Request(prompt, params, frozenset(stop_ids), settings.budget, depth, Routing.of_one(hints))


def check_request(
    target: Target, prompt: TokenIds, params: SamplingParams, *, capacity: int | None = None
) -> np.ndarray:
    """Checks a request before anything is done for it; its prompt as an array of token ids.

    Raises:
        ValueError: What is wrong with it.
    """
    if not isinstance(params, SamplingParams):
        raise ValueError(f"expected SamplingParams, not {type(params).__name__}")
    config = target.config
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"a prompt must be a list of token ids, not {prompt!r}")
    for name, tokens in (("prompt", ids.tolist()), ("stop_token_ids", params.stop_token_ids or ())):
        outside = [token for token in tokens if not 0 <= token < config.vocab_size]
        if outside:
            raise ValueError(
                f"token id {outside[0]} in {name} lies outside the vocabulary 0..{config.vocab_size - 1}"
            )
    total = len(ids) + params.max_tokens
    limit = min(config.max_position_embeddings, capacity or config.max_position_embeddings)
    if total > limit:
        raise ValueError(
            f"{len(ids)} prompt tokens plus max_tokens={params.max_tokens} make {total}, beyond the "
            f"context limit of {limit}; max_tokens could be at most {limit - len(ids)}"
        )
    if params.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the target has none; use stop_token_ids")
    return ids.astype(np.int32)


def _of_each(
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
