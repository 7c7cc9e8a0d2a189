"""The draft head of SmolLM2 in this package, with its target."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors import safe_open

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.config import SelectorConfig, parse_draft_head_config
from jetspec_jax.config.head_dialects import causality_by_engine
from jetspec_jax.models import abstract, weights_of
from jetspec_jax.smollm2 import SMOLLM2_DRAFT_HEAD

# The head, and the selector beside it.
SHARDS = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
GOLDENS = json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))


def test_it_is_small_enough_for_the_wheel():
    files = {path.name: path.stat().st_size for path in SMOLLM2_DRAFT_HEAD.iterdir()}
    assert sum(files.values()) <= 40e6
    assert set(files) == {"config.json", "model.safetensors.index.json", *SHARDS}


def test_its_files_hold_what_its_config_says():
    raw = json.loads((SMOLLM2_DRAFT_HEAD / "config.json").read_text(encoding="utf-8"))
    config = parse_draft_head_config(raw)
    assert (config.block_size, config.tap_layers, config.mask_token_id) == (12, (2, 9, 16, 22, 28), 3)
    assert (config.selector, config.selected) == (SelectorConfig(64, 16, tail=True), 16)
    assert all(causality_by_engine(raw).values())
    held = 0
    for name in SHARDS:
        with safe_open(SMOLLM2_DRAFT_HEAD / name, "numpy") as file:
            slices = list(map(file.get_slice, file.keys()))
            assert {one.get_dtype() for one in slices} == {"BF16"}
            held += sum(np.prod(one.get_shape()) for one in slices)
    assert held == sum(leaf.size for leaf in jax.tree.leaves(weights_of(abstract(config))))


@pytest.mark.wide
def test_its_trees_give_the_target_s_tokens():
    """By name alone; the head drafts most of what the target says, in conversations of all kinds."""
    llm = LLM("smollm2", budget=16, dtype="float32", compilation_cache="off")
    assert llm.draft_head.config.block_size == 12
    prompts = [{"prompt_token_ids": golden["prompt"]} for golden in GOLDENS]
    completions = llm.generate(prompts, SamplingParams(max_tokens=64))
    assert [completion.token_ids for completion in completions] == [golden["greedy"] for golden in GOLDENS]
    assert np.mean([completion.mean_acceptance_length for completion in completions]) > 2
