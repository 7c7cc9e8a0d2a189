"""A draft head of targets that have all kinds of layers: it trains, is written, is read again, and drafts."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate_tree, load_draft_head, logits
from tests.decode.ties import TIE, gaps
from tests.families.goldens import IDS, MADE_OF_OTHERS, NAMES
from tests.train.head.tiny import RECIPE, changed, losses, write_documents
from train.head.training import train_head
from train.loop.stages import Deadline

TEN_STEPS = changed(
    RECIPE,
    fit={"steps": 10, "save_every": 10, "evaluate_every": 10},
    head={"taps": (0, 3), "mask_token": 63, "intermediate_size": 48},
)


@pytest.mark.wide
@pytest.mark.parametrize("family", [name for name in NAMES if name not in MADE_OF_OTHERS], indirect=True)
def test_it_learns_and_drafts(family, target, tmp_path):
    data = write_documents(tmp_path / "documents", target.config.vocab_size)
    work = tmp_path / "work"
    folder = train_head(work, TEN_STEPS, target, data, Deadline())
    loss = losses(work)
    assert len(loss) == 10
    assert np.mean(loss[-3:]) < loss[0]

    head = load_draft_head(folder, dtype="float32", target=target)
    assert head.config.num_target_layers == target.config.num_layers
    prompts = [IDS[0].tolist(), IDS[1, :20].tolist()]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    trees = generate_tree(target, head, prompts, params, budget=16, width=3, max_slots=2)
    ids = np.zeros((2, 48), np.int32)
    for row, prompt, tree in zip(ids, prompts, trees, strict=True):
        row[: len(prompt) + 12] = [*prompt, *tree.token_ids]
    # What plain decoding takes: each token is the choice of one forward over all that came before it.
    for rows, prompt, tree in zip(np.asarray(logits(target, ids)), prompts, trees, strict=True):
        rows = rows[len(prompt) - 1 : len(prompt) + 11]
        assert gaps(rows).min() > TIE  # no tie excuses a difference
        assert rows.argmax(axis=-1).tolist() == tree.token_ids
        assert max(tree.tree_sizes) > 1
