"""Every sampling parameter, alone and with all others: trees give plain decoding's tokens, which are right.

Each token is held against the argmax of logits that are adjusted from scratch, in NumPy, of one forward over
the whole sequence.
"""

import dataclasses

import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate, generate_tree, load_draft_head, load_target, logits
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.compilations import compilations
from tests.decode.oracle import OracleProposer, plant
from tests.decode.ties import TIE, choice_rows, gaps
from tests.decode.tiny import (
    TINY,
    TinyEngine,
    finish,
    random_head,
    random_target,
    serve,
    with_windows,
    word_tokenizer,
)
from tests.sampling.reference import log_softmax

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


ORACLE = OracleProposer(CONFIG.vocab_size)


@pytest.mark.wide
def test_deep_scattered_paths(target):
    prompts, params = requests("everything")
    alone = [generate(target, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    # What it says beyond the end does not matter.
    beyond = [0] * (ORACLE.depth + 1)
    sequences = [[*prompt, *own.token_ids, *beyond] for prompt, own in zip(prompts, alone, strict=True)]
    engine = TinyEngine(
        target,
        None,
        TreeSettings(budget=32, width=3, algorithm="accum_logp"),
        slots=len(prompts),
        capacity=128,
        proposer=ORACLE,
        proposer_weights=plant(sequences, 128, 0),
    )
    outputs = serve(engine, prompts, params)
    assert differences(target, prompts, params, outputs, alone) == []
    lengths = [length for output in outputs for length in output.accept_lengths]
    assert np.mean(lengths) > 3


def come_and_go():
    """Requests of all kinds, in turn with such that want nothing; more of them than slots, and than pages."""
    kinds = ["presence", "words", "everything"]
    prompts, params = [], []
    for number in range(6):
        wanted = KINDS[kinds[number // 2]] if number % 2 else {"logprobs": 2}
        own = {"max_tokens": 70 + 4 * number, "seed": number, "temperature": float(number % 3 > 0)}
        params.append(SamplingParams(**{"ignore_eos": True, **own, **wanted}))
        prompts.append([number, 5, *PROMPTS[number % 3]] + [7] * (40 if number % 2 else 50))
    return prompts, params


@pytest.mark.wide
def test_requests_that_come_and_go(target, head):
    prompts, params = come_and_go()
    alone = [generate(target, [prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    engine = TinyEngine(target, head, TreeSettings(budget=16, width=3), slots=2, capacity=192, num_pages=3)
    requests = []
    for prompt, own in zip(prompts, params, strict=True):
        requests.append(engine.submit(prompt, own))
        engine.step(2)
    finish(engine)
    assert sum(request.preemptions for request in requests) > 0
    for request, own, plain in zip(requests, params, alone, strict=True):
        parted = first_divergence(target, request.prompt.tolist(), own, request.tokens, plain.token_ids)
        assert parted is None or parted.is_tie
        if own.logprobs is not None:
            told = [row.chosen for row in request.logprobs]
            expected = [
                row[token].logprob for token, row in zip(plain.token_ids, plain.logprobs, strict=True)
            ]
            np.testing.assert_allclose(told, expected, atol=1e-4)


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


DEMO_WANTS = {
    "presence_penalty": 2.0,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.3,
    "min_tokens": 40,
    "ignore_eos": False,
    "stop_token_ids": list(range(0, 2000, 2)),
    "logit_bias": dict.fromkeys(range(0, 1000, 3), -5.0),
    "allowed_token_ids": list(range(1500)),
    "bad_words": ["return", "self", "path", "for line in", "the"],
}


@pytest.fixture(scope="module")
def demo():
    target = load_target(DEMO_TARGET, dtype="float32")
    return target, load_draft_head(DEMO_DRAFT_HEAD, dtype="float32", target=target)


@pytest.mark.wide
def test_the_demo_pair(demo):
    """Text that recurs, and words that begin with a space: every request, alone and in a batch of trees."""
    target, head = demo
    prompt = target.tokenizer.encode("def read_lines(path):")
    own = {"max_tokens": 48, "logprobs": 2, **DEMO_WANTS}
    params = [SamplingParams(**own), SamplingParams(**own, temperature=1.0, seed=1, top_p=0.9)]
    alone = [generate(target, [prompt], each)[0] for each in params]
    tree = generate_tree(target, head, [prompt] * 2, params, budget=32)
    assert differences(target, [prompt] * 2, params, tree, alone) == []
    assert tree[0].mean_acceptance_length > 1.2
    for output, plain in zip(tree, alone, strict=True):
        whole = log_softmax(logits(target, [[*prompt, *output.token_ids]])[0, len(prompt) - 1 : -1])
        for token, told, row in zip(output.token_ids, output.logprobs, whole, strict=True):
            assert told[token].logprob == pytest.approx(row[token], abs=1e-4)
            assert max(row) == pytest.approx(max(own.logprob for own in told.values()), abs=1e-4)
        assert plain.cumulative_logprob == pytest.approx(output.cumulative_logprob, abs=1e-2)
        text = target.tokenizer.decode(output.token_ids)
        assert " return" not in text
        assert "self" not in text.split()
        assert len(output.token_ids) >= 40
