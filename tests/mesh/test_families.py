"""Every family's forwards on meshes: those of one device, but for the order of sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import Head, Target, draft_logits, hidden_states, logits, tree_logits
from jetspec_jax.tree import TokenTree
from tests.decode.tiny import random_weights
from tests.float64 import rounding_of
from tests.marks import wide
from tests.mesh.tiny import DENSE, MIXTURES, VOCAB, config_of, head_config, on_mesh
from tests.meshes import mesh_of

# Without recurrent layers, at these lengths, roundings come to 1e-5 on either side.
TOLERANCE = 1e-4
# Beyond the windows of 8.
IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 19)).astype(np.int32)
DEFAULT = {("gpt_oss", (2, 4)), ("qwen3_5", (1, 2))}
# Each family on the mesh that splits it most, and one of each kind on all.
CASES = [("gpt_oss", mesh) for mesh in ((1, 2), (1, 8), (8, 1))] + [("qwen3_5", (1, 2))]
CASES += [*((family, (2, 4)) for family in MIXTURES), *((family, (1, 8)) for family in DENSE)]


@functools.cache
def pair(family, splits=True):
    config = config_of(family)
    head = head_config(config, splits=splits)
    return Target(config, random_weights(config, 0)), Head(head, random_weights(head, 1))


def a_tree():
    """Two trees of six nodes, of which the second has four."""
    parents = jnp.array([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, -1, -1]], jnp.int32)
    depths = jnp.array([[0, 1, 1, 2, 2, 2], [0, 1, 2, 3, 0, 0]], jnp.int32)
    tokens = np.random.default_rng(1).integers(0, VOCAB, parents.shape)
    return TokenTree(
        jnp.asarray(tokens, jnp.int32),
        parents,
        depths,
        jnp.zeros(parents.shape),
        jnp.array([6, 4], jnp.int32),
    )


def forwards(target, head):
    tree = tree_logits(target, IDS, a_tree())
    return [
        np.asarray(each)
        for each in (logits(target, IDS), tree[0], tree[1, :4], draft_logits(target, head, IDS))
    ]


@functools.cache
def of_one_device(family):
    """Logits, and how far each row of them may be off."""
    target, head = pair(family)
    rows = forwards(target, head)
    if not any(layer.recurrence for layer in target.config.layers):
        return rows, [np.full(own.shape[:-1], TOLERANCE) for own in rows]
    rounding = rounding_of(
        lambda weights: forwards(Target(target.config, weights), head),
        target.weights,
        target.config.hidden_size,
    )
    return rows, [np.maximum(own, TOLERANCE) for own in rounding]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "mesh"), [case if case in DEFAULT else wide(*case) for case in CASES], ids=str
)
def test_forwards(family, mesh):
    mesh = mesh_of(*mesh)
    found = forwards(*on_mesh(pair(family), mesh))
    for own, whole, bound in zip(found, *of_one_device(family), strict=True):
        assert own.shape == whole.shape
        assert whole.std() > 0.3
        assert bound.max() < 0.01  # a mistake would be larger
        np.testing.assert_array_less(np.abs(own - whole).max(axis=-1), bound)


def test_a_head_that_cannot_be_split():
    mesh, (target, head) = mesh_of(1, 2), pair("qwen3", splits=False)
    split, whole = on_mesh((target, head), mesh)
    assert all(array.is_fully_replicated for array in jax.tree.leaves(whole.weights))
    found = draft_logits(split, whole, IDS)
    np.testing.assert_allclose(found, draft_logits(target, head, IDS), rtol=0, atol=TOLERANCE)


def test_hidden_states_are_joined():
    split, _ = on_mesh(pair("qwen3"), mesh_of(1, 2))
    for layers in (None, (1, 0)):
        found, whole = (hidden_states(target, IDS, layers=layers) for target in (split, pair("qwen3")[0]))
        np.testing.assert_allclose(found, whole, rtol=0, atol=TOLERANCE)
