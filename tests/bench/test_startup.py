"""``python -m bench startup``: the order of a start's events, and refusals."""

import json

from bench.__main__ import main


def test_a_start(tmp_path, capsys):
    path = tmp_path / "startup.json"
    words = "--shape tiny --budget 4 --max-num-seqs 2 --prompt-tokens 5 --max-tokens 3 --dtype float32"
    assert main(["startup", *words.split(), "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    times = report["seconds"]
    events = ["opens", "first token", "first answer", "all programs", "warm"]
    assert list(times) == events
    assert [times[event] for event in events] == sorted(times.values())
    assert min(report["seconds_of_stages"].values()) > 0
    assert (report["dtype"], report["algorithm"]) == ("float32", "top_nodes")
    assert "first answer s" in capsys.readouterr().out


def test_refusals(refusal):
    assert "--shape must be one of tiny" in refusal("startup", "--shape", "qwen9")
    assert "--max-num-seqs must be at least 1" in refusal("startup", "--max-slots", "0")  # a former name
