"""Every tree algorithm in the round: plain decoding's tokens, whatever the trees look like."""

import dataclasses

import jax.numpy as jnp
import pytest

from jetspec_jax import SamplingParams, generate, generate_tree
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.admission import make_requests
from jetspec_jax.engine.runner import Runner
from jetspec_jax.tree import Algorithm, Plan, algorithm_names, get_algorithm
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import SLIDING, TinyEngine, random_head, random_target, serve, served
from tests.marks import wide

ORACLE = OracleProposer(SLIDING.vocab_size)
NEW_TOKENS = 24
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]
PARAMS = [
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True),
    SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=1.0, seed=7),
]


@pytest.fixture(scope="module")
def target():
    return random_target(SLIDING, 0)


# The default, the chain, one with caps, and the one that changes buckets.
IN_SHORT = ("top_nodes", "chain", "task_router", "auto")


@pytest.fixture(scope="module")
def plain(target):
    free = [
        SamplingParams(
            max_tokens=NEW_TOKENS + ORACLE.depth + 1, ignore_eos=True, temperature=p.temperature, seed=p.seed
        )
        for p in PARAMS
    ]
    return [completion.token_ids for completion in generate(target, PROMPTS, free)]


@pytest.mark.parametrize("name", [name if name in IN_SHORT else wide(name) for name in algorithm_names()])
def test_trees_of_every_algorithm_give_plain_decoding_s_tokens(target, plain, name, monkeypatch):
    """The oracle hides what follows among decoys, so that paths are deep and branch."""
    # Rounds of one price: what they take here must not keep "auto" from trees.
    collect = Runner.collect
    monkeypatch.setattr(Runner, "collect", lambda runner: collect(runner)._replace(seconds=None))
    engine = TinyEngine(
        target,
        settings=TreeSettings(budget=16, width=3, algorithm=get_algorithm(name)),
        slots=2,
        capacity=64,
        proposer=ORACLE,
        proposer_weights=plant([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)], 128, 0),
    )
    completions = serve(engine, PROMPTS, PARAMS)
    for completion, expected in zip(completions, plain, strict=True):
        assert completion.token_ids == expected[:NEW_TOKENS]
        assert max(completion.tree_sizes) <= 16
    assert max(length for completion in completions for length in completion.accept_lengths) > 1


@pytest.mark.wide
def test_routing_is_each_request_s_own(target):
    """Of a math prompt a chain is drafted, of a chat a tree, in one batch and one program."""
    head = random_head(SLIDING, 1)
    hints = [{"task": "math"}, {"task": "chat"}]
    params, shape = SamplingParams(max_tokens=8, ignore_eos=True), {"budget": 64, "width": 3}
    settings = TreeSettings(**shape, algorithm="task_router")
    engine = TinyEngine(target, head, settings, slots=2)
    completions = served(engine, make_requests(target, engine.plan, settings, PROMPTS, params, hints))
    chain, tree = (set(completion.tree_sizes) for completion in completions)
    assert chain == {1 + head.config.depth}
    assert set(completions[0].tree_depths) == {head.config.depth}
    assert min(tree) > 20
    for hint, completion in zip(hints, completions, strict=True):
        algorithm = get_algorithm("task_router", {"routing": hint})
        for one in generate_tree(target, head, PROMPTS, params, **shape, algorithm=algorithm):
            assert set(one.tree_sizes) == set(completion.tree_sizes)


def test_what_a_plan_lacks_is_said_before_anything_is_decoded(target):
    @dataclasses.dataclass(frozen=True)
    class Misshapen(Algorithm):
        def plan(self, candidates, routing):
            return Plan(jnp.ones(candidates.tokens.shape[1], jnp.int32))

    head = random_head(SLIDING, 1)
    rows = head.config.depth
    with pytest.raises(ValueError, match=rf"'.*Misshapen': caps must be int32 \[1, {rows}\]"):
        generate_tree(target, head, PROMPTS, PARAMS, algorithm=Misshapen())
    templates = {"decisive_task": [1] * (rows + 1)}
    with pytest.raises(ValueError, match=f"has {rows + 1} caps, .* the draft is {rows} deep"):
        generate_tree(
            target, head, PROMPTS, PARAMS, algorithm=get_algorithm("task_router", {"templates": templates})
        )


def test_hints_that_are_not_valid_are_refused():
    with pytest.raises(ValueError, match=r"not valid: \['topic'\]"):
        get_algorithm("task_router", {"routing": {"topic": "math"}})
    with pytest.raises(TypeError, match="routing is a mapping"):
        get_algorithm("reasoning_router", {"routing": "math"})
