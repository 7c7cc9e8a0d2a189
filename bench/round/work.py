"""The least work of a round: the bytes that it must read and the operations that it must compute.

Every phase with a model reads the model's parameters once, each slot's keys and values, each slot's recurrent
states, the embedding rows of its tokens, and the experts that its tokens choose. Logits, masks, norms and
intermediate results are left out: a lower bound may be too low, never too high.

On a mesh it is the work of one device: an equal part of sharded models, and all of a replicated draft head.

Shapes: B slots, S committed tokens, N nodes, D draft depth.
"""

from collections.abc import Mapping

from jax.sharding import Mesh

from bench.common.floors import Work
from bench.common.shapes import EXPERTS, FEATURES, parameters, quantized
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.device.mesh import size_of
from jetspec_jax.device.partition import is_split, spread
from jetspec_jax.tree import DEFAULT_ALGORITHM, breadth_of


def round_work(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    *,
    batch: int,
    context: int,
    budget: int,
    itemsize: int,
    touched: Mapping[int, float] | None = None,
    mesh: Mesh | None = None,
) -> dict[str, Work]:
    """The work of a round's phases with a model; a plain step only verifies and settles.

    Args:
        head: The draft head; None in plain decoding.
        batch: B.
        context: S, of every slot.
        budget: Nodes per tree.
        itemsize: Bytes of a parameter that is not quantised, and of an element of the stores.
        touched: The mean number of experts that the nodes choose, for each layer with experts.
        mesh: The devices that share the models; None is one device.
    """
    target, parts = spread(target, mesh), size_of(mesh)
    lm_head = target.vocab_size * target.hidden_size
    body = parameters(target) - lm_head * (1 if target.tie_word_embeddings else 2)
    rows = batch * budget
    serving, chosen = _experts(target, touched or {})
    body -= parameters(target, EXPERTS)
    saved = _saved(target, chosen, itemsize)
    work = {
        "verify": _part(
            parts,
            itemsize
            * (body + chosen + lm_head + rows * target.hidden_size + batch * _prefix(target, context))
            + batch * _states(target, itemsize)
            - saved,
            2 * rows * (body + serving + lm_head) + rows * _scores(target, context),
        ),
        # At least the root of each slot's path is written. A recurrent state is read again and written.
        "settle": _part(parts, itemsize * batch * _token(target) + 2 * batch * _states(target, itemsize), 0),
    }
    if head is None:
        return work
    head_parts = parts if mesh is not None and is_split(head, mesh) else 1
    local = spread(head, mesh)
    features = parameters(local, FEATURES)
    # Of a selector's codebooks only the rows of candidates are read.
    selector, codebooks = local.selector, 0
    if selector is not None:
        codebooks = 2 * local.layers.vocab_size * selector.rank
    drafts = parameters(local) - features - codebooks
    # Context features become keys and values by projections that draft slots use too.
    features += local.layers.hidden_size * _token(local.layers)
    # A tree's depth is below its number of nodes, and a causal head needs no slots below that depth.
    depth = min(local.depth, budget - 1)
    rows = batch * (1 + (depth if local.causal else local.depth))
    # Embeddings and logits of the drafts use the target's tables, which are sharded like the target.
    tables = _part(parts, itemsize * (lm_head + rows * target.hidden_size), 2 * batch * depth * lm_head)
    layers = _part(
        head_parts,
        itemsize * (drafts + batch * _prefix(local.layers, context)),
        2 * rows * drafts + rows * _scores(local.layers, context),
    )
    if selector is not None:
        candidates = breadth_of(DEFAULT_ALGORITHM, None, None, selector.candidates).candidates
        looked_up = batch * depth * candidates * selector.rank
        pairs = _part(head_parts, itemsize * 2 * looked_up, 2 * looked_up * candidates)
        layers = _sum(layers, pairs)
    commit = _part(head_parts, itemsize * (features + batch * _token(local.layers)), 2 * batch * features)
    work["propose"] = _sum(tables, layers)
    work["settle"] = _sum(work["settle"], commit)
    return work


def _part(parts: int, num_bytes: int, operations: int) -> Work:
    """The work of each of ``parts`` devices."""
    return Work(num_bytes // parts, operations // parts)


def _sum(one: Work, other: Work) -> Work:
    return Work(one.bytes + other.bytes, one.operations + other.operations)


def _experts(config: ModelConfig, touched: Mapping[int, float]) -> tuple[int, int]:
    """Parameters of one token's experts, and of all chosen experts, over all layers."""
    serving = read = 0
    for index, layer in enumerate(config.layers):
        if layer.experts is not None:
            each = 3 * config.hidden_size * layer.experts.size
            serving += layer.experts.routing.top_k * each
            read += round(touched[index] * each)
    return serving, read


def _saved(config: ModelConfig, chosen: int, itemsize: int) -> int:
    """Bytes that quantisation saves, with ``chosen`` parameters of experts read."""
    experts, width = quantized(config, EXPERTS)
    others = quantized(config, frozenset({"layers"}))[0] - experts
    return round((itemsize - width) * (others + (chosen if experts else 0)))


def _token(config: ModelConfig) -> int:
    """Elements of a token's keys and values in all layers."""
    return sum(layer.kv_size for layer in config.layers)


def _prefix(config: ModelConfig, context: int) -> int:
    """Elements of the committed keys and values that a slot's root attends to; other rows see no more."""
    return sum(layer.kv_size * (_seen(layer.window, context) - 1) for layer in config.layers)


def _scores(config: ModelConfig, context: int) -> int:
    """Operations of one row's attention to the context and itself: products with keys and values."""
    return sum(4 * layer.num_heads * layer.head_dim * _seen(layer.window, context) for layer in config.layers)


def _states(config: ModelConfig, itemsize: int) -> int:
    """Bytes of a slot's recurrent states."""
    return sum(
        layer.recurrence.slot_bytes(itemsize) for layer in config.layers if layer.recurrence is not None
    )


def _seen(window: int | None, context: int) -> int:
    """The number of tokens that the row after a context attends to, itself included."""
    return context + 1 if window is None else min(window, context + 1)
