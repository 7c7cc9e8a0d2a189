"""Log-probabilities of tokens: those of the target's whole rows of logits."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate, generate_tree
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.decode.logprobs import logprobs_of
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.scoring import SCORED_CHUNK, score_prompt
from jetspec_jax.engine import runner
from tests.decode.in_float64 import reference_logprobs
from tests.decode.tiny import SLIDING, TINY, flat, random_head, random_target, with_windows, word_tokenizer
from tests.families import step_by_step
from tests.families.goldens import LONG_IDS, golden_file, golden_target
from tests.float64 import Rounding, reference_of
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


def assert_rounded_logprobs(token, told, reference):
    """What is told of a token is what a reference's row says, ``[V]`` with one bound, but for rounding."""
    chosen, rank, tokens, likeliest = told
    row, bound = reference
    assert abs(chosen - row[token]) <= bound
    # Tokens that nearly tie may trade places.
    assert np.sum(row > row[token] + 2 * bound) < rank <= np.sum(row >= row[token] - 2 * bound)
    assert len(set(tokens)) == len(tokens)
    # Sorting moves no element further than the elements have moved.
    best = np.sort(row)[::-1][: len(tokens)]
    assert np.abs(likeliest - best).max(initial=0) <= bound
    assert np.abs(likeliest - row[tokens]).max(initial=0) <= bound


def assert_rounded_prompt(told, prompt, reference):
    """Of all tokens of a prompt but the first; ``told`` are chunks."""
    whole = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1)[0, : len(prompt) - 1], *told)
    for at, token in enumerate(prompt[1:]):
        own = [column[at] for column in whole]
        assert_rounded_logprobs(token, own, (reference.values[at], reference.bound[at]))


@functools.cache
def recurrent_prompt():
    """A prompt of a recurrent golden, and its log-probabilities: bounds are those of each token."""
    prompt, rounded = LONG_IDS[0, :100], Rounding()
    samples = step_by_step.logits(*golden_file("qwen3_5"), prompt[None], rounded)
    return prompt, reference_of(rounded(log_softmax(samples[:, 0])))


def assert_scores(target, prompt, reference, mesh=None):
    weights = target.weights if mesh is None else place(target.weights, target.config, mesh)
    told = score_prompt(Models(target.config, mesh=mesh), weights, prompt, target.dtype)
    assert len(told) == -(-(len(prompt) - 1) // SCORED_CHUNK)
    assert_rounded_prompt(told, prompt, reference)


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        (TINY, (2, SCORED_CHUNK, SCORED_CHUNK + 1, SCORED_CHUNK + 2, 150)),
        (SLIDING, (150,)),
    ],
    ids=["full", "windows"],
)
def test_prompts(config, lengths):
    target, rng = random_target(config, 0), np.random.default_rng(1)
    for length in lengths:
        prompt = rng.integers(0, config.vocab_size, length).astype(np.int32)
        assert_scores(target, prompt, reference_logprobs(target, prompt))


def test_prompts_behind_recurrences():
    assert_scores(golden_target("qwen3_5"), *recurrent_prompt())


@pytest.mark.parametrize("mesh", [(1, 2), wide((1, 4))], ids=str)
def test_a_prompt_on_a_mesh(mesh):
    target = random_target(config_of("qwen3"), 0)
    prompt = np.random.default_rng(2).integers(0, VOCAB, 100).astype(np.int32)
    assert_scores(target, prompt, reference_logprobs(target, prompt), mesh_of(*mesh))


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
        reference = reference_logprobs(target, [*prompt, *output.token_ids])
        assert len(output.logprobs) == len(output.token_ids) == params.max_tokens
        for at, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
            assert next(iter(told)) == token
            row = (column[len(prompt) - 1 + at] for column in reference)
            assert_told_of(token, told, row, params.logprobs)
            assert all(own.decoded_token == texts.decode([other]) for other, own in told.items())
        own = [told[token].logprob for token, told in zip(output.token_ids, output.logprobs, strict=True)]
        assert output.cumulative_logprob == pytest.approx(math.fsum(own), rel=len(own) * 2**-53)


def assert_told_of(token, told, reference, count):
    """Of a token and the ``count`` likeliest, among which it may be: ranks are theirs."""
    best = sorted((own.rank, other) for other, own in told.items() if own.rank <= count)
    assert [rank for rank, _ in best] == list(range(1, count + 1))
    tokens = [other for _, other in best]
    assert set(told) == {token, *tokens}
    likeliest = np.array([told[other].logprob for other in tokens])
    assert_rounded_logprobs(token, (told[token].logprob, told[token].rank, tokens, likeliest), reference)


def test_completions_tell_of_prompts(target, outputs):
    """Beside rounds that tell nothing, and of the raw distribution, whatever is chosen."""
    assert [output.prompt_logprobs for output in outputs["plain"][:3]] == [None] * 3
    output, prompt = outputs["plain"][3], PROMPTS[3]
    assert output.token_ids == [7]
    assert output.prompt_logprobs == outputs["tree"][3].prompt_logprobs
    reference = reference_logprobs(target, prompt)
    first, *others = output.prompt_logprobs
    assert first is None
    assert len(others) == len(prompt) - 1
    for at, (token, told) in enumerate(zip(prompt[1:], others, strict=True)):
        assert_told_of(token, told, (column[at] for column in reference), 2)


def test_a_prompt_of_one_token_and_several_completions(target, monkeypatch):
    scored = []
    monkeypatch.setattr(runner, "score_prompt", lambda *own: scored.append(own) or score_prompt(*own))
    params = SamplingParams(max_tokens=2, temperature=1.0, seed=1, n=3, prompt_logprobs=1)
    alone, *others = flat(generate(target, [[5, 9, 2, 7], [5]], params))
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
