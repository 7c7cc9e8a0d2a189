"""Every family decodes in prompt chunks and trees, past its windows, what its logits say."""

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.engine import Engine, TreeSettings
from tests.decode.oracle import OracleProposer, plant
from tests.decode.ties import TIE, choice_rows, gaps
from tests.decode.tiny import serve

pytestmark = pytest.mark.usefixtures("quick_compiles")
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)

# Below and above a prompt chunk of 128.
PROMPTS = [np.random.default_rng(length).integers(0, 64, length).tolist() for length in (5, 140)]


def test_whatever_is_drafted_the_text_is_the_same(target):
    def decode(*truth):
        engine = Engine(
            target,
            None,
            TreeSettings(budget=32, width=3),
            slots=2,
            capacity=256,
            proposer=OracleProposer(target.config.vocab_size),
            proposer_weights=plant(truth, 256),
        )
        return serve(engine, PROMPTS, [PARAMS] * 2)

    poor = decode([], [])
    texts = [[*prompt, *own.token_ids] for prompt, own in zip(PROMPTS, poor, strict=True)]
    good = decode(*texts)
    assert [own.token_ids for own in good] == [own.token_ids for own in poor]
    assert all(own.mean_acceptance_length > 2.5 for own in good)
    assert all(own.mean_acceptance_length < 1.5 for own in poor)
    for prompt, own in zip(PROMPTS, good, strict=True):
        rows = choice_rows(target, prompt, own.token_ids, PARAMS)
        assert gaps(rows).min() > TIE  # no tie excuses a difference
        np.testing.assert_array_equal(rows.argmax(axis=-1), own.token_ids)
