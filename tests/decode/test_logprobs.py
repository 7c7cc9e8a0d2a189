"""Log-probabilities of tokens: those of the target's whole rows of logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, TreeDecoder, generate, generate_tree, logits
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.decode.logprobs import logprobs_of
from jetspec_jax.decode.scoring import SCORED_CHUNK, score_prompt
from jetspec_jax.engine import wants
from tests.decode.tiny import (
    HYBRID,
    SLIDING,
    TINY,
    random_head,
    random_target,
    with_windows,
    word_tokenizer,
)
from tests.marks import wide
from tests.mesh.tiny import config_of
from tests.meshes import GATHER, agreed, mesh_of, on_parts, padded
from tests.sampling.reference import log_softmax

VOCAB = 67
jitted = jax.jit(logprobs_of, static_argnames="vocab_size")


def by_sorting(rows, chosen, count=20):
    """In float64; of equals the lower id first."""
    rows, logprobs = np.asarray(rows, np.float64), log_softmax(rows)
    order = np.argsort(-rows, axis=-1, kind="stable")
    ranks = 1 + np.argmax(order == chosen[..., None], axis=-1)
    own = np.take_along_axis(logprobs, chosen[..., None], axis=-1)[..., 0]
    best = order[..., :count]
    return own, ranks, best, np.take_along_axis(logprobs, best, axis=-1)


def make_case(dtype):
    """Rows without ties, with many, and of which most tokens are impossible."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 3, (3, 5, VOCAB))
    rows[:, 1] = rows[:, 1].round()
    rows[:, 2, 25:] = -np.inf
    return rows.astype(dtype), rng.integers(0, 25, (3, 5)).astype(np.int32)


def assert_told(told, expected):
    own, ranks, best, likeliest = expected
    np.testing.assert_allclose(told.chosen, own, atol=1e-5)
    np.testing.assert_array_equal(told.ranks, ranks)
    np.testing.assert_array_equal(told.tokens, best)
    np.testing.assert_allclose(told.likeliest, likeliest, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_chosen_ones_ranks_and_likeliest(dtype):
    rows, chosen = make_case(dtype)
    assert_told(jitted(rows, chosen, vocab_size=VOCAB), by_sorting(rows, chosen))


def test_a_vocabulary_that_is_smaller():
    rows, chosen = make_case(jnp.float32)
    told = jitted(rows[..., :7], chosen % 7, vocab_size=7)
    assert_told(told, by_sorting(rows[..., :7], chosen % 7))
    assert told.tokens.shape == (3, 5, 7)


_parts = functools.partial(logprobs_of, vocab_size=VOCAB)


@pytest.mark.parametrize("mesh", [(1, 2), (2, 4)])
def test_parts_tell_what_the_whole_does(mesh):
    rows, chosen = make_case(jnp.bfloat16)
    run, arguments = on_parts(_parts, *mesh), (padded(rows, np.prod(mesh)), chosen)
    assert_told(agreed(run(*arguments)), by_sorting(rows, chosen))
    assert run.lower(*arguments).as_text().count(GATHER) == 3


def expected_of_prompt(target, prompt):
    rows = np.asarray(logits(target, [prompt]))[0, :-1]
    return by_sorting(rows, np.array(prompt[1:]))


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (TINY, (2, SCORED_CHUNK, SCORED_CHUNK + 1, SCORED_CHUNK + 2, 150)),
        (SLIDING, (150,)),
        (HYBRID, (150,)),
    ],
    ids=["full", "windows", "recurrent"],
)
def test_prompts(config, lengths):
    target, rng = random_target(config, 0), np.random.default_rng(1)
    decoder = TreeDecoder(config)
    for length in lengths:
        prompt = rng.integers(0, config.vocab_size, length).astype(np.int32)
        told = score_prompt(decoder, target.weights, prompt, target.dtype)
        assert len(told) == -(-(length - 1) // SCORED_CHUNK)
        whole = jax.tree.map(lambda *parts, n=length: np.concatenate(parts, axis=1)[0, : n - 1], *told)
        own, ranks, best, likeliest = expected_of_prompt(target, prompt.tolist())
        # The norm behind a nearly decayed state magnifies rounding: on some processors a few are further off.
        rare = 2e-4 if config is HYBRID else 1e-4
        for got, expected in ((whole.chosen, own), (whole.likeliest, likeliest)):
            np.testing.assert_allclose(got, expected, atol=rare)
            assert (np.abs(got - expected) <= 1e-4).mean() >= 0.998
        # Rounding may swap tokens that nearly tie.
        assert (whole.ranks == ranks).mean() > 0.9
        assert (whole.tokens == best).mean() > 0.9


@pytest.mark.parametrize("mesh", [(1, 2), wide((1, 4))], ids=str)
def test_a_prompt_on_a_mesh(mesh):
    config = config_of("qwen3")
    target = random_target(config, 0)
    prompt = np.random.default_rng(2).integers(0, VOCAB, 100).astype(np.int32)
    weights = place(target.weights, config, mesh_of(*mesh))
    told = score_prompt(TreeDecoder(config, mesh=mesh_of(*mesh)), weights, prompt, target.dtype)
    whole = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[0, :99], *told)
    own, _, _, likeliest = expected_of_prompt(target, prompt.tolist())
    np.testing.assert_allclose(whole.chosen, own, atol=1e-4)
    np.testing.assert_allclose(whole.likeliest, likeliest, atol=1e-4)


CONFIG = with_windows(TINY, None)
PARAMS = [
    SamplingParams(max_tokens=20, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=9, logprobs=20, temperature=1.0, seed=1, top_k=10, presence_penalty=1.0),
    SamplingParams(max_tokens=20, temperature=1.0, seed=2),
    SamplingParams(max_tokens=1, logprobs=0, prompt_logprobs=2, logit_bias={7: 100}),
]
PROMPTS = [[5, 9, 2], [3], [4] * 70, list(range(1, 64)) * 2]


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 3, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def outputs(target):
    return {
        "plain": generate(target, PROMPTS, PARAMS),
        "tree": generate_tree(target, random_head(CONFIG, 3), PROMPTS, PARAMS, budget=16, width=3),
    }


@pytest.mark.parametrize("way", ["plain", "tree"])
def test_completions_tell_of_each_token(target, outputs, way):
    texts = target.tokenizer
    for prompt, params, output in zip(PROMPTS, PARAMS, outputs[way], strict=True):
        if params.logprobs is None:
            assert output.logprobs is None
            assert output.cumulative_logprob is None
            continue
        rows = np.asarray(logits(target, [[*prompt, *output.token_ids]]))[0, len(prompt) - 1 : -1]
        own, ranks, best, likeliest = by_sorting(rows, np.array(output.token_ids), params.logprobs)
        assert len(output.logprobs) == len(output.token_ids) == params.max_tokens
        for at, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert next(iter(told)) == token
            assert told[token].logprob == pytest.approx(own[at], abs=1e-4)
            assert told[token].rank == ranks[at]
            assert set(told) == {token, *best[at].tolist()}
            for rank, other in enumerate(best[at].tolist(), start=1):
                assert told[other].rank == rank
                assert told[other].logprob == pytest.approx(likeliest[at, rank - 1], abs=1e-4)
                assert told[other].decoded_token == texts.decode([other])
        assert output.cumulative_logprob == pytest.approx(own.sum(), abs=1e-3)


def test_completions_tell_of_prompts(target, outputs):
    """Beside rounds that tell nothing, and of the raw distribution, whatever is chosen."""
    assert [output.prompt_logprobs for output in outputs["plain"][:3]] == [None] * 3
    output, prompt = outputs["plain"][3], PROMPTS[3]
    assert output.token_ids == [7]
    assert output.prompt_logprobs == outputs["tree"][3].prompt_logprobs
    own, ranks, best, _ = expected_of_prompt(target, prompt)
    first, *others = output.prompt_logprobs
    assert first is None
    assert len(others) == len(prompt) - 1
    for at, (token, told) in enumerate(zip(prompt[1:], others, strict=True)):
        assert told[token].logprob == pytest.approx(own[at], abs=1e-4)
        assert told[token].rank == ranks[at]
        assert set(told) == {token, *best[at, :2].tolist()}


def test_a_prompt_of_one_token_and_several_completions(target, monkeypatch):
    scored = []
    monkeypatch.setattr(wants, "score_prompt", lambda *own: scored.append(own) or score_prompt(*own))
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=1, n=3, prompt_logprobs=1)
    alone, *others = generate(target, [[5, 9, 2, 7], [5]], params)
    assert len(scored) == 1  # all completions of a prompt share it
    assert [output.prompt_logprobs == alone.prompt_logprobs for output in others[:2]] == [True] * 2
    assert [output.prompt_logprobs for output in others[2:]] == [[None]] * 3


def test_what_a_stop_string_cuts_off_is_not_told_of(target, outputs):
    text = outputs["tree"][0].text
    params = dataclasses.replace(PARAMS[0], stop=text[4])
    head, others = random_head(CONFIG, 3), (PROMPTS[1:], PARAMS[1:])
    output, *_ = generate_tree(
        target, head, [PROMPTS[0], *others[0]], [params, *others[1]], budget=16, width=3
    )
    assert output.finish_reason == "stop"
    assert output.logprobs == outputs["tree"][0].logprobs[: len(output.token_ids)]
    assert len(output.token_ids) < 20
