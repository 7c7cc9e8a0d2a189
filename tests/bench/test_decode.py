"""``python -m bench decode`` on a tiny random pair."""

import itertools
import json
from types import SimpleNamespace

import jax
import pytest

from bench.__main__ import main
from bench.common.methods import Method
from bench.common.pair import load_pair
from bench.common.workload import make_workloads
from bench.decode import command as decode
from bench.decode import measure as decode_measure
from bench.decode.measure import Bench, MethodRuns
from bench.decode.record import finish_report
from bench.decode.report import Rows, at_largest_budget, best_of, notes_of
from bench.exactness import command as exactness
from jetspec_jax import Completion
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device import memory
from jetspec_jax.engine.engines import complete
from jetspec_jax.progress import Progress
from tests.bench.conftest import random_workloads, text_prompt

SMALL = ["--num-prompts", "2", "--max-tokens", "12", "--budgets", "16", "--repeats", "1", "--batch", "2"]
BOTH = ["--temperatures", "0", "1", "--ignore-config-key", "zoom"]
METHODS = ["plain", "chain", "top_nodes 16"]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def run(path, *arguments):
    return main(["decode", *SMALL, *BOTH, *arguments, "--json", str(path)])


def read(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def tiny_pair(pair):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "load_pair", lambda *_: pair)
        patch.setattr(decode, "make_workloads", random_workloads)
        yield pair


@pytest.fixture(scope="module")
def compiled():
    """How many programs had been compiled before each step of `measured`, and at its end."""
    return {}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, tiny_pair, compiled):
    """The file of a report: one algorithm at two temperatures."""
    path = tmp_path_factory.mktemp("decode") / "out" / "decode.json"
    measure, so_far = Bench.measure, 0

    def listen(event, *_, **__):
        nonlocal so_far
        so_far += event == COMPILE_EVENT

    def watched(self, methods, repeats, step):
        for found in measure(
            self, methods, repeats, lambda name, n: (compiled.setdefault(name, so_far), step(name, n))
        ):
            compiled["end"] = so_far
            yield found

    jax.clear_caches()  # Else an earlier test may have compiled what this one counts.
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bench, "measure", watched)
            patch.setattr(decode_measure, "PROMPTS_PER_TURN", 0)  # of --together alone
            assert run(path) == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return path


class TestReport:
    @pytest.mark.wide
    def test_all_methods_are_compared_with_plain_decoding(self, measured):
        report = read(measured)
        rows = {(row["temperature"], row["method"]): row for row in report["rows"]}
        assert list(rows) == list(itertools.product((0.0, 1.0), METHODS))
        for (_, name), row in rows.items():
            assert row["exact match"] == 1.0
            assert row["divergences"] == []
            assert row["tokens/s"] > 0
            assert row["first token ms"] > 0
            assert row["speed-up"] == pytest.approx(row["tokens/s"] / row["plain tokens/s"])
            # A round commits what it accepted and the bonus token.
            assert row["tau"] == pytest.approx(1 + sum(row["acceptance"]))
            assert row["acceptance"] == sorted(row["acceptance"], reverse=True)
            assert row["nodes/round"] == {"plain": 1.0, "chain": 8.0}.get(name, 16.0)
            assert len(row["seconds"]) == 1
        for temperature in (0.0, 1.0):
            plain, _, tree = (rows[temperature, name] for name in METHODS)
            assert plain["tau"] == plain["tokens/forward"] == plain["speed-up"] == 1.0
            assert 1.0 < tree["tau"] <= 8.0
        assert report["device"]
        assert report["jax"]
        assert report["implementation"] == "xla"
        assert str(measured.parent) not in measured.read_text()
        assert "<svg" in measured.with_suffix(".svg").read_text()

    @pytest.mark.wide
    @pytest.mark.usefixtures("measured")
    def test_nothing_compiles_in_a_timed_run(self, compiled):
        steps = [f"compile {name}" for name in METHODS]
        runs = [f"{name}, T = {temperature}" for name in METHODS for temperature in (0, 1)]
        assert list(compiled) == [*steps, *runs, "end"]
        before = [compiled[step] for step in (*steps, runs[0])]
        assert before == sorted(set(before))
        assert compiled["end"] == compiled[runs[0]]

    @pytest.mark.wide
    def test_going_on_measures_what_is_missing(self, measured, tmp_path, capsys):
        path = tmp_path / "decode.json"
        path.write_bytes(measured.read_bytes())
        more = ["--resume", "--algorithms", "chain", "--ignore-config-key", "focus"]
        assert run(path, *more) == 0
        old, new = read(measured), read(path)
        assert [row["method"] for row in new["rows"]] == 2 * [*METHODS, "chain 16"]
        assert [row for row in new["rows"] if row["method"] != "chain 16"] == old["rows"]
        assert new["arguments"]["algorithms"] == ["top_nodes", "chain"]
        by_name = {(row["temperature"], row["method"]): row for row in new["rows"]}
        for temperature in (0.0, 1.0):
            chain, tree = by_name[temperature, "chain"], by_name[temperature, "chain 16"]
            assert (chain["tau"], chain["acceptance"]) == (tree["tau"], tree["acceptance"])
        # Both kinds of table at both temperatures.
        out = capsys.readouterr().out
        assert out.count("share of rounds that accepted") == 2

        # Nothing is missing any more: nothing is measured.
        before = path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bench, "measure", None)
            assert run(path, *more) == 0
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--width", "3"], "was measured with width None, and this is 3"),
            (["--algorithm-option", "force=1"], "was measured with algorithm_option"),
        ],
    )
    def test_a_report_of_other_settings_is_not_gone_on_with(
        self, measured, capsys, monkeypatch, arguments, said
    ):
        monkeypatch.setattr(decode, "choose_algorithms", lambda *_: {"top_nodes": "top_nodes"})
        assert run(measured, "--resume", *arguments) == 2
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("tiny_pair")
def test_together_takes_turns_of_a_few_prompts(tmp_path, monkeypatch):
    """Three prompts for two slots: a turn of two, and one of what is left. Every turn takes a second."""
    turns, bars = [], []

    def watched(engines, requests, tokenizer):
        turns.append((engines, len(requests)))
        completions = complete(engines, requests, tokenizer)
        if len(turns) > 6 + 6:  # those that compile, and a run
            for completion in completions:
                completion.token_ids.pop()
        return completions

    monkeypatch.setattr(decode_measure, "complete", watched)
    monkeypatch.setattr(decode_measure, "PROMPTS_PER_TURN", 1)
    monkeypatch.setattr(decode_measure, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(decode, "Progress", lambda **bar: bars.append(Progress(**bar)) or bars[-1])
    path = tmp_path / "decode.json"
    words = ["--together", "--temperatures", "0", "--num-prompts", "3", "--repeats", "2"]
    assert run(path, *words) == 0
    for repeat in turns[6:12], turns[12:]:
        engines, prompts = zip(*repeat, strict=True)
        assert prompts == (2, 2, 2, 1, 1, 1)
        assert len(set(engines[:3])) == 3
        assert engines[:3] == engines[3:]
    assert bars[0].n == bars[0].total == 2 * 3 * 3
    assert [(row["method"], row["seconds"], row["tokens"]) for row in read(path)["rows"]] == [
        (name, [2, 2], [36, 33]) for name in METHODS
    ]


@pytest.mark.wide
@pytest.mark.usefixtures("tiny_pair")
def test_a_benchmark_that_is_stopped_keeps_its_turns(tmp_path, monkeypatch):
    path, turns, stops = tmp_path / "decode.json", [], {5, 6}

    def measure(self, methods, repeats, step):
        ended = Completion("", [1, 2], "length", [1], [1])
        found = {
            (method, temperature): MethodRuns([ended] * 2, first_token_seconds=[0.1])
            for method in methods
            for temperature in (0.0, 1.0)
        }
        for seconds in range(1, repeats + 1):
            turns.append([method.name for method in methods])
            for measured in found.values():
                measured.seconds.append(float(seconds))
                measured.tokens.append(4)
            yield found
            if len(turns) in stops:
                raise KeyboardInterrupt

    def seconds():
        report = read(path)
        assert report["best"]
        return {row["method"]: row["seconds"] for row in report["rows"] if row["temperature"] == 1.0}

    def stopped():
        return [note for note in read(path)["notes"] if "--resume" in note]

    def go(*more):
        return run(path, "--repeats", "3", *more)

    monkeypatch.setattr(Bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        go("--budgets", "16", "32")
    second = "top_nodes 32"
    assert turns == [METHODS] * 3 + [["plain", second]] * 2
    whole = {name: [1.0, 2.0, 3.0] for name in METHODS}
    assert seconds() == {**whole, second: [1.0, 2.0]}
    [note] = stopped()
    assert f"{second} (2 of 3)" in note
    # What had all its turns is not measured again; what had some is, and keeps them until it has had more.
    with pytest.raises(KeyboardInterrupt):
        go("--budgets", "16", "32", "--resume")
    assert turns[5:] == [["plain", second]]
    assert seconds() == {**whole, second: [1.0, 2.0]}
    assert go("--budgets", "32", "--resume") == 0
    assert turns[6:] == [["plain", second]] * 3
    assert seconds() == {**whole, second: [1.0, 2.0, 3.0]}
    assert stopped() == []


def row_of(method, temperature=0.0, **changes):
    """A row of a report, as far as notes and the best look at it."""
    return {
        "temperature": temperature,
        "method": method,
        "algorithm": None,
        "budget": 16,
        "tau": 1.0,
        "speed-up": 1.0,
        "tokens/s": 1.0,
        "plain tokens/s": 1.0,
        "seconds": [1.0],
        "divergences": [],
        "peak MiB": 1.0,
        **changes,
    }


GIVEN = {"profile": None, "repeats": 1}


class TestRows:
    def test_every_output_that_differs_is_listed(self, pair):
        def runs(second, seconds, tokens):
            outputs = [
                Completion(None, ids, "length", [len(ids) - 1], [16]) for ids in ([1, 2, 3], [4, *second])
            ]
            return MethodRuns(outputs, seconds, tokens, first_token_seconds=[0.1])

        arguments = SimpleNamespace(max_tokens=4)
        works = random_workloads(arguments, pair.target, [text_prompt("p:0"), text_prompt("p:1")], [0.0])
        rows = Rows(pair.target, works, depth=3)
        method = Method("hybrid 16", "hybrid", TreeSettings(16))
        plain = runs([5, 6], [1.0, 3.0, 4.0], [6, 6, 6])
        # A later run of the other generated more.
        row = rows.row(method, 0.0, runs([7], [1.0, 2.0, 9.0], [5, 6, 5]), plain)
        [found] = row["divergences"]
        assert (found["prompt"], found["position"], found["token"], found["expected"]) == ("p:1", 1, 7, 5)
        assert found["gap"] > 0
        assert row["exact match"] == 0.5
        # By tokens per second: outputs of two lengths are no race.
        assert row["speed-up"] == pytest.approx((6 / 2.0) / (6 / 3.0))
        assert row["acceptance"] == [0.5, 0.0, 0.0]
        # The gap at a place is plain decoding's own, whoever parts from it there.
        [same] = rows.row(method, 0.0, runs([9], [1.0], [5]), plain)["divergences"]
        assert same == {**found, "token": 9, "behind": same["behind"]}
        assert same["behind"] != found["behind"]

    def test_the_rows_of_a_budget_and_the_best(self):
        rows = [
            row_of("plain", budget=1),
            row_of("chain", **{"tau": 2.0, "speed-up": 1.5}),
            row_of("a 16", algorithm="a", **{"tau": 2.5, "speed-up": 1.7}),
            row_of("a 64", algorithm="a", budget=64, **{"tau": 3.0, "speed-up": 1.4}),
        ]
        assert [own["method"] for own in at_largest_budget(rows)] == ["chain", "a 64"]
        [best] = best_of(rows)
        assert (best["speed-up"]["method"], best["tau"]["method"]) == ("a 16", "a 64")

    def test_mistakes_are_counted_and_algorithms_without_a_profile_named(self):
        divergences = [
            {
                "prompt": "p:1",
                "position": 3,
                "token": 1,
                "expected": 2,
                "gap": gap,
                "behind": behind,
                "tie_gap": own,
            }
            for gap, behind, own in (
                (0.5, 0.5, 1e-4),
                (1e-5, 1e-5, 1e-4),
                (1e-6, 3.0, 1e-4),
                (2e-4, 2e-4, 3e-4),
            )
        ]
        changes = {"algorithm": "class_histogram", "divergences": divergences, "peak MiB": None}
        row = row_of("class_histogram 16", **changes)
        report = {"rows": [row], "best": [], "arguments": GIVEN, "dtype": "float32"}
        differ, profile, _ = notes_of(report)
        assert "plain decoding's: 4; " in differ
        assert "at most 5.0e-01 apart" in differ
        # A small gap excuses nobody who chose neither of the two.
        assert "Mistakes among them: 2; " in differ
        assert "Mistakes" not in notes_of({**report, "dtype": "bfloat16"})[0]
        assert "class_histogram" in profile
        assert len(notes_of({**report, "arguments": {**GIVEN, "profile": "mine.json"}})) == 2

    def test_a_profile_that_was_measured_on_these_prompts_is_noted(self):
        given = {"prompts": "demo", "skip_prompts": 0, "num_prompts": 4, "algorithms": [], **GIVEN}
        given["profile"] = "p.json"
        report = {"rows": [row_of("plain")], "arguments": given}
        report["profile_prompts"] = {**given, "skip_prompts": 3}
        finish_report(report)
        assert "this run decodes 1 of them" in report["notes"][-1]


@pytest.mark.usefixtures("tiny_pair")
def test_a_device_too_small_for_the_largest_is_known_before_anything_is_compiled(refusal, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda mesh=None: 10**5)
    monkeypatch.setattr(Bench, "measure", None)
    error = refusal("decode", *SMALL[:4], "--budgets", "16", "256")
    assert error.startswith("top_nodes 256: ")
    assert "stores of 1 x " in error


class TestBadInput:
    @pytest.fixture(autouse=True)
    def own_pair_and_prompts(self, monkeypatch):
        monkeypatch.setattr(decode, "load_pair", load_pair)
        monkeypatch.setattr(decode, "make_workloads", make_workloads)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--algorithms", "hybrid", "--algorithm-option", "beta=1"], "it has: alpha"),
            (["--algorithms", "hybrid", "--algorithm-option", "alpha=x"], "with a JSON value, not 'alpha=x'"),
            (
                ["--algorithms", "class_histogram", "--profile", "{}/profile.json"],
                "profile.json is version 9",
            ),
            (["--repeats", "0"], "--repeats must be at least 1, not 0"),
            (["--num-prompts", "100000"], "asked for 100000"),
        ],
    )
    def test_bad_input_is_one_line_before_anything_runs(
        self, tmp_path, refusal, monkeypatch, arguments, said
    ):
        (tmp_path / "profile.json").write_text('{"version": 9}')
        monkeypatch.setattr(Bench, "measure", None)
        line = refusal("decode", *SMALL, *arguments)
        assert said in line
        assert "\n" not in line

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--width", "5000"], "width must lie in 1..4096, not 5000"),
            (["--target", "elsewhere"], "--draft-head is missing: trees for elsewhere need a head"),
            (["--enable-thinking"], "the target's chat template knows no enable_thinking"),
        ],
    )
    @pytest.mark.parametrize("name", ["decode", "exactness"])
    def test_what_both_commands_refuse(self, refusal, name, arguments, said):
        assert said in refusal(name, *SMALL[:4], *arguments)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--algorithms", "accum_logp", "beam"], "unknown tree algorithm 'beam'; known algorithms: "),
            (["--budgets", "16", "257"], "budget must be in 1..256 (nodes, root included), got 257"),
            (["--temperatures", "0", "-1"], "temperature must be 0 or lie in [1e-30, 1e+30], not -1.0"),
        ],
    )
    @pytest.mark.parametrize(("name", "command"), [("decode", decode), ("exactness", exactness)])
    def test_what_needs_no_models_is_checked_before_they_are_loaded(
        self, refusal, monkeypatch, name, command, arguments, said
    ):
        monkeypatch.setattr(command, "load_pair", None)
        assert refusal(name, *arguments).startswith(said)
