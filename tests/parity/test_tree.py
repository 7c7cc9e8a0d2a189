import numpy as np
import pytest

from jetspec_jax import load_target, tree_logits
from tests.parity.oracle import (
    VOCAB,
    assert_close,
    in_one_forward,
    oracle_logits,
    path_to,
    random_ids,
    random_model,
    random_trees,
    save_newer,
    valid_rows,
)

pytestmark = pytest.mark.parity

# Shape of the model, prefix, nodes of each sequence's tree. The sliding window is 8.
CASES = [
    ("untied", 19, (64, 37)),
    ("untied", 0, (24, 33)),
    ("tied", 1, (40, 24)),
    ("wide heads", 33, (31, 32)),
    ("one KV head", 12, (63, 64)),
    ("sliding", 21, (64, 41)),
    ("sliding", 3, (48, 48)),  # the window's edge falls inside the tree
]


def case(tmp_path, shape, prefix_length, num_nodes):
    seed = prefix_length
    model = random_model(shape, seed)
    target = load_target(save_newer(model, tmp_path / "saved"), dtype="float32")
    prefix = random_ids(seed, len(num_nodes), prefix_length)
    return model, target, prefix, random_trees(seed, num_nodes)


def paths(prefix, tree):
    """For every node its sequence, its index and the tokens of the whole text that ends there."""
    for b, count in enumerate(np.asarray(tree.num_nodes)):
        for node in range(count):
            path = path_to(np.asarray(tree.parents)[b], node)
            yield b, node, [*prefix[b].tolist(), *np.asarray(tree.tokens)[b, path].tolist()]


@pytest.mark.parametrize(("shape", "prefix_length", "num_nodes"), CASES)
def test_transformers(tmp_path, shape, prefix_length, num_nodes):
    model, target, prefix, tree = case(tmp_path, shape, prefix_length, num_nodes)
    ours = valid_rows(tree_logits(target, prefix, tree), tree)
    assert_close(ours, valid_rows(in_one_forward(model, prefix, tree), tree))

    # Each node anew, as the end of a plain sequence; sequences of one length share a forward.
    texts = list(paths(prefix, tree))
    alone = np.zeros((*tree.tokens.shape, VOCAB), np.float32)
    for length in {len(text) for _, _, text in texts}:
        rows = [(b, node, text) for b, node, text in texts if len(text) == length]
        ends = oracle_logits(model, [text for _, _, text in rows])[:, -1]
        for (b, node, _), end in zip(rows, ends, strict=True):
            alone[b, node] = end
    assert_close(ours, valid_rows(alone, tree))
