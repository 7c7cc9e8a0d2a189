"""The skeleton of a decoder-only target: embed, layers, final norm, logits."""

from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.decoder_layer import DecoderLayer
from jetspec_jax.models.key_table import Key, Skip
from jetspec_jax.models.layers import Mix, Rows, einsum, joined, param
from pallas_kernels import shards


class ForwardOutput(NamedTuple):
    """The result of a forward pass.

    Attributes:
        hidden: Final-normed hidden states. Call `Transformer.logits` for the rows that need logits: a prompt
            chunk needs one row, not a chunk times the vocabulary.
        taps: Outputs of the tapped layers, concatenated; F is 0 without taps.
        stash: Each layer's rows of the block, for a commit: keys and values, or the input of a recurrence.
    """

    hidden: Float[Array, "B N M"]
    taps: Float[Array, "B N F"]
    stash: tuple[Rows, ...]


class Transformer(nnx.Module):
    """A decoder-only language model. Parameter names follow the published checkpoints.

    Attributes:
        LAYER: The class of the layers; the final norm is of the same class as theirs.
        KEYS: The family's key table.
        PREFIXES: The prefix of the table's names, and the alternatives that a file may use for all names:
            text models inside a multimodal one have a longer prefix.
        SKIPPED: Tensors of the family's checkpoints that are not loaded.
        FLOAT32: Paths, as in key tables, of parameters that are always float32.
    """

    LAYER: ClassVar[type[DecoderLayer]] = DecoderLayer
    KEYS: ClassVar[tuple[Key, ...]]
    PREFIXES: ClassVar[tuple[str, ...]] = ("model.",)
    SKIPPED: ClassVar[tuple[Skip, ...]] = ()
    FLOAT32: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.dtype(jnp.float32)):
        self.config = config
        vocab = (config.vocab_size, config.hidden_size)
        self.embed_tokens = param(rngs, vocab, ("vocab", "embed"), dtype)
        self.layers = nnx.List(
            [self.LAYER(config, i, rngs=rngs, dtype=dtype) for i in range(config.num_layers)]
        )
        self.norm = self.LAYER.NORM(config.hidden_size, config.rms_norm_eps, axis="embed", dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = param(rngs, vocab, ("vocab", "embed"), dtype)

    def embed(self, tokens: Int[Array, "B N"], *, scaled: bool = True) -> Float[Array, "B N M"]:
        """Input embeddings, also used for the draft head's slots.

        The family's scale is rounded to the embeddings' dtype.
        """
        table, vocab = self.embed_tokens[...], self.config.vocab_size
        if table.shape[0] == vocab:
            embedded = table[tokens]
        else:
            row = tokens - table.shape[0] * shards.index()
            there = (row >= 0) & (row < table.shape[0])
            # Only one device has the row, so the sum is exact.
            rows = jnp.where(there[:, :, None], table[jnp.where(there, row, 0)], 0)
            embedded = joined(rows, table.shape[0], vocab)
        scale = self.config.embedding_scale
        return embedded * jnp.asarray(scale, embedded.dtype) if scaled and scale != 1.0 else embedded

    def __call__(
        self,
        tokens: Int[Array, "B N"],
        positions: Int[Array, "B N"],
        mix: Mix,
        *,
        taps: tuple[int, ...] = (),
    ) -> ForwardOutput:
        """Runs the layers over a block of tokens; reads stores through ``mix`` and writes nothing.

        ``taps`` are layers (0-based) whose outputs, before the final norm, are returned.
        """
        x, delta = self.embed(tokens), None
        stash, outputs = [], {}
        for i, layer in enumerate(self.layers):
            x, delta, rows = layer(x, delta, positions, mix)
            stash.append(rows)
            if i in taps:
                outputs[i] = x if delta is None else x + delta
        hidden, x = self.norm.after(x, delta)
        tapped = [outputs[i] for i in taps] or [x[:, :, :0]]
        return ForwardOutput(hidden, jnp.concatenate(tapped, axis=-1), tuple(stash))

    def logits(self, hidden: Float[Array, "B N M"], *, capped: bool = True) -> Float[Array, "B N V"]:
        """Logits of final-normed hidden states (of the target or a draft head), in their dtype.

        On a mesh they cover the device's shard of the vocabulary, with -inf as padding. They are the largest
        array of a round, and their readers compute in float32 inside a fusion, so no float32 copy is stored.
        ``capped`` applies the family's logit cap.
        """
        table = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        logits, cap = einsum("bnm,vm->bnv", hidden, table[...]), self.config.logit_softcap
        if capped and cap is not None:
            logits = (cap * jnp.tanh(logits.astype(jnp.float32) / cap)).astype(logits.dtype)
        local, vocab = logits.shape[-1], self.config.vocab_size
        if local * shards.count() > vocab and local != vocab:
            token = local * shards.index() + jnp.arange(local, dtype=jnp.int32)
            logits = jnp.where((token < vocab)[None, None], logits, -jnp.inf)
        return logits
