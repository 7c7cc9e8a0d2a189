"""``python -m bench decode`` on the embedded demo pair."""

import itertools
import json
import re
from types import SimpleNamespace

import jax
import pytest
from tqdm import tqdm

from bench.__main__ import main
from bench.common import workload
from bench.common.given_profile import describe_profile
from bench.common.methods import PLAIN_METHOD, Method, choose_algorithms, choose_methods
from bench.common.workload import Workload, make_workload
from bench.common.prompts import Prompt
from bench.decode import command as decode
from bench.decode import measure as decode_measure
from bench.decode.measure import Bench, MethodRuns
from bench.decode.record import begin_report, finish_report
from bench.decode.report import Rows, at_budget, best_of, notes_of
from bench.exactness import command as exactness
from jetspec_jax import Completion, SamplingParams, load_draft_head, load_target
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.device import memory
from jetspec_jax.device.memory import array_bytes
from jetspec_jax.engine.engine import Engine
from tests.decode.tiny import TINY, random_head, random_target
from train.data.prompts import Entry

pytestmark = pytest.mark.usefixtures("quick_compiles")

SMALL = ["--num-prompts", "2", "--max-tokens", "12", "--budgets", "16", "--repeats", "1", "--batch", "2"]
BOTH = ["--temperatures", "0", "1", "--ignore-config-key", "zoom"]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def run(path, *arguments):
    return main(["decode", *SMALL, *BOTH, *arguments, "--json", str(path)])


@pytest.fixture(scope="module")
def target():
    return load_target(DEMO_TARGET, dtype="float32")


@pytest.fixture(scope="module")
def compiled():
    """How many programs had been compiled before each step of `measured`, and at its end."""
    return {}


@pytest.fixture(scope="module")
def measured(tmp_path_factory, compiled):
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
    def test_all_methods_are_compared_with_plain_decoding(self, measured):
        report = json.loads(measured.read_text())
        rows = {(row["temperature"], row["method"]): row for row in report["rows"]}
        names = ["plain", "chain", "accum_logp 16"]
        assert list(rows) == [(temperature, name) for temperature in (0.0, 1.0) for name in names]
        for (_, name), row in rows.items():
            assert row["exact match"] == 1.0
            assert row["divergences"] == []
            assert row["tokens/s"] > 0
            assert row["first token ms"] > 0
            assert row["speed-up"] == pytest.approx(row["tokens/s"] / row["plain tokens/s"])
            # A round commits what it accepted and the bonus token.
            assert row["tau"] == pytest.approx(1 + sum(row["acceptance"]))
            assert row["acceptance"] == sorted(row["acceptance"], reverse=True)
            assert row["nodes/round"] == (1.0 if name == "plain" else 16.0)
            assert len(row["seconds"]) == 1
        for temperature in (0.0, 1.0):
            assert rows[temperature, "plain"]["tau"] == 1.0
            assert rows[temperature, "plain"]["tokens/forward"] == 1.0
            assert rows[temperature, "plain"]["speed-up"] == 1.0
            assert 1.0 < rows[temperature, "accum_logp 16"]["tau"] <= 6.0
        assert report["device"]
        assert report["jax"]
        assert report["implementation"] == "xla"
        assert str(measured.parent) not in measured.read_text()

    def test_the_command_makes_the_same_report_again(self, measured):
        command = json.loads(measured.read_text())["command"]
        assert command.startswith("python -m bench decode --target demo --ignore-config-key zoom --prompts ")
        parsed = vars(decode_arguments(command.split()[3:]))
        given = vars(decode_arguments(["decode", *SMALL, *BOTH]))
        assert parsed == given

    def test_the_picture_is_beside_it(self, measured):
        assert measured.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    def test_the_best_are_named(self, measured):
        report = json.loads(measured.read_text())
        assert [best["temperature"] for best in report["best"]] == [0.0, 1.0]
        for best in report["best"]:
            own = [row for row in report["rows"] if row["temperature"] == best["temperature"]]
            assert best["tau"]["tau"] == max(row["tau"] for row in own)
            assert best["speed-up"]["speed-up"] == max(row["speed-up"] for row in own)

    @pytest.mark.usefixtures("measured")
    def test_nothing_compiles_in_a_timed_run(self, compiled):
        names = ["plain", "chain", "accum_logp 16"]
        steps = [f"compile {name}" for name in names]
        runs = [f"{name}, T = {temperature}" for name in names for temperature in (0, 1)]
        assert list(compiled) == [*steps, *runs, "end"]
        before = [compiled[step] for step in (*steps, runs[0])]
        assert before == sorted(set(before))
        assert compiled["end"] == compiled[runs[0]]

    def test_going_on_measures_what_is_missing(self, measured, tmp_path, capsys):
        path = tmp_path / "decode.json"
        path.write_bytes(measured.read_bytes())
        assert run(path, "--resume", "--algorithms", "chain", "--ignore-config-key", "focus") == 0
        old, new = (json.loads(p.read_text()) for p in (measured, path))
        names = ["plain", "chain", "accum_logp 16", "chain 16"]
        assert [row["method"] for row in new["rows"]] == 2 * names
        assert [row for row in new["rows"] if row["method"] != "chain 16"] == old["rows"]
        assert new["arguments"]["algorithms"] == ["accum_logp", "chain"]
        by_name = {(row["temperature"], row["method"]): row for row in new["rows"]}
        for temperature in (0.0, 1.0):
            chain, tree = by_name[temperature, "chain"], by_name[temperature, "chain 16"]
            assert (chain["tau"], chain["acceptance"]) == (tree["tau"], tree["acceptance"])
        out = capsys.readouterr().out
        # Both kinds of table at both temperatures, and one line that names the fastest of each.
        assert out.count("share of rounds that accepted") == 2
        assert len(re.findall(r"T = [01]: fastest is ", out)) == 2
        assert "This device does not say how much memory was in use." in out

        # Nothing is missing any more: nothing is measured.
        before = path.read_bytes()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Bench, "measure", None)
            assert run(path, "--resume", "--algorithms", "chain", "--ignore-config-key", "focus") == 0
        assert path.read_bytes() == before

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--width", "3"], "was measured with width 7, and this is 3"),
            (["--algorithm-option", "force=1"], "was measured with algorithm_option"),
        ],
    )
    def test_a_report_of_other_settings_is_not_gone_on_with(
        self, measured, capsys, monkeypatch, arguments, said
    ):
        monkeypatch.setattr(decode, "choose_algorithms", lambda *_: {"accum_logp": "accum_logp"})
        assert run(measured, "--resume", *arguments) == 2
        assert said in capsys.readouterr().err


def test_together_takes_turns_of_a_few_prompts(tmp_path, monkeypatch):
    """Three prompts for two slots: a turn of two, and one of what is left. Every turn takes a second."""
    turns, bars, complete = [], [], Engine.complete

    def watched(self, prompts, *others):
        turns.append((id(self), len(prompts)))
        requests = complete(self, prompts, *others)
        if len(turns) > 3 + 6:  # those that compile, and a run
            for request in requests:
                request.output.token_ids.pop()
        return requests

    monkeypatch.setattr(Engine, "complete", watched)
    monkeypatch.setattr(decode_measure, "PROMPTS_PER_TURN", 1)
    monkeypatch.setattr(decode_measure, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    monkeypatch.setattr(decode, "tqdm", lambda **bar: bars.append(tqdm(**bar)) or bars[-1])
    path = tmp_path / "decode.json"
    words = ["--together", "--temperatures", "0", "--num-prompts", "3", "--batch", "2", "--repeats", "2"]
    assert run(path, *words) == 0
    for repeat in turns[3:9], turns[9:]:
        engines, prompts = zip(*repeat, strict=True)
        assert prompts == (2, 2, 2, 1, 1, 1)
        assert len(set(engines[:3])) == 3
        assert engines[:3] == engines[3:]
    assert bars[0].n == bars[0].total == 2 * 3 * 3
    rows = json.loads(path.read_text())["rows"]
    names = ["plain", "chain", "accum_logp 16"]
    assert [(row["method"], row["seconds"], row["tokens"]) for row in rows] == [
        (name, [2, 2], [36, 33]) for name in names
    ]


@pytest.mark.parametrize("together", [False, True])
def test_what_the_device_has_to_hold_at_once_is_checked(target, monkeypatch, together):
    """Room for the stores of two trees, one of which is there while it is asked."""
    head = load_draft_head(DEMO_DRAFT_HEAD, dtype="float32", target=target)
    works = {0.0: work_of(target, [Prompt("p", Entry("p", "text", "a"))])}
    bench = Bench(target, head, works, batch=1, implementation="xla", together=together)
    methods = [Method(f"tree {n}", "accum_logp", TreeSettings(n)) for n in (16, 32, 64)]
    own = array_bytes(bench._engine(methods[0]).state)

    def check(decoder, size, dtype, *, reclaimed):
        if reclaimed < 0:
            raise memory.DeviceMemoryError("too much")
        asked.append(reclaimed / own)

    asked = []
    monkeypatch.setattr(decode_measure, "check_engine_memory", check)
    if together:
        with pytest.raises(memory.DeviceMemoryError, match="tree 64, beside the 2 before it: too much"):
            bench.check(methods)
        assert asked == [1.0, 0.0]
    else:
        bench.check(methods)
        assert asked == [1.0]


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
        report = json.loads(path.read_text())
        assert report["best"]
        return {row["method"]: row["seconds"] for row in report["rows"] if row["temperature"] == 1.0}

    def notes():
        return [note for note in json.loads(path.read_text())["notes"] if "--resume" in note]

    def go(*more):
        return run(path, "--repeats", "3", *more)

    monkeypatch.setattr(Bench, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        go("--budgets", "16", "32")
    first, second, third = ["plain", "chain", "accum_logp 16"], "accum_logp 32", "accum_logp 64"
    assert turns == [first] * 3 + [["plain", second]] * 2
    whole = {name: [1.0, 2.0, 3.0] for name in first}
    assert seconds() == {**whole, second: [1.0, 2.0]}
    assert notes() == [f"Stopped before all timed runs; --resume measures anew: {second} (2 of 3)."]
    # What had all its turns is not measured again; what had some is, and keeps them until it has had more.
    with pytest.raises(KeyboardInterrupt):
        go("--budgets", "16", "32", "--resume")
    assert turns[5:] == [["plain", second]]
    assert seconds() == {**whole, second: [1.0, 2.0]}
    assert go("--budgets", "64", "--resume") == 0
    assert turns[6:] == [["plain", third]] * 3
    assert seconds() == {**whole, second: [1.0, 2.0], third: [1.0, 2.0, 3.0]}
    assert go("--budgets", "32", "--resume") == 0
    assert turns[9:] == [["plain", second]] * 3
    assert seconds() == {**whole, second: [1.0, 2.0, 3.0], third: [1.0, 2.0, 3.0]}
    assert notes() == []


def test_a_profile_of_a_report_is_compared_by_what_it_holds(tmp_path):
    def begin(profile, *words):
        arguments = decode_arguments(["decode", *SMALL, "--json", str(tmp_path / "decode.json"), *words])
        arguments.profile = profile
        return begin_report(arguments, describe_profile(profile))

    mine, moved = tmp_path / "profile.json", tmp_path / "same" / "moved.json"
    moved.parent.mkdir()
    for path in mine, moved:
        path.write_text('{"depth_rank_accept": [[0.5]]}')
    rows = [{"method": "plain"}]
    (tmp_path / "decode.json").write_text(json.dumps({**begin(mine), "rows": rows}))
    for same in mine, moved:
        found = begin(same, "--resume")
        assert (found["rows"], found["arguments"]["profile"]) == (rows, same.name)
    mine.write_text('{"depth_rank_accept": [[0.25]]}')
    for other in mine, None:
        with pytest.raises(ValueError, match=r"was measured with profile_sha256 [0-9a-f]{64}, and this is "):
            begin(other, "--resume")


def decode_arguments(words):
    """What the command line means, without running it."""
    taken = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "run", lambda arguments: taken.append(arguments) or 0)
        assert main(words) == 0
    del taken[0].run
    return taken[0]


def work_of(target, prompts, task=None):
    return make_workload(
        target, prompts, 0.0, max_tokens=4, task=task, arguments={}, batch=1, implementation="xla"
    )


class TestWork:
    def test_a_later_turn_follows_the_targets_own_answer(self, target, monkeypatch):
        asked = []

        def generate(own, ids, params, **settings):
            asked.append((ids, params, settings))
            return [Completion("    pass", [1], "stop", [1], [1])] * len(ids)

        monkeypatch.setattr(prompt_work, "generate", generate)
        user = {"role": "user", "content": "x ="}
        prompts = [
            Prompt("set:1", Entry("set:1", "text", "import"), "code"),
            Prompt("set:2", Entry("set:2", "messages", [user]), "chat", ("y",)),
        ]
        work = work_of(target, prompts, task="set")
        assert [p.id for p in work.prompts] == ["set:1", "set:2", "set:2, a turn later"]
        assert [params.seed for params in work.params] == [0, 1, 2]
        assert [hints["task"] for hints in work.routing] == ["code", "chat", "chat"]
        # Only the conversation that goes on is answered, with its own seed.
        settings = {"max_slots": 1, "implementation": "xla"}
        assert asked[0] == ([work.ids[1]], [work.params[1]], settings)
        turns = "user\nx =", "assistant\n    pass", "user\ny"
        text = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns) + "<|im_start|>assistant\n"
        assert work.ids[2] == target.tokenizer.encode(text, add_special_tokens=False)

    def test_a_prompt_beyond_the_context_is_named(self, target):
        long = Prompt("mine:7", Entry("mine:7", "text", "x = 1\n" * 4000))
        with pytest.raises(ValueError, match=r"prompt mine:7: .* beyond the context limit"):
            work_of(target, [long])


def completion(*tokens):
    return Completion(None, list(tokens), "length", [len(tokens) - 1], [16])


class TestRows:
    def test_every_output_that_differs_is_listed(self, target):
        prompts = [Prompt(f"p:{i}", Entry("", "text", text)) for i, text in enumerate(("a", "b = "))]
        work = work_of(target, prompts)
        plain = MethodRuns([completion(1, 2, 3), completion(4, 5, 6)], [1.0, 3.0, 4.0], [6, 6, 6], [0.1])
        # A later run of the other generated more.
        other = MethodRuns([completion(1, 2, 3), completion(4, 7)], [1.0, 2.0, 9.0], [5, 6, 5], [0.2])
        rows = Rows(target, {0.0: work}, depth=3)
        [group] = choose_methods(
            target,
            load_draft_head(DEMO_DRAFT_HEAD, dtype="float32", target=target),
            choose_algorithms(["hybrid"], ["alpha=2"]),
            [16],
            7,
        )
        row = rows.row(group[1], 0.0, other, plain)
        [found] = row["divergences"]
        assert (found["prompt"], found["position"], found["token"], found["expected"]) == ("p:1", 1, 7, 5)
        assert found["gap"] > 0
        assert row["exact match"] == 0.5
        # By tokens per second: outputs of two lengths are no race.
        assert row["speed-up"] == pytest.approx((6 / 2.0) / (6 / 3.0))
        assert row["acceptance"] == [0.5, 0.0, 0.0]
        # The gap at a place is plain decoding's own, whoever parts from it there.
        again = MethodRuns([completion(1, 2, 3), completion(4, 9)], [1.0], [5], [0.2])
        [same] = rows.row(group[1], 0.0, again, plain)["divergences"]
        assert same == {**found, "token": 9, "behind": same["behind"]}
        assert same["behind"] != found["behind"]

    def test_the_rows_of_a_budget_and_the_best(self):
        def row(method, algorithm, budget, tau, speed):
            figures = {"tau": tau, "speed-up": speed, "tokens/s": 1.0}
            return {"temperature": 0.0, "method": method, "algorithm": algorithm, "budget": budget, **figures}

        rows = [
            row("plain", None, 1, 1.0, 1.0),
            row("chain", None, 16, 2.0, 1.5),
            row("a 16", "a", 16, 2.5, 1.7),
            row("a 64", "a", 64, 3.0, 1.4),
        ]
        assert [own["method"] for own in at_budget(rows, 64)] == ["chain", "a 64"]
        [best] = best_of(rows)
        assert (best["speed-up"]["method"], best["tau"]["method"]) == ("a 16", "a 64")

    def test_slower_methods_are_named_or_counted(self):
        def row(method, temperature, speed):
            return {
                "temperature": temperature,
                "method": method,
                "algorithm": None,
                "speed-up": speed,
                "plain tokens/s": 1.0,
                "seconds": [1.0],
                "divergences": [],
                "peak MiB": 1.0,
            }

        few = [row("plain", 0.0, 1.0), row("chain", 0.0, 0.9), row("a 16", 0.0, 1.1)]
        many = [row("plain", 1.0, 1.0), *(row(f"a {i}", 1.0, 0.5) for i in range(9)), row("b 16", 1.0, 2.0)]
        report = {"rows": [*few, *many], "best": [], "arguments": {"profile": None, "repeats": 1}}
        note, peak = notes_of(report)
        assert peak.startswith("Peak memory is the process's so far")
        assert note.startswith(
            "Slower than plain decoding: chain at T = 0; 9 of 10 methods at T = 1. A tree trades "
        )
        assert notes_of({**report, "rows": few[::2]}) == [peak]

    def test_mistakes_are_counted_and_algorithms_without_a_profile_named(self):
        row = {
            "temperature": 0.0,
            "method": "class_histogram 16",
            "algorithm": "class_histogram",
            "speed-up": 1.0,
            "plain tokens/s": 1.0,
            "seconds": [1.0],
            "divergences": [
                {"prompt": "p:1", "position": 3, "token": 1, "expected": 2, "gap": gap, "behind": behind}
                for gap, behind in ((0.5, 0.5), (1e-5, 1e-5), (1e-6, 3.0))
            ],
            "peak MiB": None,
        }
        given = {"profile": None, "repeats": 1}
        report = {"rows": [row], "best": [], "arguments": given, "dtype": "float32"}
        differ, profile, quiet = notes_of(report)
        assert differ.startswith("Outputs that differ from plain decoding's: 3; ")
        # A small gap excuses nobody who chose neither of the two.
        assert "Mistakes among them: 2; " in differ
        assert "Mistakes" not in notes_of({**report, "dtype": "bfloat16"})[0]
        assert "at most 5.0e-01 apart" in differ
        assert profile == "No profile was given, so these do without their tables: class_histogram."
        assert quiet == "This device does not say how much memory was in use."
        assert len(notes_of({**report, "arguments": {**given, "profile": "mine.json"}})) == 2


@pytest.mark.parametrize(("most", "warm"), [(1, 2), (3, 3), (64, 4)])
def test_the_warm_up_has_a_round_whatever_the_first_prompt_says(monkeypatch, most, warm):
    """Also where the answer is one token, or ends with its first."""
    seen = []
    monkeypatch.setattr(Bench, "_engine", lambda *_: SimpleNamespace(complete=lambda *own: seen.append(own)))
    work = Workload([], [[1], [2]], [SamplingParams(max_tokens=most)] * 2, [None] * 2)
    bench = Bench(random_target(TINY, 0), random_head(TINY, 1), {0.0: work}, batch=1, implementation=None)
    bench._warm_up(PLAIN_METHOD)
    assert seen == [([[1]], [SamplingParams(max_tokens=warm, ignore_eos=True)], [None])]


def test_a_report_says_that_its_profile_was_measured_on_its_prompts():
    given = {"prompts": "demo", "skip_prompts": 0, "num_prompts": 4, "algorithms": [], "profile": "p.json"}
    given["repeats"] = 1
    row = {"temperature": 0.0, "method": "plain", "algorithm": None, "budget": 1, "tau": 1.0}
    row |= {
        "tokens/s": 1.0,
        "speed-up": 1.0,
        "plain tokens/s": 1.0,
        "divergences": [],
        "peak MiB": 1.0,
        "seconds": [1.0],
    }
    report = {"rows": [row], "arguments": given, "profile_prompts": {**given, "skip_prompts": 3}}
    finish_report(report)
    assert "on 4 prompts of demo: of the 4 prompts of this run it knows 1, " in report["notes"][-1]


class TestBadInput:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--algorithms", "accum"], "unknown tree algorithm 'accum'; known algorithms: accum_logp, "),
            (["--algorithms", "hybrid", "--algorithm-option", "beta=1"], "it has: alpha"),
            (["--algorithm-option", "chain.beta=1"], "chain is not among accum_logp"),
            (["--algorithms", "all", "--algorithm-option", "beta=1"], "say whose: one of accum_logp, "),
            (["--algorithms", "hybrid", "--algorithm-option", "alpha=x"], "with a JSON value, not 'alpha=x'"),
            (["--algorithms", "hybrid", "--algorithm-option", "alpha"], "with a JSON value, not 'alpha'"),
            (["--algorithm-option", "=1"], "takes [ALGORITHM.]NAME=VALUE with a JSON value, not '=1'"),
            (["--algorithms", "chain", "--algorithm-option", "chain.=1"], "unknown options ['']"),
            (["--profile", "{}/none.json"], "none.json"),
            (["--profile", "{}/profile.json"], "none of accum_logp takes a profile"),
            (
                ["--algorithms", "class_histogram", "--profile", "{}/profile.json"],
                "profile.json is version 9",
            ),
            (["--budgets", "16", "512"], "512"),
            (["--width", "0"], "--width must be at least 1, not 0"),
            (["--width", "5000"], "width must lie in 1..4096, not 5000"),
            (["--repeats", "0"], "--repeats must be at least 1, not 0"),
            (["--plot-budget", "48"], "--plot-budget 48 is not among --budgets 16"),
            (["--target", "elsewhere"], "--draft-head is missing"),
            (["--enable-thinking"], "chat template knows no enable_thinking"),
            (["--prompts", "{}/none.jsonl"], "none.jsonl"),
            (["--num-prompts", "100000"], "asked for 100000"),
            (["--num-prompts", "0"], "must be at least 1, not 0"),
            (["--json", "{}/profile.json/x.json"], "profile.json"),
            (["--plot", "{}/folder.png"], "it is a folder"),
            (["--plot", "{}/x.pdf"], "--plot writes a PNG, whose name ends in .png, not "),
            (["--json", "{}/x.png"], "--json and --plot are one file: "),
        ],
    )
    def test_bad_input_is_one_line_before_anything_runs(self, tmp_path, capsys, monkeypatch, arguments, said):
        (tmp_path / "profile.json").write_text('{"version": 9}')
        (tmp_path / "folder.png").mkdir()
        monkeypatch.setattr(Bench, "measure", None)
        words = [word.replace("{}", str(tmp_path)) for word in arguments]
        assert main(["decode", *SMALL, "--json", str(tmp_path / "out.json"), *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("bench: ")
        assert error.count("\n") == 1
        assert said in error

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--algorithms", "accum_logp", "beam"], "unknown tree algorithm 'beam'; known algorithms: "),
            (["--algorithms", "beam", "--profile", "{}/profile.json"], "unknown tree algorithm 'beam'"),
            (["--budgets", "16", "257"], "budget must be in 1..256 (nodes, root included), got 257"),
            (["--budgets", "0"], "budget must be in 1..256 (nodes, root included), got 0"),
            (["--temperatures", "0", "-1"], "temperature must be a finite number of at least 0, not -1.0"),
            (["--temperatures", "nan"], "temperature must be a finite number of at least 0, not nan"),
        ],
    )
    @pytest.mark.parametrize("command", [decode, exactness])
    def test_what_needs_no_models_is_checked_before_they_are_loaded(
        self, tmp_path, capsys, monkeypatch, command, arguments, said
    ):
        (tmp_path / "profile.json").write_text("{}")
        monkeypatch.setattr(command, "load_pair", None)
        words = [word.replace("{}", str(tmp_path)) for word in arguments]
        name = command.__name__.removeprefix("bench.")
        assert main([name, *words, "--json", str(tmp_path / "out.json")]) == 2
        assert capsys.readouterr().err.startswith(f"bench: {said}")

    def test_a_device_too_small_for_the_largest_is_known_before_anything_is_compiled(
        self, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.setattr(memory, "free_bytes", lambda: 3 * 10**7)
        monkeypatch.setattr(Bench, "measure", None)
        arguments = [*SMALL[:4], "--budgets", "16", "256", "--json", str(tmp_path / "out.json")]
        assert main(["decode", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith("bench: accum_logp 256: ")
        assert "stores of 1 x 1024 tokens" in error
