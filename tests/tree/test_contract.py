"""What an algorithm promises: who breaks it is named, with the sequence and the depth where it shows."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.tree import (
    AccumLogp,
    Algorithm,
    Candidates,
    Plan,
    Routing,
    algorithm_names,
    build_tree,
    check_algorithm_contract,
    check_plan,
    check_traceable,
    check_tree,
    get_algorithm,
    register_algorithm,
    top_candidates,
)
from jetspec_jax.tree import algorithms as registry
from jetspec_jax.tree.trial import DRAFTS, sample_logits
from tests.marks import wide

BATCH, DEPTH, WIDTH = 3, 4, 5
LOGITS = np.random.default_rng(0).normal(scale=3.0, size=(BATCH, DEPTH, 40)).astype(np.float32)
_calls = itertools.count()


def full(candidates: Candidates, **changes: Any) -> Plan:
    return AccumLogp().plan(candidates, Routing.unsaid(len(candidates.tokens)))._replace(**changes)


def caps(candidates: Candidates, value: Any) -> Plan:
    return Plan(jnp.broadcast_to(jnp.asarray(value, jnp.int32), candidates.tokens.shape[:2]))


@pytest.fixture
def broken(monkeypatch):
    """Makes an algorithm called "broken" of a function from candidates to a plan."""
    monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))

    def make(plan):
        @register_algorithm("broken")
        @dataclasses.dataclass(frozen=True)
        class Broken(Algorithm):
            def plan(self, candidates, routing):
                return plan(candidates)

        return Broken()

    return make


def build(algorithm, *, width=WIDTH, **settings):
    roots = np.arange(BATCH)
    return build_tree(LOGITS, roots, width=width, budget=16, algorithm=algorithm, **settings)


class TestWithoutValues:
    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (lambda c: full(c).caps, "plan must return a Plan, not .*Tracer"),
            (lambda c: full(c, caps=jnp.ones(4, jnp.int32)), r"caps must be int32 \[3, 4\].* int32 \[4\]"),
            (lambda c: full(c, caps=jnp.ones((3, 4))), r"caps must be int32 \[3, 4\].* not float32 \[3, 4\]"),
            (
                lambda c: full(c, bonus=c.log_probs),
                r"bonus must be float32 \[3, 4\].* float32 \[3, 4, 5\]",
            ),
            (
                lambda c: full(c, bonus=c.entropies, weight=float("nan")),
                "weight must be a finite Python number, not nan",
            ),
            (lambda c: full(c, weight=0.0), "weight 0.0 has no effect without a bonus"),
            (
                lambda c: caps(c, 3 if c.entropies[0, 0] > 1 else 1),
                r"plan must be traceable, .*\(Attempted boolean conversion of traced array",
            ),
            (lambda c: caps(c, int(c.entropies[0, 0])), "plan must be traceable"),
            (lambda c: caps(c, c.tokens[c.log_probs > -1].size), "plan must be traceable"),
            (lambda c: caps(c, {}["beta"]), "plan raised KeyError: 'beta'"),
            (lambda c: caps(c, c.entropies + jnp.ones(9)), ".*shapes .*3, 4.*9"),
        ],
    )
    def test_refused(self, broken, plan, message):
        algorithm = broken(plan)
        with pytest.raises(ValueError, match=rf"^tree algorithm 'broken': {message}"):
            build(algorithm)
        with pytest.raises(ValueError, match=r"^tree algorithm 'broken': "):
            check_traceable(algorithm, depth=DEPTH, width=WIDTH)

    def test_everything_is_listed(self, broken):
        algorithm = broken(lambda c: Plan([1], c.tokens, "heavy"))
        with pytest.raises(ValueError, match=r"caps must be .*; bonus must be .*; weight must be .*'heavy'"):
            build(algorithm)

    def test_numpy_arrays_are_arrays(self, broken):
        plan = np.full((BATCH, DEPTH), 2, np.int32)
        tree = build(broken(lambda c: Plan(plan)), checked=False)
        assert tree.num_nodes.tolist() == [16] * BATCH


class TestOptions:
    @pytest.mark.parametrize(
        ("value", "kind"),
        [([1, 2], "list"), ({"a": 1}, "dict"), (np.ones(2), "ndarray"), (jnp.ones(2), "Array")],
    )
    def test_that_are_not_hashable(self, monkeypatch, value, kind):
        monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))

        @register_algorithm("listed")
        @dataclasses.dataclass(frozen=True)
        class Listed(AccumLogp):
            levels: Any = ()
            fine: int = 1

        message = rf"'listed' must be hashable, and levels is a \w*{kind}\w*; make tuples"
        with pytest.raises(ValueError, match=message):
            build("listed", levels=value)
        with pytest.raises(ValueError, match=message):
            build(Listed(value))
        assert get_algorithm("listed", {"levels": (1, 2)}) == Listed((1, 2))

    def test_that_no_dataclass_compares(self):
        """Two of them would be equal, and the second would run the first one's program."""

        class Loose(AccumLogp):
            def __init__(self, levels):
                self.levels = levels

        assert Loose(1) == Loose(2)
        with pytest.raises(ValueError, match="Loose must be a frozen dataclass"):
            build(Loose(1))

    def test_without_a_plan(self):
        @dataclasses.dataclass(frozen=True)
        class Idle(Algorithm):
            pass

        with pytest.raises(ValueError, match="Idle must have a plan of its own"):
            build(Idle())
        with pytest.raises(ValueError, match="Idle must have a plan of its own"):
            register_algorithm("idle")(Idle)


def _poisoned(value):
    return lambda c: full(c, bonus=jnp.where(jnp.arange(4)[None, :] == 2, value, c.entropies))


class TestValues:
    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (lambda c: caps(c, [[5, 5, 6, 7]]), r"the cap of sequence 0 at depth 2 is 6, outside 0\.\.5"),
            (lambda c: caps(c, [[5, -1, 5, 5]]), r"the cap of sequence 0 at depth 1 is -1, outside 0\.\.5"),
            (_poisoned(jnp.nan), "the bonus of sequence 0 at depth 2 is nan, not finite"),
            (
                lambda c: caps(c, next(_calls) % 5),
                "plan is not deterministic: called again with the same candidates, the cap of sequence 0 at "
                r"depth 0 is \d and not \d",
            ),
            (
                lambda c: full(c, bonus=c.entropies, weight=1.0 + next(_calls)),
                "plan is not deterministic: .* weight is",
            ),
            (
                lambda c: full(c, bonus=c.entropies - jnp.max(c.entropies, axis=0, keepdims=True)),
                "plan looks across sequences: without the others of its batch, the bonus of sequence 0",
            ),
            (
                lambda c: caps(c, jnp.arange(1, len(c.tokens) + 1)[:, None]),
                "plan looks across sequences: .* the cap of sequence 1 at depth 0 is 1 and not 2",
            ),
        ],
    )
    def test_refused(self, broken, plan, message):
        algorithm = broken(plan)
        check_traceable(algorithm, depth=DEPTH, width=WIDTH)
        with pytest.raises(ValueError, match=rf"^tree algorithm 'broken': {message}"):
            build(algorithm, checked=True)
        with pytest.raises(ValueError, match=r"^tree algorithm 'broken': ") as raised:
            check_algorithm_contract(algorithm, depth=DEPTH, width=WIDTH)
        assert raised.value.__notes__ == [
            "sequences of the trial: 0 random, 1 sure, 2 flat, 3 ties, 4 filtered, 5 mixed"
        ]

    def test_caps_beyond_the_width_are_clipped_unchecked(self, broken):
        algorithm = broken(lambda c: caps(c, 99))
        jax.tree.map(np.testing.assert_array_equal, build(algorithm), build("accum_logp"))

    def test_only_some_drafts_show_it(self, broken):
        """A bonus of a log-probability is -inf where a filter left no second token."""
        algorithm = broken(lambda c: full(c, bonus=c.log_probs[:, :, 1]))
        build(algorithm, checked=True)
        with pytest.raises(ValueError, match="the bonus of sequence 4 at depth 0 is -inf, not finite"):
            check_algorithm_contract(algorithm, depth=DEPTH, width=WIDTH)

    def test_a_plan_that_is_right_in_one_routing_only(self, monkeypatch):
        @dataclasses.dataclass(frozen=True)
        class Routed(Algorithm):
            def plan(self, candidates, routing):
                return full(candidates, caps=full(candidates).caps + (routing.task_class[:, None] == 2))

        with pytest.raises(
            ValueError, match=r"Routed': the cap of sequence 3 at depth 0 is 6, outside 0\.\.5"
        ):
            check_algorithm_contract(Routed(), depth=DEPTH, width=WIDTH)


@pytest.fixture(scope="module")
def tree():
    return build("accum_logp")


class TestTrees:
    @pytest.mark.parametrize(
        ("field", "node", "value", "message"),
        [
            ("parents", 0, 3, "node 0 has parent 3 and depth 0: no root"),
            ("parents", 2, 2, "node 2 has parent 2, which does not come before it"),
            ("depths", 3, 2, "node 3 has depth 2 below one of depth 0"),
            ("scores", 4, 0.5, "node 4 has score 0.5, and its parent 0"),
        ],
    )
    def test_a_broken_node_is_named(self, tree, field, node, value, message):
        changed = dataclasses.replace(tree, **{field: getattr(tree, field).at[1, node].set(value)})
        with pytest.raises(ValueError, match=f"'accum_logp': in the tree of sequence 1, {message}"):
            check_tree(AccumLogp(), changed, width=WIDTH, budget=16)

    def test_duplicate_siblings(self, tree):
        token = int(tree.tokens[2, 1])
        changed = dataclasses.replace(tree, tokens=tree.tokens.at[2, 3].set(token))
        with pytest.raises(ValueError, match=f"sequence 2, node 0 has 2 children with token {token}"):
            check_tree(AccumLogp(), changed, width=WIDTH, budget=16)

    @pytest.mark.parametrize(
        ("limits", "message"),
        [
            (
                {"budget": 15},
                "the tree of sequence 0 has 16 nodes, with a budget of 15; the tree of sequence 1",
            ),
            ({"width": 4}, "node 0 has 5 children, with a width of 4"),
            ({"depth": 1}, "has depth 2, with a limit of 1"),
        ],
    )
    def test_limits(self, tree, limits, message):
        check_tree(AccumLogp(), tree, width=WIDTH, budget=16, depth=DEPTH)
        with pytest.raises(ValueError, match=message):
            check_tree(AccumLogp(), tree, **{"width": WIDTH, "budget": 16, "depth": DEPTH, **limits})

    def test_an_empty_tree(self, tree):
        with pytest.raises(ValueError, match="the tree of sequence 1 has 0 nodes"):
            check_tree(
                AccumLogp(),
                dataclasses.replace(tree, num_nodes=tree.num_nodes.at[1].set(0)),
                width=WIDTH,
                budget=16,
            )


class TestKnownAlgorithms:
    @pytest.mark.parametrize("name", algorithm_names())
    def test_keep_the_contract(self, name):
        check_algorithm_contract(name, depth=DEPTH, width=WIDTH)

    @pytest.mark.parametrize("shape", [wide((1, 3)), (5, 1)])
    def test_in_the_smallest_shapes(self, shape):
        for name in algorithm_names():
            candidates, routing = _sample(*shape)
            check_plan(get_algorithm(name), candidates, routing)

    @settings(max_examples=30)
    @given(
        name=st.sampled_from(algorithm_names()),
        seed=st.integers(0, 2**31),
        scale=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
        budget=st.integers(2, 16),
        depth=st.integers(1, DEPTH),
    )
    def test_trees_of_any_draft_and_limit(self, name, seed, scale, budget, depth):
        """Never above budget, width or depth, parents first, no duplicate siblings, scores never rise."""
        logits = np.round(np.random.default_rng(seed).normal(0, scale, LOGITS.shape)).astype(np.float32)
        roots = np.arange(BATCH)
        tree = build_tree(
            logits, roots, width=WIDTH, budget=budget, algorithm=name, depth=depth, checked=True
        )
        assert tree.num_nodes.max() <= budget


def _sample(depth, width):
    logits = jnp.asarray(sample_logits(depth, width, 0))
    return top_candidates(logits, width), Routing.unsaid(len(DRAFTS))
