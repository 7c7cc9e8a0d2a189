import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.tree import accept

jitted = jax.jit(accept, static_argnames="max_depth")


def walk(tokens, parents, choices, max_depth):
    """The method as a plain walk; the earliest of equal siblings."""
    path = [0]
    while len(path) <= max_depth:
        node = path[-1]
        matches = [
            child for child, parent in enumerate(parents) if parent == node and tokens[child] == choices[node]
        ]
        if not matches:
            break
        path.append(matches[0])
    return path, len(path) - 1, choices[path[-1]]


def padded(path, max_depth):
    return [*path, *[-1] * (max_depth + 1 - len(path))]


def random_tree(rng, most, vocabulary):
    """Any tree with parents first; siblings may share a token."""
    n = int(rng.integers(1, most + 1))
    parents = [-1, *(int(rng.integers(max(0, i - 4), i)) for i in range(1, n))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return rng.integers(0, vocabulary, n).tolist(), parents, depths


def test_goldens(accept_goldens, make_tree):
    assert len(accept_goldens) == 16
    for case, arrays in accept_goldens:
        tokens, parents, depths = arrays["tree"].tolist()
        tree = make_tree([tokens], [parents], [depths], num_slots=256)
        # Padding offers every choice, and must not be taken up.
        choices = np.zeros(tree.tokens.shape, np.int32)
        choices[0, : len(tokens)] = arrays["target_logits"].argmax(-1)
        path, length, bonus = jitted(tree, choices, max_depth=15)
        assert path.tolist() == [padded(arrays["path"], 15)]
        assert length.tolist() == [case["accepted_draft_tokens"]]
        assert bonus.tolist() == [case["correction_token"]]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), max_depth=st.sampled_from([0, 1, 3, 7, 15]))
def test_is_the_walk(make_tree, seed, max_depth):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, 16, vocabulary=2) for _ in range(4)]
    choices = rng.integers(0, 2, (4, 16)).astype(np.int32)
    result = jitted(make_tree(*zip(*trees, strict=True), num_slots=16), choices, max_depth=max_depth)
    for b, (tokens, parents, _) in enumerate(trees):
        path, length, bonus = walk(tokens, parents, choices[b].tolist(), max_depth)
        assert result.path[b].tolist() == padded(path, max_depth)
        assert (int(result.length[b]), int(result.bonus[b])) == (length, bonus)


#        0:9
#       /   \
#     1:4   2:5        node:token
#     /    /   \
#   3:6  4:6   5:7
TREE = ([9, 4, 5, 6, 6, 7], [-1, 0, 0, 1, 2, 2], [0, 1, 1, 2, 2, 2])


@pytest.mark.parametrize(
    ("choices", "path", "bonus"),
    [
        ([5, 0, 7, 0, 0, 8], [0, 2, 5], 8),  # not a prefix of the node array
        ([5, 6, 6, 0, 3, 0], [0, 2, 4], 3),  # the cousin's equal token is not taken
        ([5, 6, 1, 0, 3, 0], [0, 2], 1),
        ([1, 6, 7, 0, 3, 8], [0], 1),  # matches below a rejected node do not count
        ([0, 0, 0, 0, 0, 0], [0], 0),  # padding holds token 0
        ([9, 9, 9, 9, 9, 9], [0], 9),  # the root is nobody's child
    ],
)
def test_by_hand(make_tree, choices, path, bonus):
    tree = make_tree(*([rows] for rows in TREE))
    choices = np.array([choices + [0] * 2], np.int32)
    result = jitted(tree, choices, max_depth=3)
    assert [x.tolist() for x in result] == [[padded(path, 3)], [len(path) - 1], [bonus]]
    assert [x.dtype for x in result] == ["int32"] * 3


def test_the_earliest_of_equal_siblings(make_tree):
    # Only the later twin leads on, yet the earlier is taken: the same on every device.
    tree = make_tree([[1, 2, 2, 3]], [[-1, 0, 0, 2]], [[0, 1, 1, 2]])
    choices = np.array([[2, 7, 3, 8]], np.int32)
    assert [x.tolist() for x in jitted(tree, choices, max_depth=2)] == [[[0, 1, -1]], [1], [7]]


def test_one_node(make_tree):
    tree = make_tree([[3], [4]], [[-1], [-1]], [[0], [0]])
    result = jitted(tree, np.array([[8], [4]], np.int32), max_depth=0)
    assert [x.tolist() for x in result] == [[[0], [0]], [0, 0], [8, 4]]


def test_a_whole_chain(make_tree):
    n = 33
    tree = make_tree([range(n)], [range(-1, n - 1)], [range(n)])
    choices = np.arange(1, 65, dtype=np.int32)[None]
    path, length, bonus = jitted(tree, choices, max_depth=n - 1)
    assert (path[0].tolist(), int(length[0]), int(bonus[0])) == (list(range(n)), n - 1, n)
