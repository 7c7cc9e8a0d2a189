import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import ancestor_bits, ancestor_mask

bits_of = jax.jit(ancestor_bits, static_argnames="max_depth")
mask_of = jax.jit(ancestor_mask)


def unpack(bits, num_nodes):
    """Bits as booleans, by NumPy's own little-endian unpacking."""
    as_bytes = np.ascontiguousarray(np.asarray(bits).astype("<u4")).view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little")[..., :num_nodes].astype(bool)


def ancestors(parents):
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def test_the_drawn_example(make_tree):
    #     0
    #    / \
    #   1   2
    #   |
    #   3
    parents = [-1, 0, 0, 1]
    bits = ancestor_bits(np.array([parents], np.int32))
    assert bits.dtype == jnp.uint32
    assert bits.tolist() == [[[0b0001], [0b0011], [0b0101], [0b1011]]]
    tree = make_tree([[0] * 4], [parents], [[0, 1, 1, 2]], num_slots=4)
    assert ancestor_mask(tree).astype(int).tolist() == [
        [
            [1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1],
        ]
    ]


@pytest.mark.parametrize("reach", [1, 4, 256])
@pytest.mark.parametrize("num_nodes", [1, 31, 32, 33, 256])
def test_is_the_definition(num_nodes, reach):
    """Chains, deep trees and shallow ones, with word boundaries inside and at the end."""
    rng = np.random.default_rng(num_nodes)
    parents = np.array(
        [[-1, *(rng.integers(max(0, i - reach), i) for i in range(1, num_nodes))] for _ in "ab"],
        np.int32,
    )
    bits = bits_of(parents)
    assert bits.shape == (2, num_nodes, -(-num_nodes // 32))
    for b in range(2):
        unpacked = unpack(bits[b], bits.shape[-1] * 32)
        np.testing.assert_array_equal(unpacked[:, :num_nodes], ancestors(parents[b]))
        assert not unpacked[:, num_nodes:].any()


@pytest.mark.parametrize("max_depth", [0, 1, 3, 4, 99, 8])
def test_a_known_depth_changes_nothing(max_depth):
    """Trees that are just that deep, so that one step less would show."""
    rng, depths, parents = np.random.default_rng(max_depth), [0], [-1]
    for node in range(1, 64):
        chain = node <= max_depth
        parent = node - 1 if chain else rng.choice(np.flatnonzero(np.array(depths) < max(max_depth, 1)))
        parents.append(int(parent) if max_depth else -1)
        depths.append(depths[parent] + 1 if max_depth else 0)
    assert max(depths) == min(max_depth, 63)
    parents = np.array([parents], np.int32)
    np.testing.assert_array_equal(bits_of(parents, max_depth=max_depth), bits_of(parents))
    if max_depth in (1, 2, 4, 8):
        assert (bits_of(parents, max_depth=max_depth - 1) != bits_of(parents)).any()


def test_goldens(accept_goldens, make_tree):
    for _, arrays in accept_goldens:
        tokens, parents, depths = arrays["tree"].tolist()
        n = len(tokens)
        golden = np.unpackbits(arrays["ancestor"], axis=-1)[:, :n].astype(bool)
        tree = make_tree([tokens], [parents], [depths], num_slots=256)
        np.testing.assert_array_equal(np.asarray(mask_of(tree))[0, :n, :n], golden)
        np.testing.assert_array_equal(unpack(bits_of(tree.parents), n)[0, :n], golden)


def test_padding_sees_nothing_and_is_not_seen(make_tree):
    tree = make_tree([[1, 2, 3], [1]], [[-1, 0, 1], [-1]], [[0, 1, 2], [0]], num_slots=5)
    mask = np.asarray(mask_of(tree))
    expected = np.zeros((2, 5, 5), bool)
    expected[0, :3, :3] = np.tri(3, dtype=bool)
    expected[1, 0, 0] = True
    np.testing.assert_array_equal(mask, expected)
    # The packed rows know no count: there padding sees itself.
    assert ancestor_bits(tree.parents)[1, :, 0].tolist() == [1, 2, 4, 8, 16]
