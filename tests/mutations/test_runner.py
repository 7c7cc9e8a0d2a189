"""The runner of seeded faults, on a tree of one module and two files of tests."""

import difflib
import subprocess

import pytest

from tests.mutations.__main__ import table
from tests.mutations.runner import CAUGHT, FAULTS, Pass, read_faults

MODULE = """\
def double(x):
    return x + x

def half(x):
    return x // 2
"""
TESTS = """\
import pytest
from sums import double

def test_double():
    assert double(3) == 6

def test_nothing():
    pass

def test_wrong():
    assert double(3) == 7

@pytest.mark.skip
def test_skipped():
    assert double(3) == 6
"""
OTHERS = "from sums import half\n\ndef test_half():\n    assert half(4) == 2\n"
#: Of each fault: the line it changes, the new line, the named test, and the outcome.
CASES = {
    "caught": ("x + x", "x + 4", "test_double", CAUGHT),
    "other": ("x // 2", "x // 3", "test_nothing", "caught by another test"),
    "missed": ("x // 2", "(x) // 2", "test_nothing", "not caught"),
    "raises": ("x + x", "x + y", "test_double", "failed without an assertion"),
    "broken": ("def double(x):", "def double(x:", "test_double", "the patched tree does not import"),
    "stale": ("x * 5", "x * 6", "test_double", "the patch does not apply"),
    "wrong": ("x + x", "x + 4", "test_wrong", "fails without the patch"),
    "skipped": ("x + x", "x + 4", "test_skipped", "fails without the patch"),
}


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A tree with the faults, in a repository; pytest starts without plugins there."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "tree"
    (root / FAULTS / "faults").mkdir(parents=True)
    (root / "sums.py").write_text(MODULE)
    (root / "test_double.py").write_text(TESTS)
    # The whole suite: what the named tests leave.
    (root / "test_half.py").write_text(OTHERS)
    entries = []
    for name, (old, new, test, _) in CASES.items():
        before = MODULE if old in MODULE else MODULE.replace("x + x", old)
        texts = [text.splitlines(keepends=True) for text in (before, before.replace(old, new))]
        patch = "A fault.\n\n" + "".join(difflib.unified_diff(*texts, "a/sums.py", "b/sums.py"))
        (root / FAULTS / "faults" / f"{name}.patch").write_text(patch)
        entries.append(f'{name} = {{ room = "sums", tests = ["test_double.py::{test}"] }}\n')
    (root / FAULTS / "faults.toml").write_text("".join(entries))
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def test_outcomes_of_all_kinds_and_a_second_pass_that_keeps_what_was_caught(tree, monkeypatch):
    one_pass = Pass(tree, tree / "build", jobs=2, suite=("test_half.py",))
    seen = []
    results = one_pass.run(read_faults(tree), seen.append)
    assert {result.name: result.outcome for result in results} == {
        name: case[3] for name, case in CASES.items()
    }
    assert sorted(seen, key=str) == sorted(results, key=str)
    by_name = {result.name: result for result in results}
    assert by_name["caught"].test == "test_double::test_double"
    assert by_name["other"].test == "test_half::test_half"
    assert "NameError" in by_name["raises"].message
    assert f"caught 1 of {len(CASES)}: sums 1/{len(CASES)}" in table(results)
    for copy in ("tree-0", "tree-1"):
        assert (tree / "build" / copy / "sums.py").read_text() == MODULE

    tried = []

    def try_fault(self, fault, copy):
        tried.append(fault.name)
        return by_name[fault.name]

    monkeypatch.setattr(Pass, "try_fault", try_fault)
    again = Pass(tree, tree / "build", suite=("test_half.py",))
    assert again.run(read_faults(tree, ["caught", "other"])) == [by_name["caught"], by_name["other"]]
    assert tried == ["other"]
    # Another tree: nothing of the first counts.
    (tree / "sums.py").write_text(MODULE + "\n")
    again.run(read_faults(tree, ["caught"]))
    assert tried == ["other", "caught"]


def test_a_time_limit_is_no_catch(tree, monkeypatch):
    monkeypatch.setattr("tests.mutations.runner.NAMED_LIMIT", 0.0)
    (result,) = Pass(tree, tree / "build").run(read_faults(tree, ["caught"]))
    assert result.outcome == "time limit without the patch"


def test_entries_and_patches_belong_together(tree):
    with pytest.raises(ValueError, match="no such fault: absent"):
        read_faults(tree, ["absent"])
    (tree / FAULTS / "faults" / "stale.patch").unlink()
    with pytest.raises(ValueError, match=r"\['stale'\]"):
        read_faults(tree)
