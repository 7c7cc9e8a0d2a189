"""Rounds as three programs, with masks in between: the tokens of rounds that are one program."""

import functools

import pytest

from jetspec_jax import SamplingParams, TreeDecoder
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.grammars import run_constrained
from tests.decode.compilations import compilations
from tests.decode.test_live import CONFIGS, PAGES, Case
from tests.decode.tiny import HYBRID, SLIDING, TINY, TinyEngine, random_head, random_target
from tests.marks import wide

PROMPTS = [[5, 9, 2, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=17, temperature=1.0, seed=7, top_p=0.9),
]


def decode(engine, rounds, *, apart):
    """All tokens of two requests that decode together."""
    requests = [engine.submit(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
    run = functools.partial(run_constrained, engine.plan.decoder, {}) if apart else None
    for _ in range(20):
        if engine.busy:
            engine.step(rounds, run)
    return [(own.tokens, own.accept_lengths, own.tree_sizes) for own in requests]


@pytest.mark.parametrize(
    ("config", "budget", "rounds"),
    [wide(TINY, 1, 1), (SLIDING, 16, 3), wide(HYBRID, 16, 3), wide(TINY, 16, 20), wide(HYBRID, 1, 20)],
)
def test_rounds_of_three_programs_are_those_of_one(config, budget, rounds):
    target, head = random_target(config, 3), random_head(config, 4)
    settings = TreeSettings(budget=budget, width=3)
    whole, apart = (TinyEngine(target, head, settings, slots=2, capacity=128) for _ in range(2))
    expected = decode(whole, rounds, apart=False)
    assert decode(apart, rounds, apart=True) == expected
    assert [len(tokens) for tokens, *_ in expected] == [9, 17]
    with compilations() as seen:
        assert decode(apart, rounds, apart=True) == expected
    assert seen == []


@pytest.mark.wide
@pytest.mark.parametrize("kind", ["rings", "recurrent"])
def test_live_slots_and_those_that_wait_for_pages(kind, monkeypatch):
    """The last slot has pages for its prompt and a few tokens more."""
    case, turns = Case(CONFIGS[kind]), [(3, 1), (0, 2)] * 20
    pages = (PAGES, PAGES, PAGES, 4)
    expected, _ = case.serve(case.begin(pages=pages), turns)
    assert expected[:3] == case.expected[:3]
    assert 0 < len(expected[3]) < len(case.expected[3])
    run = functools.partial(run_constrained, case.decoder, {})
    monkeypatch.setattr(TreeDecoder, "decode", lambda _, *given: run(*given))
    assert case.serve(case.begin(pages=pages), turns)[0] == expected
