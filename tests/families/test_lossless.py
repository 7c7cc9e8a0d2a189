"""Trees give plain decoding's tokens on every family, far behind the windows."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.engine import Engine, TreeSettings
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import serve
from tests.families.goldens import IDS

pytestmark = pytest.mark.usefixtures("quick_compiles")

NEW_TOKENS = 20
# Of three to five windows, all of other lengths.
LONG = np.concatenate([IDS[0], IDS[1, :7]])
PROMPTS = [ids.tolist() for ids in (LONG, IDS[1, :25], IDS[0, 3:31], IDS[1, 9:])]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=temperature, seed=seed)
    for seed, temperature in enumerate((0.0, 1.0, 0.0, 0.7))
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
    return [completion.token_ids for completion in generate(target, PROMPTS, longer, max_slots=4)]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_deep_and_branching_paths(target, oracle, plain, batch):
    prompts, expected = PROMPTS[:batch], plain[:batch]
    engine = Engine(
        target,
        settings=TreeSettings(budget=32, width=3),
        slots=batch,
        capacity=96,
        proposer=oracle,
        proposer_weights=plant([[*p, *t] for p, t in zip(prompts, expected, strict=True)], 128, batch),
    )
    completions = serve(engine, prompts, PARAMS[:batch])
    for completion, tokens in zip(completions, expected, strict=True):
        assert completion.token_ids == tokens[:NEW_TOKENS]
    assert max(length for completion in completions for length in completion.accept_lengths) > 3
