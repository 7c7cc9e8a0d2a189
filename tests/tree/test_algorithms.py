"""The algorithms: the reference's trees, the properties of all of them, options, routing, profiles."""

import dataclasses
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.tree import (
    AccumLogp,
    Algorithm,
    Plan,
    Profile,
    Routing,
    algorithm_names,
    bucket_for,
    build_tree,
    get_algorithm,
    grow_tree,
    path_sums,
    register_algorithm,
    top_candidates,
)
from jetspec_jax.tree import algorithms as registry
from jetspec_jax.tree.routing import CLASSES, hints_of_each

GOLDENS = Path(__file__).parent / "goldens"
RAW = json.loads((GOLDENS / "trees.json").read_text())
ARRAYS = np.load(GOLDENS / "trees.npz")
KINDS = sorted({case["algorithm"] for case in RAW["cases"]})

_candidates = jax.jit(top_candidates, static_argnums=1)
_grow = jax.jit(grow_tree, static_argnames=("num_nodes", "one_by_one"))


def scored_paths(tokens, parents, scores):
    """{root-to-node tokens: score}; a missing parent or a duplicate sibling fails."""
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), int(token)))
    scored = dict(zip(paths, map(float, scores), strict=True))
    assert len(scored) == len(paths)
    return scored


def paths_of(tree, b=0):
    count = int(tree.num_nodes[b])
    return scored_paths(*(np.asarray(x[b][:count]) for x in (tree.tokens, tree.parents, tree.scores)))


def random_logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(scale=3.0, size=shape).astype(np.float32)


class TestGoldens:
    @pytest.mark.parametrize("kind", KINDS)
    def test_all_trees_of_the_reference(self, kind):
        """All 704 as path sets, with their scores. Options are static, so plans are made outside programs."""
        cases = [case for case in RAW["cases"] if case["algorithm"] == kind]
        assert len(cases) == {"accum_logp": 32, "top2gap_fanout": 64, "depth_rank_histogram": 128}.get(
            kind, 160
        )
        for case in cases:
            logits = jnp.asarray(ARRAYS[f"logits_{case['logits']}"][None])
            profile = RAW["profile"] if case["profile"] else None
            algorithm = get_algorithm(kind, case["kwargs"], profile)
            candidates = _candidates(logits, case["width"])
            plan = algorithm.plan(candidates, Routing.of(case["prompt_info"], 1))
            limits = (jnp.asarray([value], jnp.int32) for value in (case["budget"], case["depth"]))
            tree = _grow(candidates, jnp.array([5]), plan, *limits, num_nodes=bucket_for(case["budget"]))
            tokens, parents, _ = ARRAYS[f"tree_{case['case']}"]
            golden = scored_paths(tokens, parents, ARRAYS[f"cum_{case['case']}"])
            assert paths_of(tree) == pytest.approx(golden, abs=1e-4), case

    @pytest.mark.parametrize("kind", KINDS)
    def test_through_the_public_function(self, kind):
        case = next(case for case in RAW["cases"] if case["algorithm"] == kind and case["budget"] == 64)
        tree = build_tree(
            ARRAYS[f"logits_{case['logits']}"][None],
            np.array([5]),
            width=case["width"],
            budget=case["budget"],
            algorithm=kind,
            routing=case["prompt_info"],
            profile=RAW["profile"] if case["profile"] else None,
            **case["kwargs"],
        )
        tokens, parents, _ = ARRAYS[f"tree_{case['case']}"]
        assert paths_of(tree).keys() == scored_paths(tokens, parents, np.zeros(len(tokens))).keys()


def build(logits, name, *, budget=64, width=5, **options):
    return build_tree(logits, np.arange(len(logits)), width=width, budget=budget, algorithm=name, **options)


class TestEveryAlgorithm:
    @pytest.mark.parametrize("name", algorithm_names())
    def test_a_batch_gives_each_what_it_gets_alone(self, name):
        logits = random_logits(3, 6, 40, seed=2)
        together = build(logits, name)
        for b in range(3):
            alone = build_tree(logits[b : b + 1], np.array([b]), width=5, budget=64, algorithm=name)
            assert paths_of(together, b) == pytest.approx(paths_of(alone), abs=1e-5)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("task_router", {"force_baseline": True}),
            ("reasoning_router", {"force_baseline": True}),
            ("class_histogram", {"force_baseline": True}),
            ("depth_rank_histogram", {"tau": 0.0, "profile": RAW["profile"]}),
            ("depth_rank_histogram", {}),
            ("top2gap_fanout", {"beta": 1.0, "g_0": 1e9}),
            ("hybrid", {"alpha": 0.0}),
        ],
    )
    def test_knobs_that_make_it_the_default(self, name, options):
        logits = random_logits(2, 7, 60, seed=3)
        ours, default = (build(logits, n, **o) for n, o in ((name, options), ("accum_logp", {})))
        for b in range(2):
            assert paths_of(ours, b) == pytest.approx(paths_of(default, b), abs=1e-5)


class TestTopNodes:
    @pytest.mark.parametrize("seed", range(5))
    def test_brute_force(self, seed):
        """No set of so many nodes is more probable: all paths of the full tree, sorted."""
        logits = random_logits(1, 4, 20, seed=seed)
        rows = -np.sort(-np.asarray(jax.nn.log_softmax(logits[0], axis=-1), np.float64), axis=-1)[:, :4]
        scores = [np.zeros(1)]
        for row in rows:
            scores.append((scores[-1][:, None] + row[None, :]).ravel())
        best = -np.sort(-np.concatenate(scores))[:50]
        tree = build(logits, "top_nodes", budget=50, width=4)
        np.testing.assert_allclose(-np.sort(-np.asarray(tree.scores[0, :50])), best, atol=1e-4)


class TestHybrid:
    def test_is_a_heap_over_scores_and_entropies(self):
        logits = random_logits(1, 4, 12, seed=5) * np.array([0.3, 2.0, 0.5, 1.0], np.float32)[None, :, None]
        log_p = np.asarray(jax.nn.log_softmax(logits[0], axis=-1), np.float64)
        entropy = -(np.exp(log_p) * log_p).sum(axis=-1)
        order = np.argsort(-log_p, axis=-1, kind="stable")[:, :3]
        for alpha in (0.25, 2.0, math.inf):
            open_, paths = [(0.0, ())], [()]
            while open_ and len(paths) < 20:
                best = max(range(len(open_)), key=lambda i: (open_[i][0], -i))
                priority, path = open_.pop(best)
                for token in order[len(path)][: 20 - len(paths)] if len(path) < 4 else ():
                    child, d = (*path, int(token)), len(path)
                    own = entropy[d] if math.isinf(alpha) else log_p[d, token] + alpha * entropy[d]
                    open_.append((priority + own, child))
                    paths.append(child)
            name, options = ("entropy", {}) if math.isinf(alpha) else ("hybrid", {"alpha": alpha})
            tree = build(logits, name, budget=20, width=3, **options)
            assert {path[1:] for path in paths_of(tree)} == set(paths), alpha

    def test_entropies_of_candidates(self):
        logits = random_logits(2, 3, 2500)
        logits[0, 0, 7:] = -np.inf
        log_p = np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)
        finite = np.where(np.isfinite(log_p), log_p, 0.0)
        expected = -(np.exp(log_p) * finite).sum(axis=-1)
        found = _candidates(jnp.asarray(logits), 4)
        np.testing.assert_allclose(found.entropies, expected, atol=1e-4)


def test_path_sums_of_the_docstring():
    values, parents = jnp.array([[0.0, 1.0, 2.0, 3.0]]), jnp.array([[-1, 0, 0, 1]])
    assert path_sums(values, parents, max_depth=2).tolist() == [[0.0, 1.0, 2.0, 4.0]]


def test_chain_is_the_greedy_one():
    logits = random_logits(1, 6, 30)
    tree = build(logits, "chain")
    assert tree.num_nodes.tolist() == [7]
    assert tree.tokens[0, 1:7].tolist() == logits[0].argmax(-1).tolist()


class TestRouting:
    @pytest.mark.parametrize(
        ("hints", "task_class", "reasoning"),
        [
            (None, -1, False),
            ({}, -1, False),
            ({"task": "math"}, 0, True),
            ({"task": "chain_of_thought"}, 1, True),
            ({"task": "balanced"}, 1, False),
            ({"task": "chat"}, 2, False),
            ({"task": "poetry"}, 1, False),
            ({"mode": "cot"}, -1, True),
            ({"mode": "fast"}, -1, False),
            ({"text": "First, we look at it."}, -1, True),
            ({"text": "At first we saw nothing."}, -1, False),
        ],
    )
    def test_what_hints_mean(self, hints, task_class, reasoning):
        routing = Routing.of(hints, 2)
        assert routing.task_class.tolist() == [task_class] * 2
        assert routing.reasoning.tolist() == [reasoning] * 2

    def test_one_hint_for_each_sequence(self):
        logits = np.repeat(random_logits(1, 5, 30), 3, axis=0)
        hints = [{"task": "math"}, {"task": "balanced"}, {"task": "chat"}]
        tree = build(logits, "task_router", budget=256, width=7, routing=hints)
        assert tree.num_nodes.tolist() == [6, 1 + 3 + 6 + 6 + 6 + 6, 1 + 7 + 49 * 4]

    @pytest.mark.parametrize(
        ("hints", "message"),
        [
            ([{"task": "math"}], "1 routing hints for 2 sequences"),
            ({"topic": "math"}, r"routing takes strings under task, mode, text; not valid: \['topic'\]"),
        ],
    )
    def test_refused(self, hints, message):
        with pytest.raises(ValueError, match=message):
            Routing.of(hints, 2)


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "options", "message"),
        [
            ("beam", {}, "unknown tree algorithm 'beam'; known algorithms: accum_logp, top2gap_fanout"),
            (
                "accum_logp",
                {"tau": 1},
                r"unknown options \['tau'\] of the tree algorithm 'accum_logp'; it has: none",
            ),
            ("hybrid", {"alpha": -1.0}, "alpha must be a number of at least 0"),
            (
                "top2gap_fanout",
                {"beta": None, "g_0": True},
                "beta must be a finite number, not None; g_0 must be a finite number, not True",
            ),
            ("reasoning_router", {"force_baseline": "no"}, "force_baseline must be true or false, not 'no'"),
            ("task_router", {"templates": {"hard": [1]}}, r"unknown classes \['hard'\] in templates"),
            ("reasoning_router", {"open_ended_template": []}, "open_ended_template must be a list of caps"),
            ("accum_logp", {"profile": {}}, "'accum_logp' takes no profile"),
            (
                "task_router",
                {"templates": (("decisive", (1,)),)},
                r"unknown classes \['decisive'\] in templates",
            ),
            (
                "task_router",
                {"templates": (("balanced_task", (1,)), ("balanced_task", (2,)))},
                "templates must name each class once, not balanced_task, balanced_task",
            ),
            ("top2gap_fanout", {"beta": math.nan}, "beta must be a finite number, not nan"),
            ("task_router", {"gap_low": 3.0}, "gap_low must be at most gap_high, 2.0, not 3.0"),
        ],
    )
    def test_refused(self, name, options, message):
        with pytest.raises(ValueError, match=message):
            build(random_logits(1, 3, 20), name, **options)

    def test_an_algorithm_brings_its_options(self):
        logits = random_logits(1, 5, 30)
        named = build(logits, "top2gap_fanout", beta=2.0)
        made = build(logits, get_algorithm("top2gap_fanout", {"beta": 2.0}))
        assert paths_of(named) == paths_of(made)
        with pytest.raises(ValueError, match="has its options already"):
            build(logits, get_algorithm("top2gap_fanout"), beta=2.0)

    def test_a_cap_above_the_width(self):
        templates = {name: [9, 1, 1] for name in CLASSES}
        tree = build(random_logits(1, 3, 20), "task_router", width=4, templates=templates)
        assert tree.num_nodes.tolist() == [1 + 4 + 4 + 4]

    @pytest.mark.parametrize(
        ("name", "options", "what"),
        [
            ("task_router", {"templates": {"balanced_task": [2, 2, 1]}}, r"templates\['balanced_task'\]"),
            ("class_histogram", {"templates": {"uncertain_task": (9, 1, 1)}}, "templates"),
            ("reasoning_router", {"open_ended_template": [3, 1, 1]}, "open_ended_template"),
        ],
    )
    def test_a_template_longer_than_the_depth(self, name, options, what):
        """One's own is refused; the usual ones of three caps, and measured ones, go with any depth."""
        build(random_logits(1, 3, 20), name, **options)
        with pytest.raises(ValueError, match=f"{what}.* has 3 caps, .* the draft is 2 deep; give at most 2"):
            build(random_logits(1, 2, 20), name, **options)
        assert build(random_logits(1, 2, 20), name).num_nodes[0] > 1
        measured = {"per_class_histograms": {name: [2, 1, 1] for name in CLASSES}}
        assert build(random_logits(1, 2, 20), "class_histogram", profile=measured).num_nodes.tolist() == [5]


class TestProfiles:
    def test_a_rank_that_is_accepted_too_rarely(self):
        profile = {"version": 1, "depth_rank_accept": [[0.5, 0.3, 0.1], [0.5, 0.01]]}
        tree = build(random_logits(1, 3, 20), "depth_rank_histogram", width=3, tau=0.2, profile=profile)
        # Two children, then one, and the full width at the depth that has no row.
        assert tree.num_nodes.tolist() == [1 + 2 + 2 + 6]

    def test_classes(self):
        profile = {
            "per_class_histograms": {"decisive_task": [2, 1], "uncertain_task": [[0.5, 0.0, 0.1], [0.2]]}
        }
        logits = np.repeat(random_logits(1, 3, 20), 3, axis=0)
        hints = [{"task": "math"}, {"task": "balanced"}, {"task": "chat"}]
        tree = build(logits, "class_histogram", width=4, routing=hints, profile=profile)
        assert tree.num_nodes.tolist() == [1 + 2 * 3, 1 + 3 + 6 + 6, 1 + 3 * 3]

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            ({"version": 2}, "the profile is version 2, and this reads version 1"),
            ({"depth_rank": []}, r"unknown keys \['depth_rank'\] in the profile"),
            ({"depth_rank_accept": [0.5]}, "depth_rank_accept must be a list of rows"),
            (
                {"depth_rank_accept": [[0.5], [0.5, 1.5]]},
                r"depth_rank_accept\[1\] must hold shares in 0\.\.1, not rank 1: 1\.5",
            ),
            (
                {"per_class_histograms": {"easy": [1]}},
                r"unknown classes \['easy'\] in per_class_histograms of the",
            ),
            ({"per_class_histograms": {"decisive_task": []}}, "must be a list of caps, or of rows"),
        ],
    )
    def test_refused(self, raw, message):
        with pytest.raises(ValueError, match=message):
            Profile.parse(raw)
        with pytest.raises(ValueError, match=r"my\.json"):
            Profile.parse(raw, where="my.json")

    @pytest.mark.parametrize(
        ("name", "lacking", "table"),
        [
            ("depth_rank_histogram", {"per_class_histograms": {"balanced_task": [2]}}, "depth_rank_accept"),
            ("class_histogram", {"depth_rank_accept": [[0.5]]}, "per_class_histograms"),
        ],
    )
    def test_without_the_table_that_is_read(self, name, lacking, table):
        for raw in (lacking, {"meta": {}}, Profile()):
            message = f"^the profile has no {table}, which the tree algorithm '{name}' reads$"
            with pytest.raises(ValueError, match=message):
                get_algorithm(name, profile=raw)
        with pytest.raises(ValueError, match=rf"^my\.json has no {table}"):
            get_algorithm(name, profile=Profile.parse(lacking, where="my.json"))
        assert get_algorithm(name) == type(get_algorithm(name))()  # none at all is none that lacks anything

    def test_under_another_algorithm(self):
        raw = {"depth_rank_accept": [[0.5, 0.2]]}
        auto = get_algorithm("auto", {"tree": "depth_rank_histogram"}, raw)
        assert auto.shape == get_algorithm("depth_rank_histogram", profile=raw)
        with pytest.raises(
            ValueError, match=r"'auto' takes no profile itself; choose an algorithm .* as its tree"
        ):
            get_algorithm("auto", profile=raw)
        with pytest.raises(ValueError, match=r"'hybrid' takes no profile$"):
            get_algorithm("auto", {"tree": "hybrid"}, raw)


@dataclasses.dataclass(frozen=True)
class Widened(AccumLogp):
    """Of another name than the algorithms of the tests."""


class TestRegistry:
    def test_one_of_the_users_own(self, monkeypatch):
        monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))

        @register_algorithm("first_two")
        @dataclasses.dataclass(frozen=True)
        class FirstTwo(Algorithm):
            levels: int = 1

            def plan(self, candidates, routing):
                depth = jnp.arange(candidates.tokens.shape[1])
                caps = jnp.where(depth < self.levels, 2, 1).astype(jnp.int32)
                return Plan(jnp.broadcast_to(caps[None, :], candidates.tokens.shape[:2]))

        assert "first_two" in algorithm_names()
        logits = random_logits(1, 3, 20)
        assert build(logits, "first_two").num_nodes.tolist() == [1 + 2 * 3]
        assert build(logits, "first_two", levels=2).num_nodes.tolist() == [1 + 2 + 4 + 4]
        with pytest.raises(ValueError, match=r"'first_two' is .*FirstTwo; choose another name"):
            register_algorithm("first_two")(Widened)

    def test_a_cell_of_a_notebook_runs_again(self, monkeypatch):
        """The class is the later one for new calls; what has the earlier one keeps it, and its programs."""
        monkeypatch.setattr(registry, "_KNOWN", dict(registry._KNOWN))

        def cell(children):
            @register_algorithm("first_few")
            @dataclasses.dataclass(frozen=True)
            class FirstFew(Algorithm):
                def plan(self, candidates, routing):
                    return Plan(jnp.full(candidates.tokens.shape[:2], children, jnp.int32))

            return FirstFew

        logits, earlier = random_logits(1, 3, 20), cell(1)()
        assert build(logits, "first_few").num_nodes.tolist() == [1 + 3]
        later = cell(2)()
        assert build(logits, "first_few").num_nodes.tolist() == [1 + 2 + 4 + 8]
        assert build(logits, earlier).num_nodes.tolist() == [1 + 3]
        assert earlier != later
        # A class of this package is not replaced, and neither is one by a class of another name.
        for name, kind in (("accum_logp", type(later)), ("first_few", AccumLogp)):
            with pytest.raises(ValueError, match=f"'{name}' is .*; choose another name"):
                register_algorithm(name)(kind)
        again = type("AccumLogp", (AccumLogp,), {"__module__": AccumLogp.__module__})
        with pytest.raises(ValueError, match="'accum_logp' is AccumLogp; choose another name"):
            register_algorithm("accum_logp")(again)

    def test_what_is_no_algorithm(self):
        class Plain(Algorithm):
            pass

        with pytest.raises(ValueError, match="must be a frozen dataclass on top of Algorithm"):
            register_algorithm("plain")(Plain)


ALGORITHM = "a tree algorithm must be a name, or an Algorithm with its options, not "
ROUTING = "routing is a mapping with any of task, mode, text, as {'task': 'math'}"


def tiny_tree(**settings):
    return build_tree(np.zeros((1, 2, 4), np.float32), np.array([1]), width=2, budget=4, **settings)


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tiny_tree(algorithm=["chain"]), f"{ALGORITHM}['chain']"),
        (lambda: TreeSettings(algorithm=AccumLogp).check(None, None), f"{ALGORITHM}{AccumLogp}"),
        (
            lambda: tiny_tree(routing="math"),
            f"{ROUTING}, for all sequences, or a sequence of these, not 'math'",
        ),
        (
            lambda: hints_of_each("math", 1, "prompts"),
            f"{ROUTING}, for all prompts, or a sequence of these, not 'math'",
        ),
        (lambda: Routing.of_one("math"), f"{ROUTING}, not 'math'"),
    ],
)
def test_what_is_no_algorithm_and_no_routing(call, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        call()
