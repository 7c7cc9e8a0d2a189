"""Forward passes for inspection: logits and hidden states of a sequence, of a token tree, of the draft head.

They run the same modules, stores and proposer as decoding.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Float, Int

from jetspec_jax.arguments import check_integer, check_type, shown
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import chain_path, commit, empty_stores
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.config import ModelConfig, check_head_fits
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.device.mesh import WHOLE, everywhere, without_mesh
from jetspec_jax.device.partition import is_split, own_part, parameter_specs
from jetspec_jax.device.processes import compare, spans
from jetspec_jax.engine.admission import check_models
from jetspec_jax.engine.prompts import check_ids
from jetspec_jax.models import Transformer, Weights, bind
from jetspec_jax.models.transformer import ForwardOutput
from jetspec_jax.tree import TokenTree
from pallas_kernels import shards

#: Token ids ``[B, T]``: an array, or lists of one length.
TokenIds = ArrayLike | Sequence[Sequence[int]]


@without_mesh
def logits(target: Target, token_ids: TokenIds) -> Float[Array, "B T V"]:
    """float32 logits of whole sequences: row t is the distribution of token t + 1.

    Args:
        target: The target.
        token_ids: ``[B, T]``, at least one token each.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The ids are misshapen or out of range.
    """
    check_models(target, None)
    return _logits(target.config, target.mesh, target.weights, _ids(target, token_ids, "token_ids", least=1))


@without_mesh
def hidden_states(
    target: Target, token_ids: TokenIds, *, layers: Sequence[int] | None = None
) -> Float[Array, "*L B T M"]:
    """float32 hidden states of whole sequences: what the output head reads, or the outputs of some layers.

    Args:
        target: The target.
        token_ids: ``[B, T]``, at least one token each.
        layers: None gives the final-normed states ``[B, T, M]``. Numbers of layers, 0-based, give the outputs
            ``[L, B, T, M]`` of these layers, before the final norm: ``hidden_states[i + 1]`` of transformers,
            except that its last one is normed.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The ids are misshapen or out of range, or there is no such layer.
    """
    check_models(target, None)
    last = target.config.num_layers - 1
    if layers is not None:
        check_type("layers", layers, Sequence, "numbers of layers or None")
        layers = tuple(check_integer(f"layers[{n}]", layer, 0, last) for n, layer in enumerate(layers))
    ids = _ids(target, token_ids, "token_ids", least=1)
    return _hidden_states(target.config, target.mesh, layers, target.weights, ids)


@without_mesh
def next_token_logits(target: Target, token_ids: Sequence[int]) -> Float[Array, "1 1 V"]:
    """float32 logits of the token after a sequence; one program serves all lengths up to a power of two.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The ids are misshapen or out of range.
    """
    ids = _ids(target, [list(token_ids)], "token_ids", least=1)
    count = ids.shape[1]
    ids = np.pad(ids, ((0, 0), (0, (1 << (count - 1).bit_length()) - count)))
    return _logits(target.config, target.mesh, target.weights, ids, np.int32(count))


@without_mesh
def tree_logits(target: Target, prefix_ids: TokenIds, tree: TokenTree) -> Float[Array, "B N V"]:
    """float32 logits of every node of a token tree after a committed prefix.

    Args:
        target: The target.
        prefix_ids: ``[B, S]``, without the anchor; S may be 0.
        tree: Trees whose node 0 is the anchor. Ignore the rows of padding nodes.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The ids are misshapen or out of range.
    """
    check_models(target, None)
    check_type("tree", tree, TokenTree, "a TokenTree")
    prefix = _ids(target, prefix_ids, "prefix_ids", least=0)
    tokens = _ids(target, tree.tokens, "tree.tokens", least=1)
    if tokens.shape[0] != prefix.shape[0]:
        raise ValueError(f"{prefix.shape[0]} prefixes for {tokens.shape[0]} trees")
    if spans(target.mesh):
        compare({"tree.parents": np.asarray(tree.parents).tolist()}, "a forward", "a forward")
    tree = jax.tree.map(np.asarray, tree)
    return _tree_logits(target.config, target.mesh, target.weights, prefix, tree)


@without_mesh
def draft_logits(target: Target, draft_head: Head, token_ids: TokenIds) -> Float[Array, "B D V"]:
    """float32 draft logits below the last token of each sequence: row d drafts the token at depth d + 1.

    Args:
        target: The target.
        draft_head: A head for the target.
        token_ids: ``[B, T]``; the last token is the anchor, all others are the context.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The head does not fit, or the ids are misshapen or out of range.
    """
    check_models(target, None)
    check_type("the draft head", draft_head, Head, "a Head, as load_draft_head returns it")
    check_head_fits(draft_head.config, target.config)
    ids = _ids(target, token_ids, "token_ids", least=1)
    proposer = DraftHeadProposer(draft_head.config)
    models = target.config, target.mesh, proposer
    return _draft_logits(*models, target.weights, draft_head.weights, ids)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _logits(
    config: ModelConfig,
    mesh: Mesh | None,
    weights: Weights,
    ids: Int[Array, "B T"],
    count: Int[Array, ""] | None = None,
) -> Float[Array, "B t V"]:
    """Logits of all tokens, or of the last of ``count``, which does not attend to the padding behind it."""

    def run(weights: Weights, ids: Int[Array, "B T"], count: Int[Array, ""] | None) -> Float[Array, "B t V"]:
        target = bind(config, weights)
        hidden = _forward(target, ids).hidden
        if count is not None:
            hidden = jax.lax.dynamic_slice_in_dim(hidden, count - 1, 1, axis=1)
        return target.logits(hidden).astype(jnp.float32)

    return _together(config, mesh, run)(weights, ids, count)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _hidden_states(
    config: ModelConfig,
    mesh: Mesh | None,
    layers: tuple[int, ...] | None,
    weights: Weights,
    ids: Int[Array, "B T"],
) -> Float[Array, "*L B T M"]:
    def run(weights: Weights, ids: Int[Array, "B T"]) -> Float[Array, "*L B T M"]:
        hidden, taps, _ = _forward(bind(config, weights), ids, taps=layers or ())
        if layers is not None:
            hidden = jnp.moveaxis(taps.reshape(*ids.shape, len(layers), config.hidden_size), 2, 0)
        return hidden.astype(jnp.float32)

    if mesh is not None:
        run = everywhere(mesh, run, (parameter_specs(config, mesh), WHOLE), WHOLE)
    return run(weights, ids)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _tree_logits(
    config: ModelConfig, mesh: Mesh | None, weights: Weights, prefix: Int[Array, "B S"], tree: TokenTree
) -> Float[Array, "B N V"]:
    def run(weights: Weights, prefix: Int[Array, "B S"], tree: TokenTree) -> Float[Array, "B N V"]:
        target = bind(config, weights)
        local = own_part(config, mesh)
        stores, slots = _one_page_each(local, prefix, target.embed_tokens[...].dtype)
        if prefix.shape[1]:
            stash = _forward(target, prefix).stash
            count = jnp.full(prefix.shape[:1], prefix.shape[1], jnp.int32)
            stores = commit(stores, slots, stash, chain_path(*prefix.shape), count)
            slots = slots._replace(lengths=slots.lengths + prefix.shape[1])
        block = Block.of_tree(tree)
        attend = attend_over(stores, slots, block)
        hidden = target(block.tokens, block.positions(slots.lengths), attend).hidden
        return target.logits(hidden).astype(jnp.float32)

    return _together(config, mesh, run)(weights, prefix, tree)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _draft_logits(
    config: ModelConfig,
    mesh: Mesh | None,
    proposer: DraftHeadProposer,
    weights: Weights,
    head_weights: Weights,
    ids: Int[Array, "B T"],
) -> Float[Array, "B D V"]:
    def run(weights: Weights, ids: Int[Array, "B T"], head_weights: Weights) -> Float[Array, "B D V"]:
        target = bind(config, weights)
        context, head = ids[:, :-1], proposer.config
        local = own_part(head.layers, mesh if mesh and is_split(head, mesh) else None)
        state, slots = _one_page_each(local, ids, target.embed_tokens[...].dtype)
        if context.shape[1]:
            taps = _forward(target, context, taps=proposer.taps).taps
            count = jnp.full(context.shape[:1], context.shape[1], jnp.int32)
            state = proposer.commit(head_weights, state, taps, slots, count)
            slots = slots._replace(lengths=slots.lengths + count)
        return proposer.propose(head_weights, state, target, ids[:, -1], slots).astype(jnp.float32)

    specs = () if mesh is None else (proposer.weight_specs(mesh),)
    return _together(config, mesh, run, *specs)(weights, ids, head_weights)


def _together(
    config: ModelConfig, mesh: Mesh | None, run: Callable[..., Array], *last: Any
) -> Callable[..., Float[Array, "B N V"]]:
    """Runs a function of the target's weights and replicated arrays on all devices, and joins its logits.

    ``last`` are specs of the last arguments if they are not replicated.
    """
    if mesh is None:
        return run

    def together(weights: Weights, *others: Any) -> Float[Array, "B N V"]:
        whole = [WHOLE] * (len(others) - len(last))
        specs = parameter_specs(config, mesh), *whole, *last
        logits = everywhere(mesh, run, specs, PartitionSpec(None, None, shards.ALL))(weights, *others)
        logits = logits[:, :, : config.vocab_size]
        if spans(mesh):  # each process needs all logits
            logits = jax.lax.with_sharding_constraint(logits, NamedSharding(mesh, WHOLE))
        return logits

    return together


def _forward(target: Transformer, ids: Int[Array, "B T"], *, taps: tuple[int, ...] = ()) -> ForwardOutput:
    """The target's forward over whole sequences, without committed tokens."""
    block = Block.chain(ids)
    return target(ids, block.depths, attend_over(None, None, block), taps=taps)


def _one_page_each(config: ModelConfig, ids: Int[Array, "B T"], dtype: jnp.dtype) -> tuple[Any, Slots]:
    """Empty stores and slots with one page per sequence, large enough for the sequence."""
    batch, length = ids.shape
    slots = Slots.of(jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.zeros(batch, jnp.int32))
    return empty_stores(config, batch, max(length, 1), dtype, slots), slots


def _ids(target: Target, ids: TokenIds, name: str, *, least: int) -> Int[np.ndarray, "B T"]:
    """Checks token ids, also that they are equal in all processes that share the target."""
    if isinstance(ids, str) or not (isinstance(ids, Sequence) or np.ndim(ids)):
        raise TypeError(f"{name} must be rows of token ids, [B, T], not {shown(ids)}")
    given: Any = ids
    rows = [check_ids(row, f"{name}[{number}]", target.config.vocab_size) for number, row in enumerate(given)]
    lengths = sorted({len(row) for row in rows})
    if len(lengths) != 1:
        problem = f"not of {', '.join(map(str, lengths))} tokens" if rows else "and there is none"
        raise ValueError(f"{name} must be rows of one length, {problem}")
    if lengths[0] < least:
        raise ValueError(f"{name} must have at least {least} token in each row")
    found = np.stack(rows)
    if spans(target.mesh):
        compare({name: found.tolist()}, "a forward", "a forward")
    return found
