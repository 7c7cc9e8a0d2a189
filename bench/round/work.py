"""What a round cannot do without: the bytes that it must read and the operations that it must compute.

Every phase that runs a model reads that model's parameters once, the keys and values of the context once for
each slot, of recurrent layers each slot's state, of the embedding table only the rows of its tokens, and of
routed experts those that its tokens choose. Logits, masks, norms and what is kept between two kernels are
left out: a lower bound may be too low, never too high.

On a mesh it is the work of one device: an equal part of what the mesh splits, and all of a draft head that it
leaves whole.

Shapes: B slots, S committed tokens, N nodes, D draft depth.
"""

from collections.abc import Mapping

from jax.sharding import Mesh

from bench.common.floors import Work
from bench.common.shapes import EXPERTS, FEATURES, parameters
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.device.mesh import size_of
from jetspec_jax.device.partition import is_split, spread


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
    """The work of the phases of a round that run a model; a plain step only verifies and settles.

    Args:
        target: The target.
        head: The draft head; None in plain decoding.
        batch: B.
        context: S, of every slot.
        budget: Nodes of a slot's tree.
        itemsize: Bytes of a parameter and of an element of the stores.
        touched: For each layer with routed experts, how many of them the nodes choose, on average.
        mesh: The devices that share the models; None is one.
    """
    target, parts = spread(target, mesh), size_of(mesh)
    lm_head = target.vocab_size * target.hidden_size
    body = parameters(target) - lm_head * (1 if target.tie_word_embeddings else 2)
    rows = batch * budget
    serving, chosen = _experts(target, touched or {})
    body -= parameters(target, EXPERTS)
    work = {
        "verify": _part(
            parts,
            itemsize
            * (body + chosen + lm_head + rows * target.hidden_size + batch * _prefix(target, context))
            + batch * _states(target, itemsize),
            2 * rows * (body + serving + lm_head) + rows * _scores(target, context),
        ),
        # Of each slot's path at least the root is written; a state is read again, and written.
        "settle": _part(parts, itemsize * batch * _token(target) + 2 * batch * _states(target, itemsize), 0),
    }
    if head is None:
        return work
    head_parts = parts if mesh is not None and is_split(head, mesh) else 1
    own = spread(head, mesh)
    features = parameters(own, FEATURES)
    drafts = parameters(own) - features
    # Each layer's keys and values of the features, by the projections that the draft slots use too.
    features += own.layers.hidden_size * _token(own.layers)
    # A tree is no deeper than it has nodes, and a causal head's slots do not know of those after them.
    depth = min(own.depth, budget - 1)
    rows = batch * (1 + (depth if own.causal else own.depth))
    # Embeddings and logits of the drafts are made by the target's tables, in as many parts as the target.
    tables = _part(parts, itemsize * (lm_head + rows * target.hidden_size), 2 * batch * depth * lm_head)
    layers = _part(
        head_parts,
        itemsize * (drafts + batch * _prefix(own.layers, context)),
        2 * rows * drafts + rows * _scores(own.layers, context),
    )
    commit = _part(head_parts, itemsize * (features + batch * _token(own.layers)), 2 * batch * features)
    work["propose"] = _sum(tables, layers)
    work["settle"] = _sum(work["settle"], commit)
    return work


def _part(parts: int, num_bytes: int, operations: int) -> Work:
    """What each of so many devices has of some work."""
    return Work(num_bytes // parts, operations // parts)


def _sum(one: Work, other: Work) -> Work:
    return Work(one.bytes + other.bytes, one.operations + other.operations)


def _experts(config: ModelConfig, touched: Mapping[int, float]) -> tuple[int, int]:
    """Parameters of the experts that serve one token in all layers, and of those that are touched."""
    serving = read = 0
    for index, layer in enumerate(config.layers):
        if layer.experts is not None:
            each = 3 * config.hidden_size * layer.experts.size
            serving += layer.experts.routing.top_k * each
            read += round(touched[index] * each)
    return serving, read


def _token(config: ModelConfig) -> int:
    """Elements of the keys and values of a token, in all layers."""
    return sum(layer.kv_size for layer in config.layers)


def _prefix(config: ModelConfig, context: int) -> int:
    """Elements of a slot's keys and values that its root sees: no other row sees more of them."""
    return sum(layer.kv_size * (_seen(layer.window, context) - 1) for layer in config.layers)


def _scores(config: ModelConfig, context: int) -> int:
    """Operations of one row's attention to the context and itself: products with keys and with values."""
    return sum(4 * layer.num_heads * layer.head_dim * _seen(layer.window, context) for layer in config.layers)


def _states(config: ModelConfig, itemsize: int) -> int:
    """Bytes that a slot keeps in recurrent layers, however long it is."""
    return sum(own.slot_bytes(itemsize) for layer in config.layers if (own := layer.recurrence) is not None)


def _seen(window: int | None, context: int) -> int:
    """How many tokens the row after a context sees, in a window or without one: itself is among them."""
    return context + 1 if window is None else min(window, context + 1)
