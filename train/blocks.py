"""Training blocks of a draft head: anchors, slots, teacher rows. Shapes as in `train.attention`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jetspec_jax.models.draft_head import DraftHead
from jetspec_jax.models.transformer import Transformer
from train.attention import block_attend


def sample_anchors(
    key: Key[Array, ""], first: Int[Array, "B"], length: int, count: int, block_size: int
) -> Int[Array, "B A"]:
    """Random anchors, evenly spread: one from each of ``count`` equal parts of the allowed range.

    Args:
        key: Of this step.
        first: Index of each sequence's first token to learn; an anchor is at the token before it or later.
        length: Tokens of a sequence. The last slot of a block lies inside it.
        count: Anchors per sequence. Where it exceeds the range, anchors repeat.
        block_size: Slots per block.
    """
    lowest = jnp.maximum(first - 1, 0)
    room = jnp.maximum(length - block_size - lowest + 1, 1)
    part = jax.random.uniform(key, (first.shape[0], count)) + jnp.arange(count)[None, :]
    offset = jnp.floor(part / count * room[:, None]).astype(jnp.int32)
    return lowest[:, None] + jnp.minimum(offset, room[:, None] - 1)


def block_positions(anchors: Int[Array, "B A"], block_size: int) -> Int[Array, "B A K"]:
    """Absolute positions of the slots; slot 0 is the anchor itself."""
    return anchors[:, :, None] + jnp.arange(block_size)[None, None, :]


def draft_blocks(
    head: DraftHead,
    target: Transformer,
    tokens: Int[Array, "B T"],
    taps: Float[Array, "B T F"],
    anchors: Int[Array, "B A"],
) -> Float[Array, "B A K M"]:
    """Final-normed hidden states of the head's slots at every anchor.

    Args:
        head: The draft head.
        target: Embeds the anchor and the masks.
        tokens: The sequences.
        taps: The target's taps of all their tokens.
        anchors: Indices of the anchors.
    """
    config = head.config
    b, a = anchors.shape
    length, slots = tokens.shape[1], config.block_size
    places = jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape)
    context = head.context(taps, places, head.context_projection())
    anchor_tokens = jnp.take_along_axis(tokens, anchors, axis=1)
    masks = jnp.full((b, a, slots - 1), config.mask_token_id, tokens.dtype)
    block = jnp.concatenate([anchor_tokens[:, :, None], masks], axis=-1).reshape(b, a * slots)
    positions = block_positions(anchors, slots).reshape(b, a * slots)
    attend = block_attend(context, anchors, slots, causal=config.causal)
    hidden = head(target.embed(block).astype(taps.dtype), positions, attend)
    return hidden.reshape(b, a, slots, -1)


def teacher_rows(
    hidden: Float[Array, "B T M"], anchors: Int[Array, "B A"], block_size: int
) -> Float[Array, "B A D M"]:
    """The target's rows that predict what slots 1..D predict.

    The token at position a + k is predicted by the target's row a + k - 1, so slot k of the block at anchor a
    learns from that row: rows a..a+D-1, the anchor's own first.
    """
    rows = block_positions(anchors, block_size)[:, :, :-1]
    b, a, d = rows.shape
    taken = jnp.take_along_axis(hidden, rows.reshape(b, a * d)[:, :, None], axis=1)
    return taken.reshape(b, a, d, hidden.shape[-1])
