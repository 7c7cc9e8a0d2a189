import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import NO_PARENT, TokenTree, bucket_for

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def make_tree():
    """A function from lists of tokens, parents and depths, one per sequence, to a padded tree."""

    def make(tokens, parents, depths, num_slots=None):
        num_nodes = [len(row) for row in tokens]
        num_slots = num_slots or bucket_for(max(num_nodes))

        def padded(rows, fill):
            return jnp.asarray([[*row, *[fill] * (num_slots - len(row))] for row in rows], jnp.int32)

        valid = jnp.arange(num_slots)[None, :] < jnp.asarray(num_nodes)[:, None]
        return TokenTree(
            tokens=padded(tokens, 0),
            parents=padded(parents, NO_PARENT),
            depths=padded(depths, 0),
            scores=jnp.where(valid, jnp.float32(0), -jnp.inf),
            num_nodes=jnp.asarray(num_nodes, jnp.int32),
        )

    return make


@pytest.fixture(scope="session")
def accept_goldens():
    arrays = np.load(GOLDENS / "accept.npz")
    names = ("tree", "target_logits", "path", "ancestor")
    return [
        (case, {name: arrays[f"{name}_{case['case']}"] for name in names})
        for case in json.loads((GOLDENS / "accept.json").read_text())
    ]
