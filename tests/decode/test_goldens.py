"""Against outputs of the reference implementation: see goldens/README.md.

Exact tokens say nothing about a mis-wired draft head, since whatever it drafts is verified. Its logits and
its acceptance lengths do.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import (
    SamplingParams,
    draft_logits,
    generate,
    generate_tree,
    load_draft_head,
    load_target,
    logits,
)
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.models import bind
from tests.marks import wide

GOLDENS = Path(__file__).parent / "goldens"
CONTEXTS = (5, 6, 9, 16, 23)
HEADS = ("draft_head_causal", "draft_head_bidirectional")
GENERATIONS = json.loads((GOLDENS / "generate.json").read_text())
# A few in `make test`: every case compiles a program.
FEW = {"accum_logp": 64, "task_router": 32}
EACH_GENERATION = [
    case if FEW.get(case["algorithm"]) == case["budget"] else wide(case) for case in GENERATIONS
]


@pytest.fixture(scope="module")
def target():
    return load_target(GOLDENS / "target", dtype="float32")


@pytest.fixture(scope="module", params=HEADS)
def head_case(request):
    return load_draft_head(GOLDENS / request.param, dtype="float32"), np.load(
        GOLDENS / f"{request.param}.npz"
    )


def test_target_logits(target, head_case):
    _, golden = head_case
    got = logits(target, golden["token_ids"])
    np.testing.assert_allclose(got, golden["target_logits"], rtol=0, atol=1e-4)


def test_draft_logits(target, head_case):
    head, golden = head_case
    got = draft_logits(target, head, golden["token_ids"][:, :10])
    np.testing.assert_allclose(got, golden["draft_logits_ctx9"], rtol=0, atol=1e-4)


@functools.partial(jax.jit, static_argnums=(0, 1))
def taps_and_drafts(config, proposer, weights, head_weights, ids, contexts):
    """Taps of all tokens, and draft logits of the same tokens after contexts of several lengths."""
    target = bind(config, weights)
    batch, length = ids.shape
    block = Block.chain(ids)
    taps = target(ids, block.depths, attend_over(None, None, block), taps=proposer.taps).taps
    slots = Slots.of(jnp.arange(batch, dtype=jnp.int32)[:, None], jnp.zeros(batch, jnp.int32))
    state = proposer.empty_state(batch, length, taps.dtype)
    state = proposer.commit(head_weights, state, taps, slots, contexts)
    anchors = jnp.take_along_axis(ids, contexts[:, None], axis=1)[:, 0]
    slots = slots._replace(lengths=contexts)
    return taps, proposer.propose(head_weights, state, target, anchors, slots)


def test_taps_and_drafts_after_every_context(target, head_case):
    # The proposer itself, as the round uses it: one batch whose slots differ in length.
    head, golden = head_case
    ids = jnp.asarray(np.repeat(golden["token_ids"], len(CONTEXTS), axis=0), jnp.int32)
    taps, drafts = taps_and_drafts(
        target.config,
        DraftHeadProposer(head.config),
        target.weights,
        head.weights,
        ids,
        jnp.asarray(CONTEXTS, jnp.int32),
    )
    np.testing.assert_allclose(taps[:1], golden["target_hidden"], rtol=0, atol=1e-4)
    expected = np.concatenate([golden[f"draft_logits_ctx{context}"] for context in CONTEXTS])
    np.testing.assert_allclose(drafts, expected, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def causal_head():
    return load_draft_head(GOLDENS / "draft_head_causal", dtype="float32")


def case_target(target, case):
    eos = () if case["eos_token_id"] is None else (case["eos_token_id"],)
    return dataclasses.replace(target, eos_token_ids=eos)


@pytest.mark.parametrize("case", GENERATIONS, ids=lambda case: f"{case['algorithm']}-{case['budget']}")
def test_plain_generations(target, case):
    [got] = generate(
        case_target(target, case), [case["prompt"]], SamplingParams(max_tokens=case["max_new_tokens"])
    )
    assert got.token_ids == case["greedy_token_ids"]
    assert got.finish_reason == ("length" if case["eos_token_id"] is None else "stop")


@pytest.mark.parametrize(
    "case",
    EACH_GENERATION,
    ids=lambda case: f"{case['algorithm']}-{case['budget']}-{case['eos_token_id']}",
)
def test_tree_generations(target, causal_head, case):
    # The reference's rounds begin after its first token, ours with it.
    first, rest = case["token_ids"][0], case["token_ids"][1:]
    [got] = generate_tree(
        case_target(target, case),
        causal_head,
        [[*case["prompt"], first]],
        SamplingParams(max_tokens=case["max_new_tokens"] - 1),
        budget=case["budget"],
        width=case["width"],
        algorithm=case["algorithm"],
    )
    assert got.token_ids == rest
    assert got.accept_lengths == case["accept_lengths"]
    assert got.tree_sizes == case["tree_sizes"]
    assert got.rounds == len(case["accept_lengths"])
