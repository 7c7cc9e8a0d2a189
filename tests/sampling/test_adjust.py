"""Adjusted logits of every node of a tree: those of the node's own prefix, made from scratch."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jetspec_jax.sampling.adjust import Adjustments, adjust
from jetspec_jax.sampling.params import SamplingParams
from tests.meshes import on_parts, padded
from tests.sampling.reference import adjusted, path_of

VOCAB, NODES, DEPTH, SLOTS, ROOM = 37, 12, 4, 3, (8, 4)

KINDS = (
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.4},
    {"min_tokens": 6},
    {"logit_bias": {3: 4.0, 4: -100.0, 36: 0.25}},
    {"allowed_token_ids": [1, 2, 3, 4, 5, 36]},
    {"bad_words": ["told by their tokens"]},
)
ALL = {name: value for kind in KINDS for name, value in kind.items()}
jitted = jax.jit(adjust)


def draw_tree(rng):
    """Tokens, parents, depths and paths of a random tree; few tokens, so that they recur on paths.

    It begins with a chain to the largest depth.
    """
    parents, depths = np.full(NODES, -1, np.int32), np.zeros(NODES, np.int32)
    for node in range(1, NODES):
        parents[node] = node - 1 if node <= DEPTH else rng.choice(np.flatnonzero(depths[:node] < DEPTH))
        depths[node] = depths[parents[node]] + 1
    tokens = rng.integers(0, 6, NODES, np.int32)
    paths = np.full((NODES, DEPTH), -1, np.int32)
    for node in range(NODES):
        own = path_of(tokens, parents, node)[::-1]
        paths[node, : len(own)] = own
    return tokens, parents, depths, paths


def draw_words(rng):
    return [rng.integers(0, 6, rng.integers(1, 5)).tolist() for _ in range(rng.integers(1, 8))]


def stacked(own):
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *own)


class Case:
    """Slots with trees, of which the last wants nothing."""

    def __init__(self, seed, kinds, dtype=np.float32):
        rng = self.rng = np.random.default_rng(seed)
        self.rows = rng.normal(0, 3, (len(kinds) + 1, NODES, VOCAB)).astype(dtype)
        self.params = [SamplingParams(**kind) for kind in kinds]
        self.trees = [draw_tree(rng) for _ in range(len(kinds) + 1)]
        self.prompts = [rng.integers(0, VOCAB, rng.integers(1, 9)).tolist() for _ in kinds]
        # The last of these, if there is one, is the root; else the prompt's last is.
        self.outputs = [rng.integers(0, 6, rng.integers(0, 9)).tolist() for _ in kinds]
        self.words = [draw_words(rng) if own.bad_words else [] for own in self.params]
        self.endings = [2, 5]
        own = [self.of(slot) for slot in range(len(kinds))]
        nothing = jax.tree.map(lambda leaf: np.asarray(leaf[0]), Adjustments.empty(1, VOCAB, ROOM))
        self.own = stacked([*own, nothing])
        self.depths, self.paths = (np.stack([tree[part] for tree in self.trees]) for part in (2, 3))

    def of(self, slot, output=None):
        return Adjustments.of(
            self.params[slot],
            vocab_size=VOCAB,
            prompt=self.prompts[slot],
            output=self.outputs[slot] if output is None else output,
            endings=self.endings,
            bad_words=self.words[slot],
            words=ROOM,
        )

    def expected(self):
        rows = self.rows.astype(np.float32)
        for slot, params in enumerate(self.params):
            tokens, parents, _, _ = self.trees[slot]
            for node in range(NODES):
                output = [*self.outputs[slot], *path_of(tokens, parents, node)]
                rows[slot, node] = adjusted(
                    rows[slot, node],
                    params,
                    self.prompts[slot],
                    output,
                    endings=self.endings,
                    bad_words=self.words[slot],
                )
        return rows

    def arguments(self):
        return self.paths, self.depths, self.own


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    seed=st.integers(0, 2**32), kinds=st.lists(st.sampled_from((*KINDS, ALL)), min_size=2, max_size=2)
)
def test_each_node_has_the_logits_of_its_own_prefix(seed, kinds):
    case = Case(seed, kinds)
    got, expected = np.asarray(jitted(case.rows, *case.arguments())), case.expected()
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(got[-1], case.rows[-1])


@pytest.mark.parametrize("kind", [*KINDS[1:], ALL], ids=str)
def test_each_kind_changes_something(kind):
    """So that the equality above says something of it."""
    case = Case(1, [kind, kind])
    assert (case.expected()[:-1] != case.rows[:-1]).any()


def test_a_path_is_as_good_as_committed():
    """Committed token by token, it gives bit for bit what its nodes have in a tree; and so at once."""
    case = Case(3, [ALL, ALL])
    row = case.rows[:, :1]
    paths = [tokens[1 : DEPTH + 1].tolist() for tokens, *_ in case.trees]
    whole = np.broadcast_to(row, case.rows.shape)
    in_tree = np.asarray(jitted(whole, *case.arguments()))
    extended = jax.jit(lambda own, *more: own._replace(history=own.history.extended(*more)))

    def plain(own):
        nothing = np.zeros((SLOTS, 1, 0), np.int32), np.zeros((SLOTS, 1), np.int32)
        return np.asarray(jitted(row, *nothing, own))[:, 0]

    one_by_one = case.own
    for place in range(DEPTH):
        tokens = np.array([[path[place], -1] for path in paths], np.int32)
        one_by_one = extended(one_by_one, tokens, np.ones(SLOTS, np.int32))
        np.testing.assert_array_equal(plain(one_by_one), in_tree[:, place + 1])
    at_once = extended(case.own, np.array(paths, np.int32), np.full(SLOTS, DEPTH, np.int32))
    jax.tree.map(np.testing.assert_array_equal, at_once, one_by_one)
    # A request that goes on with what it has got, as after a preemption, is where it was.
    again = [case.of(slot, [*case.outputs[slot], *paths[slot]]) for slot in range(2)]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[:2], b), at_once, stacked(again))


def test_slots_that_commit_nothing_stay():
    history = Case(4, [ALL, ALL]).own.history
    nothing = history.extended(jnp.full((SLOTS, 5), -1, jnp.int32), jnp.zeros(SLOTS, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, nothing, history)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 4)])
def test_each_part_of_the_vocabulary_has_its_own(mesh):
    case = Case(5, [ALL, KINDS[-1]])
    whole = np.asarray(jitted(case.rows, *case.arguments()))
    own = on_parts(_adjust, *mesh)(padded(case.rows, np.prod(mesh)), *case.arguments())
    joined = np.concatenate(list(np.asarray(own)), axis=-1)
    np.testing.assert_array_equal(joined[..., :VOCAB], whole)
    assert np.isneginf(joined[..., VOCAB:]).all()


# A function of its own: `on_parts` keeps its programs by it.
_adjust = functools.partial(adjust)


def test_bad_words_that_do_not_fit():
    for words in ([[1, 2]] * 9, [[1] * 5]):
        with pytest.raises(ValueError, match="do not fit room for 8 of 4"):
            Adjustments.of(SamplingParams(), vocab_size=VOCAB, prompt=[1], bad_words=words, words=ROOM)
