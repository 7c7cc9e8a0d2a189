"""Traced rounds: decoding's own tokens, and figures that plain forwards confirm."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, draft_logits, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.inspect.trace import _target_log_probs, trace_rounds
from jetspec_jax.sampling.choice import gumbel_noise
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import TokenTree
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import TINY, random_head, random_target, with_windows, word_tokenizer
from tests.meshes import GATHER, agreed, on_parts, padded

CONFIG = with_windows(TINY, None)
ORACLE = OracleProposer(CONFIG.vocab_size)
SETTINGS = TreeSettings(budget=16, width=3)
# From 33 to 64 tokens the forwards that check share one program.
PROMPT = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 33).tolist()
NEW_TOKENS = 20
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 1)


def scored(rows, params, start):
    """Draft rows below an anchor as a request ranks them: with the noise of its samples."""
    key, first = jnp.asarray(Sampling.of(params).key)[None], jnp.array([start + 1])
    noise = gumbel_noise(key, first, len(rows), local=rows.shape[1])[0]
    return jax.nn.log_softmax(rows + params.temperature * noise)


def drain(trace):
    return list(trace), trace.completion


@pytest.fixture(scope="module", params=[GREEDY, SAMPLED], ids=["greedy", "sampled"])
def params(request):
    return request.param


@pytest.fixture(scope="module")
def traced(target, params):
    """Rounds whose trees hold what follows among decoys, so that paths are deep and branch."""
    free = SamplingParams(
        max_tokens=NEW_TOKENS + ORACLE.depth + 1,
        ignore_eos=True,
        temperature=params.temperature,
        seed=params.seed,
    )
    [plain] = generate(target, [PROMPT], free)
    weights = plant([[*PROMPT, *plain.token_ids]], 128)
    rounds, completion = drain(
        trace_rounds(target, None, PROMPT, params, SETTINGS, proposer=ORACLE, proposer_weights=weights)
    )
    return weights, plain.token_ids, rounds, completion


@pytest.mark.wide
def test_rounds_join_to_plain_decoding_s_tokens(traced):
    _, expected, rounds, completion = traced
    tokens = []
    for one in rounds:
        assert one.start == len(PROMPT) + len(tokens) - 1
        assert one.tokens[0] == [*PROMPT, *tokens][-1]
        tokens += one.committed.tolist()
    assert tokens == expected[: len(tokens)]
    assert completion.token_ids == expected[:NEW_TOKENS]
    assert completion.accept_lengths == [len(one.committed) for one in rounds]
    assert completion.tree_sizes == [len(one.tokens) for one in rounds]
    assert completion.tree_depths == [one.depths.max() for one in rounds]
    assert max(completion.accept_lengths) > 3


@pytest.mark.wide
def test_trees_and_paths_are_consistent(traced):
    for one in traced[2]:
        nodes = range(1, len(one.tokens))
        assert one.parents[0] == -1
        assert one.depths[0] == one.scores[0] == one.tree_scores[0] == one.target_log_probs[0] == 0
        for node in nodes:
            parent = one.parents[node]
            assert 0 <= parent < node
            assert one.depths[node] == one.depths[parent] + 1
            row = one.depths[parent]
            [rank] = np.flatnonzero(one.candidate_tokens[row] == one.tokens[node])
            steps = (one.scores, one.candidate_log_probs), (one.tree_scores, one.candidate_scores)
            for sums, of_rows in steps:
                step = of_rows[row, rank]
                np.testing.assert_allclose(sums[node], sums[parent] + step, rtol=1e-5, atol=1e-5)
        assert one.path[0] == 0
        assert one.parents[one.path[1:]].tolist() == one.path[:-1].tolist()
        assert one.committed.tolist() == one.choices[one.path].tolist()
        assert one.tokens[one.path[1:]].tolist() == one.committed[:-1].tolist()
        # The path ends because no child of its last node holds the target's choice there.
        last = one.path[-1]
        assert one.committed[-1] not in one.tokens[one.parents == last]


def test_target_log_probs_are_those_of_plain_forwards(target, traced):
    _, expected, rounds, _ = traced
    sequence = [*PROMPT, *expected]
    one = max(rounds, key=lambda one: len(one.path))
    for node in range(1, len(one.tokens)):
        branch, at = [], one.parents[node]
        while at >= 0:
            branch.insert(0, int(one.tokens[at]))
            at = one.parents[at]
        row = next_token_logits(target, [*sequence[: one.start], *branch])[0, 0]
        wanted = jax.nn.log_softmax(row)[one.tokens[node]]
        np.testing.assert_allclose(one.target_log_probs[node], wanted, atol=1e-4)


def test_candidates_are_the_best_of_the_proposer_s_rows(traced, params):
    weights, _, rounds, _ = traced
    draft = jax.jit(ORACLE.rows)
    for one in rounds[:2]:
        [rows] = draft(weights, np.zeros(1, np.int32), np.array([one.start], np.int32))
        assert_best(one, rows, params, 1e-5)


def assert_best(one, rows, params, atol):
    """A round's candidates are the best of draft rows, with the probabilities of both kinds."""
    scores = np.asarray(scored(rows, params, one.start))
    best = np.argsort(-scores, axis=-1, kind="stable")[:, : SETTINGS.width]
    assert one.candidate_tokens.tolist() == best.tolist()
    for found, whole in ((one.candidate_scores, scores), (one.candidate_log_probs, jax.nn.log_softmax(rows))):
        np.testing.assert_allclose(found, np.take_along_axis(np.asarray(whole), best, axis=-1), atol=atol)


def test_with_a_draft_head_tokens_are_generate_tree_s(target, head, params):
    rounds, completion = drain(trace_rounds(target, head, PROMPT, params, SETTINGS))
    [expected] = generate_tree(target, head, [PROMPT], params, budget=SETTINGS.budget, width=SETTINGS.width)
    assert completion == expected
    one = rounds[1]
    rows = draft_logits(target, head, [[*PROMPT, *expected.token_ids][: one.start + 1]])
    assert_best(one, rows[0], params, 1e-4)


def test_plain_rounds_have_the_anchor_alone(target):
    rounds, completion = drain(trace_rounds(target, None, PROMPT, GREEDY))
    [expected] = generate(target, [PROMPT], GREEDY)
    assert completion == expected
    assert len(rounds) == NEW_TOKENS
    for one in rounds:
        assert one.tokens.shape == one.committed.shape == (1,)
        assert one.candidate_tokens.shape == (0, 1)


def test_one_token_takes_one_round(target):
    rounds, completion = drain(trace_rounds(target, None, PROMPT, SamplingParams(max_tokens=1)))
    assert [one.committed.tolist() for one in rounds] == [completion.token_ids]


def test_a_bad_request_is_refused_at_the_call(target, head):
    with pytest.raises(ValueError, match="prompt is empty"):
        trace_rounds(target, head, [], GREEDY, SETTINGS)
    with pytest.raises(ValueError, match="width must lie in"):
        trace_rounds(target, head, PROMPT, GREEDY, TreeSettings(budget=16, width=99))


def test_an_abandoned_trace_holds_nothing(target, head):
    def bytes_held():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = bytes_held()
    rounds = trace_rounds(target, head, PROMPT, GREEDY, SETTINGS)
    next(rounds)
    assert bytes_held() > before
    rounds.close()
    assert list(rounds) == []
    assert rounds.completion is None
    assert bytes_held() == before


@pytest.mark.parametrize(("mesh", "dtype"), [((2, 4), np.float32), ((1, 2), jnp.bfloat16)])
def test_log_probs_from_parts_of_the_vocabulary(mesh, dtype):
    vocab, nodes = 67, 16
    rng = np.random.default_rng(4)
    logits = rng.normal(0, 3, (2, nodes, vocab)).astype(dtype)
    logits[:, 2, 9:] = -np.inf  # all in the first part of eight
    trees = TokenTree(
        tokens=jnp.asarray(rng.integers(0, vocab, (2, nodes)), jnp.int32),
        parents=jnp.asarray([[-1, *rng.integers(0, 5, nodes - 1)], [-1] * nodes], jnp.int32),
        depths=jnp.zeros((2, nodes), jnp.int32),
        scores=jnp.zeros((2, nodes)),
        num_nodes=jnp.array([nodes, 1], jnp.int32),
    )
    run = on_parts(lambda logits, trees: _target_log_probs(trees, logits), *mesh)
    arguments = padded(logits, mesh[0] * mesh[1]), trees
    whole = _target_log_probs(trees, jnp.asarray(logits))
    np.testing.assert_allclose(agreed(run(*arguments)), whole, rtol=1e-6, atol=1e-6)
    assert (whole[1] == 0).all()
    assert run.lower(*arguments).as_text().count(GATHER) == 1
