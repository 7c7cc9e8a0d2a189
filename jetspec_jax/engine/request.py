"""A request: a prompt on its way through an engine, and what is checked before anything is done for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import ArrayLike

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.state import RoundRecord, SlotSettings
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.size import pages_for
from jetspec_jax.sampling.params import SamplingParams

#: A prompt: a list of token ids, or an array of them.
TokenIds = ArrayLike | Sequence[int]


@dataclass(eq=False)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        prompt: Its tokens.
        params: How it is sampled and when it stops.
        settings: The same as arrays for its slot.
        output: What it has got so far.
        abandoned: Nobody waits for it any more; the next step takes it out.
        slot: Where it decodes, once it was admitted.
        pages: What it holds, once it was admitted.
        prefilled: Tokens of the prompt that are in the stores.
        seen: Committed tokens that the proposer has seen.
    """

    prompt: np.ndarray
    params: SamplingParams
    settings: SlotSettings
    output: Output
    abandoned: bool = False
    slot: int = -1
    pages: Sequence[int] = ()
    prefilled: int = 0
    seen: int = 0

    @property
    def num_pages(self) -> int:
        """Pages for its prompt and output. A last round may overshoot them: a commit drops such rows."""
        return pages_for(len(self.prompt) + self.params.max_tokens)

    @property
    def committed(self) -> int:
        """Its tokens in the stores: all that it has got but the last, the anchor."""
        return self.prefilled + max(len(self.output.token_ids) - 1, 0)

    @property
    def left(self) -> int:
        """Tokens that rounds may still give it; the first is the prefill's."""
        return self.params.max_tokens - max(len(self.output.token_ids), 1)

    def collect(self, records: RoundRecord) -> None:
        """Takes the tokens of the rounds that it took part in."""
        # Of many rows few may have run.
        ran = records.tree_sizes[:, self.slot] > 0
        own = replace(records, packed=records.packed[ran, self.slot])
        of_rounds = (own.tokens.tolist(), own.counts.tolist(), own.tree_sizes.tolist())
        for tokens, count, size in zip(*of_rounds, strict=True):
            self.output.add_round(tokens[:count], size)


def check_request(
    target: Target, prompt: TokenIds, params: SamplingParams, *, capacity: int | None = None
) -> np.ndarray:
    """Checks a request before anything is done for it; its prompt as an array of token ids.

    Raises:
        ValueError: What is wrong with it.
    """
    if not isinstance(target, Target):
        raise ValueError(f"expected a Target, as load_target returns it, not {type(target).__name__}")
    if not isinstance(params, SamplingParams):
        raise ValueError(f"expected SamplingParams, not {type(params).__name__}")
    config = target.config
    ids = np.asarray(prompt)
    if ids.size == 0:
        raise ValueError("the prompt is empty; it needs at least one token")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"a prompt must be a list of token ids, not {prompt!r}")
    for name, tokens in (("prompt", ids), ("stop_token_ids", np.asarray(params.stop_token_ids, np.int64))):
        outside = tokens[(tokens < 0) | (tokens >= config.vocab_size)]
        if outside.size:
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
