"""Draft heads with a selector: tokens are plain decoding's, and trees follow the pairs."""

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import Head, SamplingParams, generate, generate_tree
from jetspec_jax.config import SelectorConfig
from jetspec_jax.decode.proposer import DraftHeadProposer, SelectingProposer
from jetspec_jax.decode.settings import TreeSettings, make_decoder
from jetspec_jax.inspect.trace import trace_rounds
from jetspec_jax.models import bind
from jetspec_jax.models.selector import parents_of
from jetspec_jax.tree import Auto, pair_log_probs, top_candidates
from pallas_kernels import shards
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import TINY, head_config, random_target, random_weights, with_windows
from tests.marks import wide
from tests.meshes import agreed, on_parts, padded

CONFIG = with_windows(TINY, None)
CANDIDATES = 5
PROMPT = np.random.default_rng(3).integers(0, CONFIG.vocab_size, 33).tolist()
GREEDY = SamplingParams(max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=7)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0)


def selecting_head(change=lambda name, values: 4 * values, *, tail=True):
    """A random head and selector, whose tensors are changed."""
    plain = head_config(CONFIG)
    config = dataclasses.replace(plain, selector=SelectorConfig(4, CANDIDATES, tail))
    weights = random_weights(plain, 1)
    selector = random_weights(config, 2)["selector"]
    changed = {name: change(name, values) for name, values in selector.items()}
    return Head(config, {**weights, "selector": changed}, allow_nonfinite=True)


@dataclass(frozen=True)
class SelectingOracle(OracleProposer):
    """Hides the truth, and scores pairs at random; some of them are no numbers."""

    selected: int | None = CANDIDATES

    def select(self, weights, state, target, anchors, slots, count, depth, scoring):
        adjusted = scoring.adjusted(self.propose(weights, state, target, anchors, slots, depth))
        drafted = top_candidates(adjusted, count, scoring.perturbed(adjusted))
        key = jax.random.fold_in(jax.random.key(weights.seed), jnp.sum(anchors))
        shape = (*drafted.tokens.shape, count)
        scores = 2 * jax.random.normal(key, shape)
        for i, value in enumerate((jnp.nan, -jnp.inf, jnp.inf)):
            hit = jax.random.uniform(jax.random.fold_in(key, i), shape) < 0.05
            scores = jnp.where(hit, value, scores)
        return dataclasses.replace(
            drafted,
            pairs=pair_log_probs(drafted.log_probs, scores, tail=True),
            draft_pairs=pair_log_probs(drafted.draft_log_probs, scores, tail=True),
        )


def traced(target, head, params, settings=None, **others):
    trace = trace_rounds(target, head, PROMPT, params, settings or TreeSettings(16), **others)
    return list(trace), trace.completion


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_deep_paths_are_plain_decoding_s_tokens(target, params):
    free = dataclasses.replace(params, max_tokens=40)
    [plain] = generate(target, [PROMPT], free)
    weights, oracle = plant([[*PROMPT, *plain.token_ids]], 128), SelectingOracle(CONFIG.vocab_size)
    rounds, completion = traced(target, None, params, proposer=oracle, proposer_weights=weights)
    assert completion.token_ids == plain.token_ids[: params.max_tokens]
    assert max(completion.accept_lengths) > 3
    for one in rounds:
        for node in range(1, len(one.tokens)):
            parent = one.parents[node]
            assert one.scores[parent] > -np.inf
            places = [0, *[place_of(one, other) for other in range(1, len(one.tokens))]]
            pair = one.depths[parent], places[parent], places[node]
            for sums, pairs in ((one.scores, one.pair_log_probs), (one.tree_scores, one.pair_scores)):
                np.testing.assert_allclose(sums[node], sums[parent] + pairs[pair], rtol=1e-5, atol=1e-5)


def place_of(one, node):
    [place] = np.flatnonzero(one.candidate_tokens[one.depths[node] - 1] == one.tokens[node])
    return place


def test_scores_of_zero_give_the_trees_of_the_head_without(target):
    selecting = selecting_head(lambda name, values: 0 * values)
    weights = {name: own for name, own in selecting.weights.items() if name != "selector"}
    plain = Head(dataclasses.replace(selecting.config, selector=None), weights)
    settings = TreeSettings(16, algorithm="top_nodes", candidates=CANDIDATES)
    ours, completion = traced(target, selecting, SAMPLED, settings)
    theirs, expected = traced(target, plain, SAMPLED, settings)
    assert completion == expected
    for one, other in zip(ours, theirs, strict=True):
        assert one.pair_log_probs is not None
        for name in ("tokens", "parents", "depths", "scores", "tree_scores", "path"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)


@pytest.mark.parametrize("value", [None, wide(np.nan)])
def test_a_batch_s_tokens_are_plain_decoding_s(target, value):
    def change(name, values):
        if value is None or name != "successors":
            return 4 * values
        return jnp.where(np.arange(len(values))[:, None] % 3 == 0, value, 4 * values)

    head = selecting_head(change, tail=False)
    prompts, params = [PROMPT, PROMPT[:9], PROMPT[4:20]], [GREEDY, SAMPLED, GREEDY]
    plain = generate(target, prompts, params)
    ours = generate_tree(target, head, prompts, params, budget=16)
    assert [one.token_ids for one in ours] == [one.token_ids for one in plain]


def rows():
    """Anchors of two sequences, and hidden states, parents and candidates of their three rows."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(2, 3, CONFIG.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, CONFIG.vocab_size, (2, 3, CANDIDATES)).astype(np.int32)
    anchors = np.array([4, 7], np.int32)
    return anchors, jnp.asarray(hidden), parents_of(jnp.asarray(anchors), jnp.asarray(tokens)), tokens


def test_scores_are_those_of_the_definition():
    head = selecting_head()
    anchors, hidden, parents, tokens = rows()
    found = bind(head.config, head.weights).selector(hidden, parents, jnp.asarray(tokens))
    hidden = np.asarray(hidden, np.float64)
    own = {name: np.asarray(values, np.float64) for name, values in head.weights["selector"].items()}
    for b, d, u, t in np.ndindex(2, 3, CANDIDATES, CANDIDATES):
        parent = anchors[b] if d == 0 else tokens[b, d - 1, u]
        gate = hidden[b, d] @ own["hidden_projection"]
        terms = own["predecessors"][parent] * gate * own["successors"][tokens[b, d, t]]
        bound = 64 * np.finfo(np.float32).eps * np.abs(terms).max() * CONFIG.hidden_size
        assert abs(found[b, d, u, t] - terms.sum()) <= bound


@pytest.mark.parametrize("mesh", [(1, 3), wide((2, 2))])
def test_devices_that_share_the_codebooks_have_the_bits_of_the_first(mesh):
    head = selecting_head()
    _, hidden, parents, tokens = rows()
    own = head.weights["selector"]

    def scores(codebooks, hidden, parents, tokens):
        before, after = jnp.moveaxis(codebooks, 1, 2)
        selector = {**own, "predecessors": before, "successors": after}
        # Each device rounds its hidden states in its own way.
        hidden = hidden * (1 + 1e-6 * shards.index())
        return bind(head.config, {**head.weights, "selector": selector}).selector(hidden, parents, tokens)

    codebooks = np.stack([np.asarray(own[name]).T for name in ("predecessors", "successors")])
    parts = padded(codebooks, mesh[0] * mesh[1])
    found = agreed(on_parts(scores, *mesh)(parts, hidden, parents, tokens))
    whole = scores(jnp.asarray(codebooks), hidden, parents, jnp.asarray(tokens))
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)


def test_parents_of_the_drawn_example():
    tokens = jnp.array([[[5, 6], [7, 8], [4, 3]]], jnp.int32)
    assert parents_of(jnp.array([9]), tokens).tolist() == [[[9, 9], [5, 6], [7, 8]]]


class TestBreadth:
    @pytest.mark.parametrize(
        ("algorithm", "width", "candidates", "expected"),
        [
            ("top_nodes", None, None, (32, 32)),
            ("accum_logp", None, None, (7, 7)),
            (Auto(), None, None, (32, 32)),
            ("top_nodes", 2, None, (2, 32)),
            ("accum_logp", 2, None, (2, 7)),
            ("top_nodes", 40, None, (40, 40)),
            ("top_nodes", None, 9, (9, 9)),
            ("top_nodes", 3, 9, (3, 9)),
        ],
    )
    def test_what_is_left_open(self, algorithm, width, candidates, expected):
        settings = TreeSettings(16, width, None, algorithm, candidates)
        assert make_decoder(CONFIG, selecting_head().config, settings).breadth == expected
        assert settings.for_selected(CANDIDATES).breadth == expected

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"width": 6, "candidates": 5}, "width must be at most candidates, 5, not 6"),
            ({"candidates": CONFIG.vocab_size + 1}, "candidates must .*1..64"),
        ],
    )
    def test_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            make_decoder(CONFIG, selecting_head().config, TreeSettings(16, **changes))

    def test_more_candidates_than_pairs_are_scored_of(self):
        large = dataclasses.replace(CONFIG, vocab_size=256)
        head = dataclasses.replace(head_config(large), selector=SelectorConfig(4, CANDIDATES))
        with pytest.raises(ValueError, match=r"candidates must be at most 128 .* not 129"):
            make_decoder(large, head, TreeSettings(16, candidates=129))


def test_which_proposers_select():
    assert isinstance(DraftHeadProposer(selecting_head().config), SelectingProposer)
    assert DraftHeadProposer(head_config(CONFIG)).selected is None
    assert not isinstance(OracleProposer(CONFIG.vocab_size), SelectingProposer)
