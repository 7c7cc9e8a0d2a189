"""Every sampling parameter, alone and with all others: trees give plain decoding's tokens, which are right.

Each token is held against the argmax of logits that are adjusted from scratch, in NumPy, of one forward over
the whole sequence.
"""

import dataclasses

import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.compilations import compilations
from tests.decode.ties import TIE, choice_rows, gaps
from tests.decode.tiny import (
    TINY,
    TinyEngine,
    random_head,
    random_target,
    serve,
    with_windows,
    word_tokenizer,
)

EOS = 9
CONFIG = with_windows(TINY, None)
PROMPTS = [[5, 9, 2, 7], [3] * 30, [11]]
TOKENS = 24
# Words of one, two and three tokens: the letters "a" to "z" are the first 26 tokens.
KINDS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.6},
    "rewards": {"presence_penalty": -1.0, "frequency_penalty": -0.3, "repetition_penalty": 0.8},
    "minimum": {"min_tokens": 12, "stop_token_ids": list(range(0, 64, 3)), "ignore_eos": False},
    "bias": {"logit_bias": {token: 3.0 * (-1) ** token for token in range(40)}},
    "allowed": {"allowed_token_ids": list(range(5, 40))},
    "words": {"bad_words": ["a", "gh", "hg", "abc", *(f"{first}{first}" for first in "defghijklmnop")]},
}
EVERYTHING = {name: value for kind in KINDS.values() for name, value in kind.items()}
KINDS["everything"] = EVERYTHING


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 3, eos=(EOS,), tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def head():
    return random_head(CONFIG, 3)


def requests(kind):
    """Greedy and sampled ones of a kind, and one that wants nothing."""
    own = {"max_tokens": TOKENS, "ignore_eos": True, **KINDS[kind]}
    params = [
        SamplingParams(**own),
        SamplingParams(**own, temperature=1.0, seed=1),
        SamplingParams(**own, temperature=0.7, seed=2, top_k=20, top_p=0.95, min_p=0.01),
        SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=3),
    ]
    return [PROMPTS[number % len(PROMPTS)] for number in range(len(params))], params


def differences(target, prompts, params, got, expected):
    """The gaps where outputs differ; each must be a tie."""
    found = []
    for prompt, own, ours, theirs in zip(prompts, params, got, expected, strict=True):
        parted = first_divergence(target, prompt, own, ours.token_ids, theirs.token_ids)
        if parted is not None:
            assert parted.is_tie, (own, parted)
            found.append(parted)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_trees_equal_plain_decoding_which_is_right(target, head, kind):
    prompts, params = requests(kind)
    alone = [generate(target, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    changed = 0
    for prompt, own, plain in zip(prompts, params, alone, strict=True):
        rows = choice_rows(target, prompt, plain.token_ids, own)
        wrong = (rows.argmax(-1) != plain.token_ids) & (gaps(rows) >= TIE)
        assert not wrong.any(), (own, np.flatnonzero(wrong))
        unchanged = dataclasses.replace(
            SamplingParams(max_tokens=TOKENS, stop_token_ids=own.stop_token_ids, ignore_eos=own.ignore_eos),
            **{name: getattr(own, name) for name in ("temperature", "seed", "top_k", "top_p", "min_p")},
        )
        changed += generate(target, [prompt], unchanged)[0].token_ids != plain.token_ids
    assert changed >= 1
    tree = generate_tree(target, head, prompts, params, budget=16, width=3)
    assert differences(target, prompts, params, tree, alone) == []
    assert [own.finish_reason for own in tree] == [own.finish_reason for own in alone]


@pytest.mark.wide
def test_a_batch_that_wants_nothing_runs_what_it_ran_before(target, head):
    """Once an engine has arrays for what others want, and beside those that wait."""
    engine = TinyEngine(target, head, TreeSettings(budget=16, width=3), slots=1, capacity=128)
    plain, wants = (
        SamplingParams(max_tokens=8),
        SamplingParams(max_tokens=8, logprobs=1, **EVERYTHING | {"min_tokens": 3}),
    )
    [before] = serve(engine, [PROMPTS[0]], [plain])
    serve(engine, [PROMPTS[0]], [wants])
    with compilations() as after:
        outputs = serve(engine, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], [plain, wants, plain])
    assert after == []
    assert outputs[0] == outputs[2] == before
    # The same text as where nobody has ever wanted anything.
    without = TinyEngine(target, head, TreeSettings(budget=16, width=3), slots=1, capacity=128)
    decoder, seen = engine.plan.decoder, []
    for own in (engine, without):
        state = dataclasses.replace(own.runner.state, adjust=None)
        seen.append(decoder.program.lower(decoder, own.runner.weights, state, np.int32(1)).as_text())
    assert seen[0] == seen[1]
