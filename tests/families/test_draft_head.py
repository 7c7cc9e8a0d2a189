"""A draft head of every family's target: it trains, is written, is read again, and drafts."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate, generate_tree, load_draft_head
from tests.families.goldens import IDS
from tests.train.tiny_head import RECIPE, changed, losses, write_documents
from train.head import train_head
from train.stages import Deadline

pytestmark = pytest.mark.usefixtures("quick_compiles")

TEN_STEPS = changed(
    RECIPE,
    fit={"steps": 10, "save_every": 10, "evaluate_every": 10},
    head={"taps": (0, 3), "mask_token": 63, "intermediate_size": 48},
)


def test_it_learns_and_drafts(target, tmp_path):
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
    plain = generate(target, prompts, params, max_slots=2)
    trees = generate_tree(target, head, prompts, params, budget=16, width=3, max_slots=2)
    for one, other in zip(trees, plain, strict=True):
        assert one.token_ids == other.token_ids
        assert max(one.tree_sizes) > 1
