"""On a mesh the demo pair's tokens are those of one device, plain and with trees, but for listed ties."""

import dataclasses
import itertools
import json

import pytest

from jetspec_jax import Head, SamplingParams, generate, generate_tree, load_draft_head, load_target
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.config import Experts
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_PROMPTS, DEMO_TARGET
from jetspec_jax.engine.policy import AutoBudget
from pallas_kernels.expert_choice import RouterRule
from tests.decode.compilations import compilations
from tests.decode.ties import TIE, first_difference, gap_of_difference
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
TOKENS = 32
KINDS = (
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 50},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"temperature": 0.8, "seed": 4, "min_p": 0.05},
    {"temperature": 1.2, "seed": 2**40, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
)
PARAMS = [SamplingParams(**kind, max_tokens=TOKENS, ignore_eos=True) for kind in KINDS]


def demo_prompts():
    """As many prompts as kinds; the last is longer than two chunks of prefill."""
    texts = [json.loads(line)["text"] for line in DEMO_PROMPTS.read_text().splitlines()[:20]]
    ids = [load_tokenizer(DEMO_TARGET).encode(text) for text in texts]
    return [*ids[: len(KINDS) - 1], [*itertools.chain(*ids)][:300]]


@pytest.fixture(scope="module")
def demo():
    """The target on one device, prompts, and what it makes of each of them alone."""
    target, prompts = load_target(DEMO_TARGET, dtype="float32"), demo_prompts()
    assert max(map(len, prompts)) > 2 * 128
    alone = [generate(target, [prompt], own)[0] for prompt, own in zip(prompts, PARAMS, strict=True)]
    return target, prompts, [completion.token_ids for completion in alone]


def listed_ties(target, prompts, expected, got):
    """The gaps of all differences, each of which must be a tie."""
    listed = []
    for prompt, own, completion, params in zip(prompts, expected, got, PARAMS, strict=True):
        tokens = completion.token_ids
        assert len(own) == len(tokens) == TOKENS
        if first_difference(own, tokens) is not None:
            gap = gap_of_difference(target, prompt, own, tokens, params)
            assert gap < TIE, f"{params}: differs at a gap of {gap}\n{own}\n{tokens}"
            listed.append(gap)
    return listed


@pytest.mark.wide
@pytest.mark.parametrize("parts", [2, 4])
def test_the_demo_pair(demo, parts):
    whole, prompts, alone = demo
    target = load_target(DEMO_TARGET, dtype="float32", mesh=mesh_of(1, parts))
    head = load_draft_head(DEMO_DRAFT_HEAD, dtype="float32", target=target)
    plain = generate(target, prompts, PARAMS, max_slots=4)
    tree = generate_tree(target, head, prompts, PARAMS, budget=32, max_slots=4)
    listed = [listed_ties(whole, prompts, alone, outputs) for outputs in (plain, tree)]
    assert sum(map(len, listed)) <= 1, listed
    assert sum(len(own.accept_lengths) for own in tree) < 0.5 * TOKENS * len(KINDS)


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2)], ids=str)
def test_auto(monkeypatch, mesh):
    """All buckets have their turn, and none compiles once costs are measured; a mixture with windows."""
    turns = itertools.cycle((1, 32))
    monkeypatch.setattr(AutoBudget, "choose", lambda *_: ((2, next(turns)), 3))
    config = head_config(WINDOWED)
    target, head = random_target(WINDOWED, 0), Head(config, random_weights(config, 1))
    split, split_head = on_mesh((target, head), mesh_of(*mesh))
    prompts = [[3, 1, 4, 1, 5], list(range(60)) * 3]
    for _ in range(2):  # the first dispatch of the second call has another bucket than that of the first
        generate_tree(split, split_head, prompts, PARAMS[:2], budget=32, width=3, algorithm="auto")
    with compilations() as after:
        tree = generate_tree(split, split_head, prompts, PARAMS[:2], budget=32, width=3, algorithm="auto")
    assert after == []
    for prompt, params, own in zip(prompts, PARAMS, tree, strict=False):
        [plain] = generate(target, [prompt], params)
        assert own.token_ids == plain.token_ids
