"""A selector in training: its initial weights, and the assembly of head and selector into a checkpoint.

A codebook of V x r free parameters overfits. So in training it is a projection of the target's embedding plus
a free table that learns slowly: ``A[u] = e(u) Wa + rate * F[u]``, where e(u) is the embedding of u with a
mean square of 1. Wa is random at first, F and all of B are 0, so a new selector changes no tree. Checkpoints
have plain codebooks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jetspec_jax.config import ModelConfig
from jetspec_jax.device.sharding import parameter_shardings
from jetspec_jax.models import Weights
from jetspec_jax.models.layers import einsum
from train.head.recipe import HeadRecipe, SelectorSettings
from train.head.start import Beginning
from train.loop.mesh import replicated, spread
from train.loss.distillation import distillation_loss
from train.loss.objectives import Loss, Means
from train.loss.precision import whole
from train.loss.selection import selection_loss

#: The parameters of a selector with a row per token.
CODEBOOKS = ("predecessors", "successors")

# Added to the mean square of embeddings, because some are all zeros.
_EPSILON = 1e-12


class Trainee(NamedTuple):
    """The trained and frozen parameters of a run, and their losses.

    Attributes:
        weights: The initial trained parameters, float32.
        shardings: Their shardings.
        frozen: The frozen parameters that the loss reads, on the mesh.
        loss: The training loss, a function of trained and frozen parameters.
        head_loss: The same loss as a function of a head's weights and the target's.
        assemble: Makes a head's float32 weights from trained and frozen parameters.
    """

    weights: Weights
    shardings: Any
    frozen: Any
    loss: Loss
    head_loss: Loss
    assemble: Callable[[Weights, Any], Weights]


def trainee_of(
    beginning: Beginning,
    recipe: HeadRecipe,
    target: ModelConfig,
    frozen: Weights,
    mesh: Mesh,
    dtype: jnp.dtype,
) -> Trainee:
    """The trainee of a recipe: a head, its selector, or both.

    Args:
        beginning: The initial head.
        frozen: The target's weights on the mesh.
        dtype: Dtype of both forward passes.
    """
    config, settings = beginning.config, recipe.selector
    shardings = parameter_shardings(config, mesh)
    if settings is None:
        loss = distillation_loss(config, target, recipe.objective, dtype, remat=recipe.remat)
        return Trainee(beginning.weights, shardings, frozen, loss, loss, lambda weights, _: weights)
    head = {name: value for name, value in beginning.weights.items() if name != "selector"}
    of_head = {name: value for name, value in shardings.items() if name != "selector"}
    first = first_selector(beginning, settings, recipe.seed)
    weights: Weights = {"selector": first}
    placed: Weights = {"selector": jax.tree.map(lambda _: replicated(mesh), first)}
    fixed: Weights = {"target": frozen}
    if "selector" in beginning.weights:
        base = {name: beginning.weights["selector"][name] for name in CODEBOOKS}
        fixed["codebooks"] = spread(base, replicated(mesh))
    if settings.joint:
        weights, placed = {**weights, "head": head}, {**placed, "head": of_head}
    else:
        fixed["head"] = spread(head, of_head)
    loss = selection_loss(
        config,
        target,
        recipe.objective,
        dtype,
        loss=settings.loss,
        temperature=settings.temperature,
        joint=settings.weight if settings.joint else None,
        remat=recipe.remat,
    )
    assemble = partial(assembled, rate=settings.table_rate)

    def of_trained(weights: Weights, frozen: Any, batch: Any, key: Any) -> Means:
        return loss(assemble(weights, frozen), frozen["target"], batch, key)

    return Trainee(weights, placed, fixed, of_trained, loss, assemble)


def first_selector(beginning: Beginning, settings: SelectorSettings, seed: int) -> Weights:
    """The initial trained parameters of a selector; a continued selector keeps only its gate."""
    size, vocabulary = beginning.config.layers.hidden_size, beginning.config.layers.vocab_size
    existing, norm = beginning.weights.get("selector"), beginning.weights["norm"]["weight"]
    zeros = jnp.zeros((size, settings.rank), jnp.float32)
    of_parents, of_gate = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1))
    # A parent's row has entries of unit variance, and with its gate, which reads normed states, unit length.
    parents = jax.random.normal(of_parents, zeros.shape) / size**0.5
    gate = jax.random.normal(of_gate, zeros.shape) / (settings.rank * jnp.sum(jnp.square(norm))) ** 0.5
    begun = {"predecessors": parents, "successors": zeros}
    if existing is not None:
        # Copied, because training donates the weights.
        gate, begun = jnp.array(existing["hidden_projection"]), dict.fromkeys(CODEBOOKS, zeros)
    tables: Weights = {}
    for name in CODEBOOKS:
        tables[name] = {"projection": jnp.array(begun[name])}
        if settings.table_rate:
            tables[name]["table"] = jnp.zeros((vocabulary, settings.rank), jnp.float32)
    return {"hidden_projection": gate, **tables}


def assembled(weights: Weights, frozen: Any, *, rate: float) -> Weights:
    """A head's weights with plain codebooks.

    Args:
        weights: "selector" as `first_selector` makes it, and in a joint stage "head".
        frozen: "target", "head" unless it is trained, and "codebooks" to which those that are trained are
            added, if there are some.
        rate: The factor of the free tables.
    """
    read = whole({"trained": weights["selector"], "embedding": frozen["target"]["embed_tokens"]})
    trained, embedding = read["trained"], read["embedding"]
    scale = jax.lax.rsqrt(jnp.mean(jnp.square(embedding.astype(jnp.float32)), axis=1) + _EPSILON)
    selector = {
        "hidden_projection": trained["hidden_projection"],
        **{name: _codebook(trained[name], embedding, scale, rate) for name in CODEBOOKS},
    }
    if "codebooks" in frozen:
        selector |= {name: selector[name] + frozen["codebooks"][name] for name in CODEBOOKS}
    head = weights["head"] if "head" in weights else frozen["head"]
    return {**head, "selector": selector}


def _codebook(
    trained: Weights, embedding: Float[Array, "V M"], scale: Float32[Array, "V"], rate: float
) -> Float32[Array, "V r"]:
    projected = einsum("vm,mr->vr", embedding, trained["projection"], wide=True) * scale[:, None]
    return projected + rate * trained["table"] if "table" in trained else projected
