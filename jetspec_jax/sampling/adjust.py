"""The target's logits as a request wants them: masks, biases and penalties, exact at every node of a tree.

A node's own path below the tree's root counts as output, as if its tokens had been committed. So a node's
logits become what plain decoding makes of them after the same tokens: counts are integers, whether tokens are
committed or on the path, and one formula of floats follows.

In this order, with the meanings of vLLM: allowed tokens, bad words, minimum and biases, then penalties. What
is forbidden is -inf and stays so, whatever is added or multiplied: masks may come at the end.

Shapes: B slots, N nodes, D draft depth, W bad words, L tokens of the longest, H = max(L - 1, 0), V vocabulary
(of logits a device's own part, see `pallas_kernels.shards`; of what slots keep, all of it).
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jetspec_jax.sampling.allowed import contains
from jetspec_jax.sampling.choice import own_part
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.token_sets import packed
from pallas_kernels import shards

#: Most bad words of a request, as token sequences, and most tokens of one.
MOST_BAD_WORDS, MOST_WORD_TOKENS = 1024, 64
# No token: unused places of bad words, and what was before the output began.
_NONE = -1


def room_for(bad_words: Sequence[Sequence[int]]) -> tuple[int, int]:
    """W and L that hold some bad words: powers of two, so that few programs serve all."""
    longer = [len(word) for word in bad_words if len(word) > 1]
    return (1 << (len(longer) - 1).bit_length(), 1 << (max(longer) - 1).bit_length()) if longer else (0, 0)


class History(NamedTuple):
    """The output of B slots so far: all but what is committed as the prompt, the roots of the trees included.

    Attributes:
        emitted: How many tokens.
        counts: How often each token is among them.
        recent: The last H of them, the latest first; -1 where there were none.
    """

    emitted: Int32[Array, "B"]
    counts: Int32[Array, "B V"]
    recent: Int32[Array, "B H"]

    def extended(self, tokens: Int[Array, "B R"], count: Int[Array, "B"]) -> "History":
        """After the first ``count[b]`` of some more tokens; those beyond are negative."""
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
    """What B slots' requests want of the logits, and what that needs to know of their tokens.

    Attributes:
        wanted: Whether the slot's request wants any; if not, the other arrays have no meaning.
        presence: Penalty of tokens that are in the output.
        frequency: Penalty for each time that a token is in the output.
        repetition: What positive logits of tokens in prompt or output are divided by, others multiplied.
        bias: What is added; -inf for tokens that are never allowed.
        prompt: Packed set of the prompt's tokens.
        endings: Packed set of the tokens that are forbidden before ``min_tokens``.
        min_tokens: Tokens that must be there before one of these.
        words: Bad words of two tokens and more, the last token first; -1 beyond.
        history: The output so far.
    """

    wanted: Bool[Array, "B"]
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
    def empty(cls, slots: int, vocab_size: int, words: tuple[int, int]) -> "Adjustments":
        """Of slots whose requests want none; ``words`` is W and L."""
        of_slots = jnp.zeros(slots, jnp.float32)
        numbers = jnp.zeros(slots, jnp.int32)
        bits = jnp.zeros((slots, -(-vocab_size // 32)), jnp.uint32)
        return cls(
            wanted=jnp.zeros(slots, bool),
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

    def with_room_for(self, words: tuple[int, int]) -> "Adjustments":
        """The same with room for more bad words: of those that are there none becomes longer."""
        _, count, longest = self.words.shape
        more = (0, 0), (0, words[0] - count), (0, words[1] - longest)
        later = (0, 0), (0, max(words[1] - 1, 0) - self.history.recent.shape[1])
        recent = jnp.pad(self.history.recent, later, constant_values=_NONE)
        return self._replace(
            words=jnp.pad(self.words, more, constant_values=_NONE),
            history=self.history._replace(recent=recent),
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
        words: tuple[int, int] = (0, 0),
    ) -> "Adjustments":
        """One request's, as NumPy values without the slot axis.

        Args:
            params: The request's sampling parameters.
            vocab_size: V.
            prompt: Tokens of its prompt.
            output: Tokens that it has got already.
            endings: Tokens that are forbidden before ``min_tokens``.
            bad_words: Tokens of each bad word.
            words: W and L, which hold the bad words of two tokens and more.

        Raises:
            ValueError: They do not hold them.
        """
        bias = np.zeros(vocab_size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[np.asarray(params.allowed_token_ids)] = 0
        for token, own in dict(params.logit_bias or ()).items():
            bias[token] += np.float32(own)
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
    own: Adjustments,
) -> Float32[Array, "B N V"]:
    """The logits that a token is chosen by; those of slots that want nothing are as they were.

    Args:
        logits: The target's, of any floating type.
        paths: Tokens of each node and of its ancestors below the root, the node's own first; -1 beyond.
        depths: How many these are.
        own: What the slots want.
    """
    # Of this device's part of the vocabulary.
    size = logits.shape[-1]
    token = jnp.arange(size, dtype=jnp.int32) + size * shards.index()
    each_slot = jnp.broadcast_to(token[None, :], (logits.shape[0], size))

    def of_slots(numbers: Array) -> Array:
        return numbers[:, None, None]

    values = logits.astype(jnp.float32)
    counts = own_part(own.history.counts, size)[:, None, :]
    for place in range(paths.shape[2]):
        counts = counts + (paths[:, :, place, None] == token[None, None, :])
    present = counts > 0
    seen = present | contains(own.prompt, each_slot)[:, None, :]

    biased = values + own_part(own.bias, size)[:, None, :]
    by_repetition = of_slots(own.repetition)
    repeated = jnp.where(biased > 0, biased / by_repetition, biased * by_repetition)
    penalised = jnp.where(seen, repeated, biased)
    penalised = penalised - of_slots(own.frequency) * counts - of_slots(own.presence) * present
    early = own.history.emitted[:, None] + depths < own.min_tokens[:, None]
    too_early = early[:, :, None] & contains(own.endings, each_slot)[:, None, :]
    penalised = jnp.where(too_early, -jnp.inf, penalised)

    if own.words.shape[1]:
        completes = _last_of_bad_words(paths, depths, own) - size * shards.index()
        place = jnp.where((completes >= 0) & (completes < size), completes, size)
        slot = jnp.arange(place.shape[0], dtype=jnp.int32)[:, None, None]
        node = jnp.arange(place.shape[1], dtype=jnp.int32)[None, :, None]
        penalised = penalised.at[slot, node, place].set(-jnp.inf, mode="drop")
    return jnp.where(of_slots(own.wanted), penalised, values)


def _last_of_bad_words(
    paths: Int32[Array, "B N D"], depths: Int[Array, "B N"], own: Adjustments
) -> Int32[Array, "B N W"]:
    """The token that would complete each bad word at each node; a negative number where none would.

    A word is all but complete where its tokens before the last are the latest: those of the node's path, and
    before them the committed ones::

        words [5, 4, 3], [5, 4, -1] (of which 5 is the last)     latest [4, 3] -> 5, 5
                                                                 latest [4, 7] -> -1, 5
    """
    recent = own.history.recent
    before = jnp.arange(recent.shape[1], dtype=jnp.int32)[None, None, :] - depths[:, :, None]
    committed = jnp.take_along_axis(recent[:, None, :], jnp.maximum(before, 0), axis=2)
    on_path = jnp.pad(paths, ((0, 0), (0, 0), (0, recent.shape[1])), constant_values=_NONE)
    latest = jnp.where(before >= 0, committed, on_path[:, :, : recent.shape[1]])
    rest = own.words[:, None, :, 1:]
    matches = jnp.all((rest == _NONE) | (rest == latest[:, :, None, :]), axis=3)
    return jnp.where(matches, own.words[:, None, :, 0], _NONE)
