"""The published prompt sets: local files with the columns of the real ones, by a stand-in for the library."""

import json
import sys
import types
from pathlib import Path

import pytest

from bench.common.prompts import load_prompts
from train.data.prompt_sets import PROMPT_SETS, Part

ROWS = Path(__file__).parent / "prompt_sets"
#: What the library is asked for: path, config, split.
ASKED = {
    "gsm8k": ("openai/gsm8k", "main", "test"),
    "math500": ("HuggingFaceH4/MATH-500", None, "test"),
    "aime25": ("MathArena/aime_2025", None, "train"),
    "humaneval": ("openai/openai_humaneval", None, "test"),
    "mbpp": ("google-research-datasets/mbpp", "sanitized", "test"),
    "livecodebench": ("json", None, "test"),
    "mt-bench": ("HuggingFaceH4/mt_bench_prompts", None, "train"),
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


class Hub:
    """A stand-in for the library: it knows the sets above, by the rows of the local files."""

    def __init__(self):
        self.calls = []
        self.rows = {asked: rows_of(name) for name, asked in ASKED.items()}

    def load_dataset(self, path, name=None, *, split, streaming, data_files=None):
        assert not streaming
        self.calls.append((path, name, split, data_files))
        if (path, name, split) not in self.rows:
            raise ConnectionError(f"Couldn't reach '{path}'\non the Hub")
        return self.rows[path, name, split]


def rows_of(name):
    return [json.loads(line) for line in (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def hub(monkeypatch):
    made, module = Hub(), types.ModuleType("datasets")
    module.load_dataset = made.load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return made


def test_every_set_is_here():
    assert list(PROMPT_SETS) == list(ASKED)
    assert sorted(path.stem for path in ROWS.glob("*.jsonl")) == sorted(ASKED)


@pytest.mark.parametrize("name", PROMPT_SETS)
def test_rows_in_their_order(hub, name):
    prompts, rows = load_prompts(name), rows_of(name)
    [(path, config, split, files)] = hub.calls
    assert (path, config, split) == ASKED[name]
    assert (files is None) == (name != "livecodebench")
    assert [prompt.id for prompt in prompts] == [f"{name}:{i}" for i in range(len(rows))]
    for prompt in prompts:
        [message] = prompt.entry.value
        assert message["role"] == "user"


def content(name):
    return [prompt.entry.value[0]["content"] for prompt in load_prompts(name)]


@pytest.mark.usefixtures("hub")
class TestForms:
    @pytest.mark.parametrize(
        ("name", "column"), [("gsm8k", "question"), ("math500", "problem"), ("aime25", "problem")]
    )
    def test_mathematics(self, name, column):
        assert content(name) == [row[column] + BOXED for row in rows_of(name)]
        assert {prompt.task for prompt in load_prompts(name)} == {"math"}

    def test_humaneval(self):
        begin = (
            "Write a solution to the following problem and make sure that it passes the tests:\n```python\n"
        )
        assert content("humaneval") == [f"{begin}{row['prompt']}\n```" for row in rows_of("humaneval")]

    def test_mbpp(self):
        assert content("mbpp") == [row["prompt"] for row in rows_of("mbpp")]
        assert {prompt.task for prompt in load_prompts("mbpp")} == {"code"}

    def test_livecodebench_with_and_without_starter_code(self, hub):
        plain, starter = content("livecodebench")
        assert "### Question:\nAdd two numbers.\n\n### Format: Write your code in the following" in plain
        assert plain.endswith(
            "format:\n```python\n# YOUR CODE HERE\n```\n\n"
            "### Answer: (use the provided format with backticks)"
        )
        assert "### Format: Use the following code structure:\n```python\nclass Solution:" in starter
        files = hub.calls[0][3]["test"]
        assert [file.rsplit("/", 1)[1] for file in files] == [f"test{i}.jsonl" for i in ("", 2, 3, 4, 5, 6)]

    def test_mt_bench_keeps_its_second_turns_for_later(self):
        prompts, rows = load_prompts("mt-bench"), rows_of("mt-bench")
        assert [(p.entry.value[0]["content"], *p.later) for p in prompts] == [
            tuple(r["prompt"]) for r in rows
        ]
        assert [prompt.task for prompt in prompts] == ["chat", "math", "code"]


class TestFiles:
    """A set in a file: as on the hub, or as it was first published. The library is not asked."""

    @pytest.mark.parametrize("name", PROMPT_SETS)
    def test_the_same_prompts_as_from_the_hub(self, hub, name):
        fetched = load_prompts(name)
        hub.calls.clear()
        assert load_prompts(f"{name}={ROWS / name}.jsonl") == fetched
        assert not hub.calls

    def test_mt_bench_as_it_was_published(self, tmp_path):
        rows = [{"question_id": i, "category": "math", "turns": [f"{i}?", "Why?"]} for i in range(3)]
        path = tmp_path / "question.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        prompts = load_prompts(f"mt-bench={path}")
        assert [(p.entry.value[0]["content"], p.later, p.task) for p in prompts] == [
            (f"{i}?", ("Why?",), "math") for i in range(3)
        ]
        # In the file's own order.
        assert load_prompts(f"mt-bench={path}", Part(skip=1, count=1)) == prompts[1:2]

    def test_what_is_no_such_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no file .*x\.jsonl with the set gsm8k"):
            load_prompts(f"gsm8k={tmp_path / 'x.jsonl'}")
        path = tmp_path / "rows.jsonl"
        path.write_text("[1]\n", encoding="utf-8")
        with pytest.raises(ValueError, match=r"rows\.jsonl:1: expected an object, not"):
            load_prompts(f"gsm8k={path}")
        path.write_text("", encoding="utf-8")
        with pytest.raises(ValueError, match=r"rows\.jsonl holds no rows"):
            load_prompts(f"gsm8k={path}")


@pytest.mark.usefixtures("hub")
class TestPlainForm:
    def test_no_instruction(self):
        asked = {name: load_prompts(name, form="plain") for name in ("gsm8k", "humaneval", "mt-bench")}
        content = {name: [p.entry.value[0]["content"] for p in own] for name, own in asked.items()}
        assert content["gsm8k"] == [row["question"] for row in rows_of("gsm8k")]
        assert content["humaneval"] == [
            f"Complete this Python function.\n```python\n{row['prompt'].rstrip()}\n```"
            for row in rows_of("humaneval")
        ]
        assert content["mt-bench"] == [row["prompt"][0] for row in rows_of("mt-bench")]
        assert not any(prompt.later for prompt in asked["mt-bench"])

    @pytest.mark.parametrize("name", ["mbpp", "demo", "x.jsonl"])
    def test_others_have_none(self, name):
        with pytest.raises(ValueError, match="form 'plain'"):
            load_prompts(name, form="plain")


class TestParts:
    def test_a_part_is_taken_as_the_published_ones_are(self, hub):
        hub.rows[ASKED["gsm8k"]] = [{"question": str(i)} for i in range(5)]
        # What the library's own `shuffle(seed=0)` makes of five rows.
        assert [p.id for p in load_prompts("gsm8k", Part(count=3))] == ["gsm8k:2", "gsm8k:4", "gsm8k:3"]
        assert [p.id for p in load_prompts("gsm8k", Part(count=5))] == [f"gsm8k:{i}" for i in range(5)]
        # Two parts one after the other share nothing, and are the whole.
        first, others = ([p.id for p in load_prompts("gsm8k", own)] for own in (Part(count=3), Part(skip=3)))
        assert sorted([*first, *others]) == [f"gsm8k:{i}" for i in range(5)]
        assert [p.id for p in load_prompts("gsm8k", Part(skip=3, count=2))] == others
        assert [p.id for p in load_prompts("gsm8k", Part(skip=1, count=2))] == first[1:]

        with pytest.raises(ValueError, match="gsm8k holds 5 prompts, asked for 9"):
            load_prompts("gsm8k", Part(count=9))


class TestTrouble:
    @pytest.mark.usefixtures("hub")
    def test_no_network_is_one_line_that_says_what_to_do(self, hub, refusal):
        hub.rows.clear()
        error = refusal("decode", "--prompts", "gsm8k")
        assert "\n" not in error
        assert error.startswith("the data set openai/gsm8k cannot be loaded: ConnectionError: Couldn't")
        assert error.endswith("once; without one, name the file that holds it: gsm8k=FILE.jsonl")

    @pytest.mark.parametrize(
        ("name", "row", "said"),
        [
            ("gsm8k", {"problem": "x"}, "gsm8k row 0 has no 'question'; its columns are problem"),
            ("mt-bench", {"prompt": [], "category": "math"}, "mt-bench row 0 has no question"),
            ("mbpp", {"prompt": None}, "mbpp row 0 has no question, or a question that is not a text"),
        ],
    )
    def test_a_row_of_another_form_is_named(self, hub, name, row, said):
        hub.rows[ASKED[name]] = [row]
        with pytest.raises(ValueError, match=said):
            load_prompts(name)

    def test_an_unknown_set(self):
        with pytest.raises(
            FileNotFoundError, match="no file gsm9k; prompts are a JSONL file, or a set: demo, gsm8k"
        ):
            load_prompts("gsm9k")
