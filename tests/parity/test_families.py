"""Every family against its model of transformers, live: plain sequences and trees."""

import copy

import numpy as np
import pytest
import torch

from jetspec_jax import load_target, logits, tree_logits
from tests.float64 import Reference, assert_rounded
from tests.parity.families import FAMILIES
from tests.parity.oracle import (
    assert_close,
    assert_recurrent,
    in_one_forward,
    oracle_logits,
    random_ids,
    random_trees,
    recurrent_reference,
    valid_rows,
)

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    """A family's model, ours of its checkpoint, and where that is."""
    model, folder = FAMILIES[request.param].build(), tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder)
    return model, load_target(folder, dtype="float32"), folder


RECURRENT = [name for name, family in FAMILIES.items() if family.is_recurrent]
ATTENTIVE = [name for name in FAMILIES if name not in RECURRENT]


@pytest.mark.parametrize("pair", ATTENTIVE, indirect=True)
def test_logits(pair):
    model, target, _ = pair
    ids = random_ids(0, 2, 40)  # five times the windows
    assert_close(logits(target, ids), oracle_logits(model, ids))


@pytest.mark.parametrize("pair", RECURRENT, indirect=True)
@pytest.mark.parametrize("length", [40, 300], ids=["one chunk", "many chunks"])
def test_recurrent_logits(pair, length):
    model, target, folder = pair
    ids = random_ids(0, 1, length)
    assert_recurrent(logits(target, ids), oracle_logits(model, ids), recurrent_reference(folder, ids))


@pytest.mark.parametrize("pair", RECURRENT, indirect=True)
@pytest.mark.parametrize("prefix_length", [0, 1, 2, 21])
def test_recurrent_trees(pair, prefix_length):
    _, target, folder = pair
    prefix, tree = random_ids(2, 2, prefix_length), random_trees(prefix_length, (64, 50), max_depth=15)
    ours = np.asarray(tree_logits(target, prefix, tree))
    for b, count in enumerate((64, 50)):
        ids = np.concatenate([prefix[b], tree.tokens[b, :count]])[None]
        roots_parent = prefix_length - 1  # -1 where there is no prefix
        own = np.asarray(tree.parents[b, :count])
        parents = [*range(-1, roots_parent), *np.where(own < 0, roots_parent, own + prefix_length)]
        values, bound = recurrent_reference(folder, ids, parents)
        assert_rounded(ours[b, :count], Reference(values[0, prefix_length:], bound[0, prefix_length:]))


def test_bfloat16(pair, tmp_path):
    """Rounding is the only difference: from float32, ours is no farther than transformers' own bfloat16."""
    model, *_ = pair
    ids = random_ids(0, 12, 40)
    exact = oracle_logits(model, ids)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.save_pretrained(tmp_path)
    ours = logits(load_target(tmp_path, dtype="bfloat16"), ids)
    assert deviation(ours, exact) < 1.1 * deviation(oracle_logits(rounded, ids), exact)


def deviation(values, exact):
    """Of half the tokens: rounding sends a few to other experts, in either program, and these lie far off."""
    return np.median(np.sqrt(np.mean((np.asarray(values) - exact) ** 2, axis=-1)))


# No mask tells a recurrence of a tree. A window's edge falls before the tree, and inside it.
@pytest.mark.parametrize("pair", ATTENTIVE, indirect=True)
@pytest.mark.parametrize("prefix_length", [21, 3])
def test_trees(pair, prefix_length):
    model, target, _ = pair
    prefix, tree = random_ids(1, 2, prefix_length), random_trees(prefix_length, (48, 33))
    ours = np.asarray(tree_logits(target, prefix, tree))
    assert_close(valid_rows(ours, tree), valid_rows(in_one_forward(model, prefix, tree), tree))
