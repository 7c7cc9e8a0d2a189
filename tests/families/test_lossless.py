"""Trees give plain decoding's tokens on every family, far behind the windows."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from tests.decode.oracle import OracleProposer, plant
from tests.decode.ties import TIE, choice_rows, gaps
from tests.decode.tiny import TinyEngine, serve
from tests.families.goldens import MADE_OF_OTHERS, NAMES
from tests.marks import wide

# A program of an engine takes long to compile. The first has most kinds of layers, and is tried with all
# numbers of slots; a family made of the parts of others would say nothing new.
ALL_SLOTS = "step3p7"
FAMILIES = [ALL_SLOTS, *(wide(name) for name in NAMES if name not in (ALL_SLOTS, *MADE_OF_OTHERS))]
NEW_TOKENS = 20
# One of less than a window of 8, one of more than a prompt chunk of 128, and others between.
PROMPTS = [np.random.default_rng(size).integers(0, 64, size).tolist() for size in (5, 140, 28, 40)]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 0.0, 1.0, 0.7))
]


@pytest.fixture(scope="module")
def oracle(target):
    return OracleProposer(target.config.vocab_size)


@pytest.fixture(scope="module")
def plain(target, oracle):
    """Of every prompt more tokens than are asked for: the oracle looks ahead of the last one."""
    longer = [
        SamplingParams(
            max_tokens=NEW_TOKENS + oracle.depth + 1,
            ignore_eos=True,
            temperature=own.temperature,
            seed=own.seed,
        )
        for own in PARAMS
    ]
    engine = TinyEngine(target, settings=PLAIN, slots=4, capacity=192)
    return [completion.token_ids for completion in serve(engine, PROMPTS, longer)]


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_plain_tokens_are_what_whole_forwards_choose(target, plain):
    for prompt, tokens, params in zip(PROMPTS[:2], plain, PARAMS, strict=False):
        rows = choice_rows(target, prompt, tokens[:NEW_TOKENS], params)
        assert gaps(rows).min() > TIE  # no tie excuses a difference
        np.testing.assert_array_equal(rows.argmax(axis=-1), tokens[:NEW_TOKENS])


@pytest.mark.wide
@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_deep_and_branching_paths(target, oracle, plain):
    check_deep_and_branching_paths(target, oracle, plain, 4, [[3, 0, 2], [0, 1, 2, 3]])


@pytest.mark.wide
@pytest.mark.parametrize("family", [ALL_SLOTS], indirect=True)
@pytest.mark.parametrize(("slots", "groups"), [(1, [[0], [1], [2], [3]]), (4, [[1, 2]])], ids=["one", "two"])
def test_paths_in_other_slots(target, oracle, plain, slots, groups):
    check_deep_and_branching_paths(target, oracle, plain, slots, groups)


def check_deep_and_branching_paths(target, oracle, plain, slots, groups):
    for group in groups:
        truth = [[*PROMPTS[i], *plain[i]] for i in group]
        engine = TinyEngine(
            target,
            settings=TreeSettings(budget=32, width=3),
            slots=slots,
            capacity=192,
            proposer=oracle,
            proposer_weights=plant([*truth, *[[]] * (slots - len(truth))], 192),
        )
        completions = serve(engine, [PROMPTS[i] for i in group], [PARAMS[i] for i in group])
        for i, completion in zip(group, completions, strict=True):
            assert completion.token_ids == plain[i][:NEW_TOKENS]
        assert max(length for own in completions for length in own.accept_lengths) > 3
