"""Drafts with the noise that decides: tokens of drafts without it and of plain decoding, in fewer rounds."""

import itertools
from dataclasses import dataclass

import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.runner import Runner
from jetspec_jax.tree import algorithm_names, get_algorithm, top_candidates
from tests.decode.tiny import (
    TINY,
    TinyEngine,
    random_head,
    random_target,
    serve,
    with_windows,
    word_tokenizer,
)
from tests.marks import wide

CONFIG = with_windows(TINY, None, 8)
TOKENS = 20
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [11], [5, 3, 5, 8]]
IN_SHORT = ("top_nodes", "chain")


def params(**own):
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, **own})


#: Two batches: of temperatures and filters, and of adjustments and extreme values.
BATCHES = {
    "temperatures": [
        params(),
        params(temperature=0.3, seed=1),
        params(temperature=0.7, seed=2, top_p=0.8),
        params(temperature=1.0, seed=3),
        params(temperature=1.0, seed=4, top_k=9, min_p=0.02),
        params(temperature=1.5, seed=5),
    ],
    "adjusted": [
        params(temperature=1.0, seed=6, repetition_penalty=1.4, presence_penalty=0.5),
        params(temperature=0.7, seed=-(2**63), frequency_penalty=0.7, logit_bias={3: 4.0}),
        params(temperature=1e-6, seed=2**64 - 1),
        params(temperature=1e6, seed=7),
        params(temperature=1.0, seed=8, allowed_token_ids=[7]),
        params(temperature=1.5, seed=9, top_k=1, min_tokens=12, stop_token_ids=[*range(0, 64, 2)]),
        params(temperature=1.0, seed=10, allowed_token_ids=[7, 8], bad_words=["a", "h h", "i i"]),
    ],
}


@dataclass(frozen=True)
class Blind(DraftHeadProposer):
    """The head, which drafts without the noise, and without the requests' settings."""

    @property
    def selected(self):
        return 8

    def select(self, weights, state, target, anchors, slots, count, depth, scoring):
        return top_candidates(self.propose(weights, state, target, anchors, slots, depth), count)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 0, tokenizer=word_tokenizer(CONFIG.vocab_size))


@pytest.fixture(scope="module")
def plain(target):
    return {
        name: [generate(target, [prompt], own)[0].token_ids for prompt, own in requests(name)]
        for name in BATCHES
    }


def requests(name):
    return [(PROMPTS[i % len(PROMPTS)], own) for i, own in enumerate(BATCHES[name])]


# Each algorithm with one of the batches, and two with both.
ALL = [(name, [*BATCHES][i % 2]) for i, name in enumerate(algorithm_names()) if name not in IN_SHORT]


@pytest.mark.parametrize(
    ("name", "batch"), [*itertools.product(IN_SHORT, BATCHES), *(wide(*own) for own in ALL)]
)
def test_tokens_are_the_same_in_fewer_rounds(target, plain, batch, name, monkeypatch):
    # Rounds of one price: what they take here must not keep "auto" from trees.
    collect = Runner.collect
    monkeypatch.setattr(Runner, "collect", lambda runner: collect(runner)._replace(seconds=None))
    head, rounds = random_head(CONFIG, 1), {}
    for kind in (DraftHeadProposer, Blind):
        engine = TinyEngine(
            target,
            settings=TreeSettings(budget=32, width=8, algorithm=get_algorithm(name), candidates=8),
            slots=len(BATCHES[batch]),
            capacity=64,
            proposer=kind(head.config),
            proposer_weights=head.weights,
        )
        found = serve(engine, *map(list, zip(*requests(batch), strict=True)))
        assert [own.token_ids for own in found] == plain[batch]
        rounds[kind] = [own.rounds for own in found]
    with_noise, without = rounds[DraftHeadProposer], rounds[Blind]
    assert sum(with_noise) < sum(without)
    if batch == "temperatures":
        assert with_noise[0] == without[0]  # of a greedy request the trees are the same
