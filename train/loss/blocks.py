"""Training blocks of a draft head: anchors, slots and labels. Shapes as in `train.loss.attention`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.models.draft_head import DraftHead
from jetspec_jax.models.transformer import Transformer
from train.loss.block_attention import block_attend
from train.loss.teacher import Teacher


class Lessons(NamedTuple):
    """Labels of the slots after the anchors; slot k of the block at anchor a drafts the token at a + k.

    Attributes:
        rows: Index of the target's row that predicts the same token: a + k - 1.
        labels: The text's token at a + k.
        learn: Whether the slot counts: its token and all tokens between it and the anchor must be tokens to
            learn, because decoding never drafts after a token that the target did not write.
    """

    rows: Int[Array, "B A D"]
    labels: Int[Array, "B A D"]
    learn: Bool[Array, "B A D"]


def learnable(learn: Bool[Array, "B T"], starts: Int[Array, "B T"] | None) -> Bool[Array, "B T"]:
    """The tokens to learn, except documents' first tokens, which have no context.

    So no anchor is before another document's first token, and no block crosses the end of its document.
    """
    places = jnp.arange(learn.shape[1])[None, :]
    return learn & (places > (0 if starts is None else starts))


def sample_anchors(key: Key[Array, ""], learn: Bool[Array, "B T"], count: int) -> Int[Array, "B A"]:
    """Draws anchors, in order and evenly spread, from the tokens that precede a token to learn.

    One is drawn from each of ``count`` equal parts of these tokens. If ``count`` exceeds their number, all
    repeat about equally often; in a sequence without tokens to learn, all anchors are 0.
    """
    before = jnp.pad(learn[:, 1:], ((0, 0), (0, 1)))
    ends = jnp.cumsum(before.astype(jnp.int32), axis=1)
    number = ends[:, -1:]
    part = jnp.arange(count)[None, :] + jax.random.uniform(key, (learn.shape[0], count))
    rank = jnp.minimum(jnp.floor(part / count * number).astype(jnp.int32), number - 1)
    anchors = jax.vmap(lambda ends, rank: jnp.searchsorted(ends, rank, side="right"))(ends, rank)
    return jnp.where(number > 0, anchors, 0).astype(jnp.int32)


def count_anchors(anchors: Int[Array, "B A"], learn: Bool[Array, "B T"]) -> Int[Array, ""]:
    """The number of distinct anchors of `sample_anchors`, which are sorted within a sequence."""
    new = jnp.concatenate([jnp.ones_like(anchors[:, :1], bool), anchors[:, 1:] > anchors[:, :-1]], axis=1)
    return jnp.sum(new & jnp.any(learn[:, 1:], axis=1, keepdims=True))


def lessons(
    tokens: Int[Array, "B T"], learn: Bool[Array, "B T"], anchors: Int[Array, "B A"], block_size: int
) -> Lessons:
    """The labels of the blocks at some anchors.

    Tokens ``a b C D e F``, capitals to learn, and blocks of 4 slots::

        anchor   slot 1    slot 2    slot 3
        b        C yes     D yes     e no
        D        e no      F no      (end)
    """
    b, a = anchors.shape
    length = tokens.shape[1]
    places = block_positions(anchors, block_size)[:, :, 1:]
    inside = jnp.minimum(places, length - 1)

    def at(x: Array) -> Array:
        return jnp.take_along_axis(x, inside.reshape(b, -1), axis=1).reshape(b, a, -1)

    taught = jnp.cumprod((at(learn) & (places < length)).astype(jnp.int32), axis=-1).astype(bool)
    return Lessons(jnp.minimum(places - 1, length - 1), at(tokens), taught)


def block_positions(anchors: Int[Array, "B A"], block_size: int) -> Int[Array, "B A K"]:
    """Absolute positions of the slots; slot 0 is the anchor itself."""
    return anchors[:, :, None] + jnp.arange(block_size)[None, None, :]


def draft_blocks(
    head: DraftHead,
    target: Transformer | Teacher,
    tokens: Int[Array, "B T"],
    taps: Float[Array, "B T F"],
    anchors: Int[Array, "B A"],
    *,
    starts: Int[Array, "B T"] | None = None,
    remat: bool = False,
) -> Float[Array, "B A K M"]:
    """Final-normed hidden states of the head's slots at every anchor.

    Args:
        target: Embeds the anchor and the masks.
        tokens: The sequences.
        taps: The target's taps at all tokens.
        anchors: Indices of the anchors.
        starts: In packed sequences, for each token the index of its document's first token.
        remat: Whether the backward pass recomputes each layer.
    """
    config = head.config
    b, a = anchors.shape
    length, slots = tokens.shape[1], config.block_size
    places = jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape)
    begins = None if starts is None else jnp.take_along_axis(starts, anchors, axis=1)
    context = head.context(taps, places if starts is None else places - starts, head.context_projection())
    anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1)
    masks = jnp.full((b, a, slots - 1), config.mask_token_id, tokens.dtype)
    block = jnp.concatenate([anchor_tokens[:, :, None], masks], axis=-1).reshape(b, a * slots)
    positions = block_positions(anchors if begins is None else anchors - begins, slots).reshape(b, a * slots)
    attend = block_attend(context, anchors, slots, causal=config.causal, starts=begins)
    embedded = target.embed(block, scaled=config.scaled_embeddings).astype(taps.dtype)
    hidden = head(embedded, positions, attend, remat=remat)
    return hidden.reshape(b, a, slots, -1)
