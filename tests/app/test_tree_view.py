"""Trees for people: the drawing, the JSON object, and the command that makes them."""

import functools
import io
import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.cli import command as cli
from jetspec_jax.cli import settings
from jetspec_jax.engine.output import Completion
from jetspec_jax.inspect.trace import RoundTrace, trace_rounds
from jetspec_jax.view.data import trace_data
from jetspec_jax.view.terminal import ASCII, draw_round, headline
from jetspec_jax.view.tokens import columns, cut, pieces, token_label, visible
from tests.vocabularies import byte_fallback, byte_level

PROMPT = "def read_lines(path):"
RUN = ("--budget", "16", "--width", "3", "--max-tokens", "12")
WORDS = {5: ":", 6: "\n", 7: "    ", 8: " return", 9: "pass"}


def hand_made():
    """An anchor with two children, of which the second was accepted with its own second child."""
    return RoundTrace(
        start=3,
        candidate_tokens=np.array([[6, 7], [7, 8], [9, 5]], np.int32),
        candidate_log_probs=np.array([[-0.5, -1.0], [-0.25, -2.0], [-1.0, -9.0]], np.float32),
        candidate_scores=np.array([[-0.5, -1.0], [-0.25, -2.0], [-1.0, -9.0]], np.float32),
        tokens=np.array([5, 6, 7, 7, 8, 9], np.int32),
        parents=np.array([-1, 0, 0, 2, 2, 3], np.int32),
        depths=np.array([0, 1, 1, 2, 2, 3], np.int32),
        scores=np.array([0, -0.5, -1.0, -1.25, -3.0, -2.25], np.float32),
        tree_scores=np.array([0, -0.5, -1.0, -1.25, -3.0, -2.25], np.float32),
        target_log_probs=np.array([0, -2.0, -0.125, -np.inf, -0.25, -3.0], np.float32),
        choices=np.array([7, 5, 8, 9, 9, 6], np.int32),
        path=np.array([0, 2, 4], np.int32),
        committed=np.array([7, 8, 9], np.int32),
    )


DRAWING = """\
   score   draft  target
    0.00                  ● :
   -0.50   60.7%   13.5%  ├─○ ↵
   -1.00   36.8%   88.2%  └─● ·×4
   -1.25   77.9%   <0.1%    ├─○ ·×4
   -2.25   36.8%    5.0%    │ └─○ pass
   -3.00   13.5%   77.9%    └─● ·return
                              └─◆ pass  (bonus)"""


@functools.cache
def words():
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: token for token, word in WORDS.items()}, unk_token=":")
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def label(token):
    return token_label(words(), token)


@pytest.fixture(scope="module")
def llm():
    return LLM(budget=16, width=3)


@pytest.fixture(scope="module")
def traced(llm):
    ids = llm.encode(PROMPT)
    trace = trace_rounds(llm.target, llm.draft_head, ids, SamplingParams(max_tokens=12), llm.settings)
    return ids, list(trace), trace.completion


def run(capsys, *arguments):
    code = cli.main(["tree", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Drawing


def test_a_round_as_lines_of_text():
    assert draw_round(hand_made(), label) == DRAWING.splitlines()
    wanted = "round 4 of 9: a tree of 6 nodes (budget 16), 2 accepted, and the bonus"
    assert headline(hand_made(), 4, 9, 16) == wanted


def test_the_drawing_in_ascii():
    lines = draw_round(hand_made(), lambda t: token_label(words(), t, ascii_only=True), signs=ASCII)
    assert "\n".join(lines).isascii()
    assert lines[2:5] == [
        "   -0.50   60.7%   13.5%  |-o '\\n'",
        "   -1.00   36.8%   88.2%  `-* '    '",
        "   -1.25   77.9%   <0.1%    |-o '    '",
    ]


def test_long_lines_are_cut_and_colours_take_no_columns():
    lines = draw_round(hand_made(), lambda _: "行" * 40, width=50)
    assert max(map(columns, lines)) <= 50
    assert lines[-1].endswith("行…")
    coloured = draw_round(hand_made(), lambda _: "行" * 40, width=50, colour=True)
    assert coloured[2] == f"\033[2m{lines[2]}\033[0m"
    assert coloured[3] == f"\033[1;32m{lines[3]}\033[0m"
    assert coloured[-1] == f"\033[1;36m{lines[-1]}\033[0m"


def test_tokens_are_visible_and_harmless():
    assert visible("a b\t\n") == "a·b⇥↵"
    assert visible(" " * 12 + "x   ") == "·×12x···"
    assert visible("\x1b[2J\u202e\x00") == "\\x1b[2J\\u202e\\x00"
    assert visible("é\n", ascii_only=True) == r"'\xe9\n'"
    assert token_label(None, 3) == "⟨3⟩"
    assert token_label(words(), 3, ascii_only=True) == "<3>"  # it has no text
    for tokenizer in (byte_level(), byte_fallback()):
        assert token_label(tokenizer, 0xC3 + 1) == f"⟨{0xC3 + 1}⟩"  # a part of a character
        assert token_label(tokenizer, 0x0A + 1) == "↵"
    assert token_label(byte_fallback(strip=True), 257) == "·the"
    assert cut("abcdef", 4) == "abc…"
    assert cut("行行行", 4) == "行…"


def test_pieces_join_to_the_text_also_where_tokens_split_characters(llm):
    text = "naïve 日本 🙂 done\n"
    ids = llm.encode(text)
    made = pieces(llm.target.tokenizer, ids)
    assert len(made) == len(ids)
    assert "" in made
    assert "".join(made) == text


@pytest.mark.parametrize("tokenizer", [byte_level, byte_fallback], ids=lambda make: make.__name__)
def test_pieces_end_with_what_was_held_back(tokenizer):
    assert pieces(tokenizer(), []) == []
    for tokens in ([0x61 + 1, 0xC3 + 1], [0x0A + 1, 0xC3 + 1, 0x61 + 1, 258], [0x0A + 1, 0x0A + 1]):
        assert "".join(pieces(tokenizer(), tokens)) == tokenizer().decode(tokens)


# The object


def test_the_object_holds_the_rounds(llm, traced):
    prompt, rounds, completion = traced
    data = trace_data(prompt, rounds, completion, llm.target.tokenizer, {"budget": 16})
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["token_ids"] == completion.token_ids
    assert "".join(data["pieces"]) == PROMPT + completion.text
    for one, as_json in zip(rounds, data["rounds"], strict=True):
        for name in ("tokens", "parents", "choices", "path", "committed"):
            assert as_json[name] == getattr(one, name).tolist()
        np.testing.assert_allclose(as_json["scores"], one.scores, atol=1e-6)
        np.testing.assert_allclose(as_json["target_log_probs"], one.target_log_probs, atol=1e-6)
        for node in range(1, len(one.tokens)):
            row = one.candidate_tokens[one.depths[node] - 1]
            assert row[as_json["ranks"][node]] == one.tokens[node]
        assert {str(t) for t in (*one.tokens, *one.choices)} <= set(data["labels"])


def test_what_has_no_probability_is_null():
    completion = Completion("", [5, 7, 8, 9], "length", [3], [6])
    data = trace_data([1, 2, 3], [hand_made()], completion, None, {})
    assert data["rounds"][0]["target_log_probs"][3] is None
    assert data["rounds"][0]["ranks"] == [-1, 0, 1, 0, 1, 0]


# The command


def test_the_command_draws_a_round_and_writes_the_page(capsys, tmp_path, llm, traced):
    file = tmp_path / "trees.html"
    code, out, err = run(capsys, *RUN, "--round", "2", "--html", str(file), PROMPT)
    prompt, rounds, completion = traced
    tokenizer = llm.target.tokenizer
    lines = out.splitlines()
    assert code == 0
    assert lines[0] == headline(rounds[1], 2, len(rounds), 16)
    assert lines[1].startswith("behind  def·read_lines(path):")
    assert lines[2:-1] == draw_round(rounds[1], lambda token: token_label(tokenizer, token))
    assert lines[-1].startswith("commits ")
    assert f"{len(rounds)} rounds in {file}" in err
    embedded = re.search(r'application/json">(.*?)</script>', file.read_text("utf-8"), re.DOTALL)
    data = json.loads(embedded[1])
    assert data["settings"]["budget"] == "16"
    wanted = trace_data(prompt, rounds, completion, tokenizer, data["settings"], digits=3)
    assert data == wanted
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.wide
def test_the_drawing_of_the_readme_is_what_its_command_draws(capsys):
    readme = (Path(__file__).parents[2] / "docs/command-line.md").read_text(encoding="utf-8")
    shown = re.search(r"\n(jetspec-jax tree [^\n]*)\n```\n\n```text\n(.*?)```", readme, re.DOTALL)
    command, drawn = shown.groups()
    _, out, _ = run(capsys, *shlex.split(command)[2:])
    number = r"[-<]?\d+\.\d+"
    assert re.sub(number, "", out) == re.sub(number, "", drawn)
    found, said = (np.array(re.findall(r"-?\d+\.\d+", text), float) for text in (out, drawn))
    np.testing.assert_allclose(found, said, atol=0.1)  # percents and logarithms, rounded


@pytest.mark.wide
def test_json_is_one_object_with_all_rounds_or_one(capsys, llm, traced):
    code, out, _ = run(capsys, *RUN, "--json", PROMPT)
    whole = json.loads(out)
    assert code == 0
    assert len(whole["rounds"]) == len(traced[1])
    assert whole["rounds"] == trace_data(*traced, llm.target.tokenizer, {})["rounds"]
    code, out, _ = run(capsys, *RUN, "--json", "--round", "2", PROMPT)
    assert code == 0
    assert json.loads(out)["rounds"] == whole["rounds"][1:2]


def test_where_the_terminal_has_ascii_alone(monkeypatch, traced):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert cli.main(["tree", *RUN, PROMPT]) == 0
    lines = written.getvalue().decode("ascii").splitlines()
    assert lines[1] == "behind  'def read_lines(path'"
    assert len(lines) == 5 + len(traced[1][0].tokens)


@pytest.mark.parametrize("number", ["0", "99"])
def test_a_round_that_is_not_there(capsys, number, traced):
    code, out, err = run(capsys, *RUN, "--round", number, PROMPT)
    assert (code, out) == (2, "")
    said = "--round counts from 1, not 0" if number == "0" else f"took {len(traced[1])} rounds"
    assert said in err


@pytest.mark.parametrize(
    ("name", "reason"),
    [("no/such.html", "No such file"), ("file/page.html", "Not a directory"), (".", "it is a folder")],
)
def test_a_page_that_cannot_be_written_is_refused_before_models_are_loaded(
    capsys, tmp_path, monkeypatch, name, reason
):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(settings, "LLM", lambda *_, **__: pytest.fail("models were loaded"))
    code, out, err = run(capsys, "--html", str(tmp_path / name), PROMPT)
    assert (code, out) == (2, "")
    assert err.startswith(f"jetspec-jax: cannot write {tmp_path / name}")
    assert reason in err
