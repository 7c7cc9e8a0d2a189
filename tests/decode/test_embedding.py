"""The loop embedded in a program of its own, from public names only, and the public signatures."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jetspec_jax as jj
from tests.decode.tiny import TINY, random_head, random_target
from tests.marks import wide

PROMPT = [5, 9, 2, 7]


@pytest.mark.parametrize("bucket", [wide(1), 16])
def test_prefill_and_decode_as_pure_functions(bucket):
    """The loop by itself, and as part of somebody else's program: plain decoding's tokens."""
    target, head = random_target(TINY, 3), random_head(TINY, 3)
    decoder = jj.TreeDecoder(target.config, jj.DraftHeadProposer(head.config), bucket=bucket, width=2)
    weights = jj.DecodeWeights(target.weights, head.weights)

    state = decoder.empty_state(2, num_pages=4, pages_per_slot=2, page_size=32, dtype=jnp.dtype("float32"))
    params = jj.SamplingParams(max_tokens=20)
    settings = jj.SlotSettings.of(params, (), vocab_size=TINY.vocab_size, budget=bucket, depth=7)
    begins = np.int32(PROMPT[-1]), np.int32(0), np.bool_(False)
    state = decoder.insert(state, np.int32(1), np.array([2, 0], np.int32), settings, *begins)
    own, chunk = np.array([1], np.int32), np.array([PROMPT[:-1]], np.int32)
    state = decoder.prefill(weights, state, own, chunk, np.array([chunk.size], np.int32), np.array([True]))
    state, record = jax.jit(decoder.round)(weights, state)
    inside, inside_records = jax.jit(decoder.decode)(weights, state, np.int32(32))
    state, records = decoder.decode(weights, state, np.int32(32))

    tokens = [*record.tokens[1].tolist(), *records.tokens[:, 1].reshape(-1).tolist()]
    [expected] = jj.generate(target, [PROMPT], params)
    assert [t for t in tokens if t >= 0][:20] == expected.token_ids
    assert record.counts[0] == 0
    assert not records.counts[:, 0].any()
    assert not state.active.any()
    np.testing.assert_array_equal(records.tokens, inside_records.tokens)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.proposer, inside.proposer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bucket": 7}, "bucket must be one of"),
        ({"bucket": 16}, "needs a proposer"),
        ({"width": 65}, r"width must lie in 1\.\.64"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"algorithm": "best"}, "accum_logp"),
    ],
)
def test_settings_that_make_no_decoder(settings, message):
    with pytest.raises(ValueError, match=message):
        jj.TreeDecoder(TINY, **settings)


def test_signatures_that_users_rely_on():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(jj.SamplingParams) == [
        *("temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "stop", "stop_token_ids"),
        *("ignore_eos", "n", "include_stop_str_in_output", "skip_special_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias"),
        *("bad_words", "allowed_token_ids", "logprobs", "prompt_logprobs", "structured_outputs"),
    ]
    assert jj.SamplingParams(0.5, 3).top_k == 3
    assert names(jj.generate)[:3] == ["target", "prompts", "sampling_params"]
    assert names(jj.generate_tree)[:4] == ["target", "draft_head", "prompts", "sampling_params"]
    defaults = {k: p.default for k, p in inspect.signature(jj.generate_tree).parameters.items()}
    assert (defaults["budget"], defaults["width"], defaults["depth"], defaults["algorithm"]) == (
        *(128, None, None),
        jj.tree.DEFAULT_ALGORITHM,
    )
    assert names(jj.tree.build_tree)[:2] == ["draft_logits", "root_tokens"]
    assert names(jj.tree.accept) == ["tree", "choices", "max_depth"]
    assert names(jj.TreeDecoder.decode)[1:] == ["weights", "state", "rounds", "live"]
    assert [f.name for f in jj.tree.TokenTree.__dataclass_fields__.values()] == [
        *("tokens", "parents", "depths", "scores", "num_nodes"),
    ]


def test_a_slot_gets_what_its_request_asks_for():
    decoder = jj.TreeDecoder(TINY)
    state = decoder.empty_state(3, num_pages=6, pages_per_slot=2, page_size=32, dtype=jnp.dtype("float32"))
    params = jj.SamplingParams(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.05, seed=2**63 + 12345, max_tokens=99
    )
    settings = jj.SlotSettings.of(
        params, {0, 31, 63}, vocab_size=64, budget=16, depth=7, routing={"task": "math", "mode": "reasoning"}
    )
    before = jax.tree.map(np.asarray, state)
    begins = np.int32(7), np.int32(64), np.bool_(True)
    state = decoder.insert(state, np.int32(1), np.array([4, 5], np.int32), settings, *begins)
    for slot in range(3):
        own = jax.tree.map(lambda leaf, slot=slot: np.asarray(leaf[slot]), (state.settings, state.slots))
        free = jax.tree.map(lambda leaf, slot=slot: leaf[slot], (before.settings, before.slots))
        there = settings, before.slots._replace(block_tables=np.array([4, 5]), lengths=64, numbers=1)
        jax.tree.map(np.testing.assert_array_equal, own, there if slot == 1 else free)
    assert bool(state.settings.routing.reasoning[1])
    assert (state.anchors.tolist(), state.active.tolist()) == ([0, 7, 0], [False, True, False])
