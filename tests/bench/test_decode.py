"""``python -m bench decode`` on the embedded demo pair."""

import json

import pytest

from bench.__main__ import main
from bench.prompts import load_prompts


def test_the_report_compares_all_methods_with_plain_decoding(tmp_path, capsys):
    path = tmp_path / "out" / "decode.json"
    arguments = ["--num-prompts", "2", "--max-tokens", "12", "--budgets", "16", "--repeats", "1"]
    assert main(["decode", *arguments, "--batch", "2", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    rows = {row["method"]: row for row in report["rows"]}
    assert list(rows) == ["plain", "chain", "tree 16"]
    for row in rows.values():
        assert row["exact match"] == 1.0
        assert row["tokens/s"] > 0
    assert rows["plain"]["tau"] == 1.0
    assert rows["plain"]["tokens/forward"] == 1.0
    assert rows["plain"]["speed-up"] == 1.0
    assert rows["chain"]["nodes/round"] == 16.0
    assert 1.0 < rows["tree 16"]["tau"] <= 4.0
    assert report["device"]
    assert report["jax"]
    assert report["implementation"] == "xla"
    assert report["divergences"] == {"plain": [], "chain": [], "tree 16": []}
    out = capsys.readouterr().out
    slower = [name for name, row in rows.items() if row["speed-up"] < 1]
    assert ("Slower than plain decoding here" in out) == bool(slower)
    for name in slower:
        assert name in out


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"text": ""}', '{"text": 3}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "x"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:3: expected an object"):
        load_prompts(str(path))


def test_too_few_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "x"}\n')
    with pytest.raises(ValueError, match="holds 1 prompts, asked for 2"):
        load_prompts(str(path), 2)


def test_errors_are_one_line(tmp_path, capsys):
    assert main(["decode", "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert capsys.readouterr().err.startswith("bench: ")
