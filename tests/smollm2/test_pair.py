"""The draft head of SmolLM2 in this package, with its target."""

import json
from pathlib import Path

import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.smollm2 import SMOLLM2_DRAFT_HEAD

GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))


def test_it_is_small_enough_for_the_wheel():
    assert sum(path.stat().st_size for path in SMOLLM2_DRAFT_HEAD.iterdir()) <= 26e6
    assert {path.name for path in SMOLLM2_DRAFT_HEAD.iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.wide
def test_its_trees_give_the_target_s_tokens():
    """By name alone; the head drafts most of what the target says, in conversations of all kinds."""
    llm = LLM("smollm2", budget=16, dtype="float32", compilation_cache="off")
    assert llm.draft_head.config.block_size == 12
    prompts = [{"prompt_token_ids": golden["prompt"]} for golden in GOLDENS]
    completions = llm.generate(prompts, SamplingParams(max_tokens=64))
    assert [completion.token_ids for completion in completions] == [golden["greedy"] for golden in GOLDENS]
    assert np.mean([completion.mean_acceptance_length for completion in completions]) > 2
