"""Adjusts the target's logits for a request: masks, biases and penalties, exact at every node of a tree.

The tokens on a node's path below the root count as output, as if they were committed. So a node's logits
become the same as in plain decoding after the same tokens: committed tokens and tokens on the path are
counted in integers, before the same floating-point formula.

The order and meaning are vLLM's: allowed tokens, bad words, minimum and biases, then penalties. Forbidden
tokens have -inf, which additions and multiplications keep, so masks may also be applied last.

Shapes: B slots, N nodes, D draft depth, W bad words, L tokens of the longest, H = max(L - 1, 0), V vocabulary
(for logits a device's shard, see `pallas_kernels.shards`; for the arrays of slots the whole vocabulary).
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jetspec_jax.sampling.allowed import contains
from jetspec_jax.sampling.choice import local_columns
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.token_sets import packed
from pallas_kernels import shards

#: Most bad words of a request, as token sequences, and most tokens of a bad word.
MOST_BAD_WORDS, MOST_WORD_TOKENS = 128, 16
# No token: padding of bad words, and of the output's last tokens.
_NONE = -1


class History(NamedTuple):
    """The output of B slots so far, including the roots of the trees.

    Attributes:
        emitted: Number of tokens of the output.
        counts: Number of occurrences of each token in the output.
        recent: The last H tokens of the output, the latest first, padded with -1.
    """

    emitted: Int32[Array, "B"]
    counts: Int32[Array, "B V"]
    recent: Int32[Array, "B H"]

    def extended(self, tokens: Int[Array, "B R"], count: Int[Array, "B"]) -> "History":
        """The history after ``count[b]`` further tokens; the others in ``tokens`` are negative."""
        vocab, kept = self.counts.shape[1], self.recent.shape[1]
        sequence = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        place = jnp.where(tokens < 0, vocab, tokens)
        recent = self.recent
        if kept:
            latest = jnp.concatenate([recent[:, ::-1], jnp.where(tokens < 0, _NONE, tokens)], axis=1)
            back = jnp.arange(kept, dtype=jnp.int32)[None, :]
            recent = jnp.take_along_axis(latest, kept + count[:, None] - 1 - back, axis=1)
        counts = self.counts.at[sequence, place].add(1, mode="drop")
        return History(self.emitted + count, counts, recent)


class Adjustments(NamedTuple):
    """The logit adjustments of B slots' requests, and the state of their tokens that these need.

    Attributes:
        active: Whether the slot's request adjusts logits; if not, the other arrays are ignored.
        presence: Penalty of tokens that are in the output.
        frequency: Penalty for each occurrence of a token in the output.
        repetition: For tokens in the prompt or output, positive logits are divided by it, others multiplied.
        bias: Added to logits; -inf for tokens that are never allowed.
        prompt: Packed set of the prompt's tokens.
        endings: Packed set of the tokens that are forbidden before ``min_tokens``.
        min_tokens: Number of output tokens before ``endings`` are allowed.
        words: Bad words of two or more tokens, the last token first, padded with -1.
        history: The output so far.
    """

    active: Bool[Array, "B"]
    presence: Float32[Array, "B"]
    frequency: Float32[Array, "B"]
    repetition: Float32[Array, "B"]
    bias: Float32[Array, "B V"]
    prompt: UInt32[Array, "B words"]
    endings: UInt32[Array, "B words"]
    min_tokens: Int32[Array, "B"]
    words: Int32[Array, "B W L"]
    history: History

    @classmethod
    def empty(
        cls, slots: int, vocab_size: int, words: tuple[int, int] = (MOST_BAD_WORDS, MOST_WORD_TOKENS)
    ) -> "Adjustments":
        """Slots without adjustments; ``words`` is W and L."""
        of_slots = jnp.zeros(slots, jnp.float32)
        numbers = jnp.zeros(slots, jnp.int32)
        bits = jnp.zeros((slots, -(-vocab_size // 32)), jnp.uint32)
        return cls(
            active=jnp.zeros(slots, bool),
            presence=of_slots,
            frequency=of_slots,
            repetition=of_slots + 1,
            bias=jnp.zeros((slots, vocab_size), jnp.float32),
            prompt=bits,
            endings=bits,
            min_tokens=numbers,
            words=jnp.full((slots, *words), _NONE, jnp.int32),
            history=History(
                emitted=numbers,
                counts=jnp.zeros((slots, vocab_size), jnp.int32),
                recent=jnp.full((slots, max(words[1] - 1, 0)), _NONE, jnp.int32),
            ),
        )

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        endings: Collection[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        words: tuple[int, int] = (MOST_BAD_WORDS, MOST_WORD_TOKENS),
    ) -> "Adjustments":
        """One request's adjustments, as NumPy values without the slot axis.

        ``output`` has been generated already. ``endings`` are forbidden before ``min_tokens``. ``words`` is W
        and L for the bad words of two or more tokens.
        """
        bias = np.zeros(vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[np.asarray(params.allowed_token_ids)] = 0
        for token, value in dict(params.logit_bias or ()).items():
            bias[token] += np.float32(value)
        bias[[word[0] for word in bad_words if len(word) == 1]] = -np.inf
        longer = [word for word in bad_words if len(word) > 1]
        most, longest = words
        if len(longer) > most or any(len(word) > longest for word in longer):
            size = f"{len(longer)} bad words of up to {max(map(len, longer))} tokens"
            raise ValueError(f"{size} do not fit room for {most} of {longest}")
        table = np.full(words, _NONE, np.int32)
        for row, word in zip(table, longer, strict=False):
            row[: len(word)] = word[::-1]
        recent = np.full(max(longest - 1, 0), _NONE, np.int32)
        latest = list(output)[::-1][: recent.size]
        recent[: len(latest)] = latest
        counts = np.bincount(np.asarray(output, np.int64), minlength=vocab_size).astype(np.int32)
        history: Any = np.int32(len(output)), counts, recent
        values: Any = (
            np.bool_(True),
            np.float32(params.presence_penalty),
            np.float32(params.frequency_penalty),
            np.float32(params.repetition_penalty),
            bias,
            packed(prompt, vocab_size),
            packed(endings, vocab_size),
            np.int32(params.min_tokens),
            table,
            History(*history),
        )
        return cls(*values)


def adjust(
    logits: Float[Array, "B N V"],
    paths: Int32[Array, "B N D"],
    depths: Int[Array, "B N"],
    adjustments: Adjustments,
) -> Float32[Array, "B N V"]:
    """The adjusted logits; logits of slots without adjustments are unchanged.

    Paths have the tokens of each node and of its ancestors below the root, the node's first, padded with -1.
    """
    # Tokens of this device's shard of the vocabulary.
    size = logits.shape[-1]
    token = jnp.arange(size, dtype=jnp.int32) + size * shards.index()
    each_slot = jnp.broadcast_to(token[None, :], (logits.shape[0], size))

    def of_slots(numbers: Array) -> Array:
        return numbers[:, None, None]

    values = logits.astype(jnp.float32)
    counts = local_columns(adjustments.history.counts, size)[:, None, :]
    for place in range(paths.shape[2]):
        counts = counts + (paths[:, :, place, None] == token[None, None, :])
    present = counts > 0
    seen = present | contains(adjustments.prompt, each_slot)[:, None, :]

    biased = values + local_columns(adjustments.bias, size)[:, None, :]
    by_repetition = of_slots(adjustments.repetition)
    repeated = jnp.where(biased > 0, biased / by_repetition, biased * by_repetition)
    penalised = jnp.where(seen, repeated, biased)
    penalised = (
        penalised - of_slots(adjustments.frequency) * counts - of_slots(adjustments.presence) * present
    )
    early = adjustments.history.emitted[:, None] + depths < adjustments.min_tokens[:, None]
    too_early = early[:, :, None] & contains(adjustments.endings, each_slot)[:, None, :]
    penalised = jnp.where(too_early, -jnp.inf, penalised)

    if adjustments.words.shape[1]:
        completes = _last_of_bad_words(paths, depths, adjustments) - size * shards.index()
        place = jnp.where((completes >= 0) & (completes < size), completes, size)
        slot = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None, None]
        node = jnp.arange(place.shape[1], dtype=jnp.int32)[None, :, None]
        penalised = penalised.at[slot, node, place].set(-jnp.inf, mode="drop")
    return jnp.where(of_slots(adjustments.active), penalised, values)


def _last_of_bad_words(
    paths: Int32[Array, "B N D"], depths: Int[Array, "B N"], adjustments: Adjustments
) -> Int32[Array, "B N W"]:
    """The token that would complete each bad word at each node; negative if no token would.

    A token completes a word if the word's other tokens are the latest, on the node's path and before it among
    the committed ones::

        words [5, 4, 3], [5, 4, -1] (of which 5 is the last)     latest [4, 3] -> 5, 5
                                                                 latest [4, 7] -> -1, 5
    """
    recent = adjustments.history.recent
    before = jnp.arange(recent.shape[1], dtype=jnp.int32)[None, None, :] - depths[:, :, None]
    committed = jnp.take_along_axis(recent[:, None, :], jnp.maximum(before, 0), axis=2)
    on_path = jnp.pad(paths, ((0, 0), (0, 0), (0, recent.shape[1])), constant_values=_NONE)
    latest = jnp.where(before >= 0, committed, on_path[:, :, : recent.shape[1]])
    rest = adjustments.words[:, None, :, 1:]
    matches = jnp.all((rest == _NONE) | (rest == latest[:, :, None, :]), axis=3)
    return jnp.where(matches, adjustments.words[:, None, :, 0], _NONE)
