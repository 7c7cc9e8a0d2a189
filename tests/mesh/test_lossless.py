"""On a mesh the tokens of a mixture with windows are those of one device."""

import dataclasses
import itertools

import pytest

from jetspec_jax import Head, SamplingParams, generate, generate_tree
from jetspec_jax.config import Experts
from jetspec_jax.engine.policy import AutoBudget
from pallas_kernels.expert_choice import RouterRule
from tests.decode.compilations import compilations
from tests.decode.tiny import SLIDING, random_target, random_weights
from tests.mesh.tiny import head_config, on_mesh
from tests.meshes import mesh_of

# Two parts of every expert, and two groups of them; a layer with a window and one without.
EXPERTS = Experts(4, 24, RouterRule(2))
WINDOWED = dataclasses.replace(
    SLIDING,
    model_type="qwen3_moe",
    layers=tuple(dataclasses.replace(layer, mlp_size=0, experts=EXPERTS) for layer in SLIDING.layers),
)
PARAMS = [
    SamplingParams(**own, max_tokens=32, ignore_eos=True) for own in ({}, {"temperature": 1.0, "seed": 1})
]


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)], ids=str)
def test_auto(monkeypatch, mesh):
    """All buckets have their turn, one slot gets another page, and nothing compiles after the first calls."""
    turns = itertools.cycle((1, 32))
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: ((2, next(turns)), 3))
    config = head_config(WINDOWED)
    target, head = random_target(WINDOWED, 0), Head(config, random_weights(config, 1))
    split, split_head = on_mesh((target, head), mesh_of(*mesh))
    prompts = [[3, 1, 4, 1, 5], list(range(60)) * 3]
    for _ in range(2):  # the first dispatch of the second call has another bucket than that of the first
        generate_tree(split, split_head, prompts, PARAMS, budget=32, width=3, algorithm="auto")
    with compilations() as after:
        tree = generate_tree(split, split_head, prompts, PARAMS, budget=32, width=3, algorithm="auto")
    assert after == []
    for prompt, params, own in zip(prompts, PARAMS, tree, strict=True):
        [plain] = generate(target, [prompt], params)
        assert own.token_ids == plain.token_ids
