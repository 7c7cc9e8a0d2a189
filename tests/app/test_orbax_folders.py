"""The command on Orbax folders, as `python -m convert` writes them."""

import json
import sys

import pytest

import jetspec_jax.checkpoint
from convert.conversion import to_orbax
from jetspec_jax.cli import command
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET

PROMPT = "def read_lines(path):"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    to_orbax(DEMO_TARGET, folder / "target")
    to_orbax(DEMO_DRAFT_HEAD, folder / "head")
    return folder


def run(capsys, *arguments):
    code = command.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.wide
def test_generate_gives_the_same_tokens(capsys, pair):
    usual = ("generate", "--json", "--budget", "16", "--max-tokens", "8", PROMPT)
    expected = json.loads(run(capsys, *usual)[1])
    code, out, _ = run(capsys, *usual, "--target", str(pair / "target"), "--draft-head", str(pair / "head"))
    found = json.loads(out)
    assert code == 0
    assert found["token_ids"] == expected["token_ids"]
    assert found["accept_lengths"] == expected["accept_lengths"]


@pytest.mark.parametrize(("name", "source"), [("target", DEMO_TARGET), ("head", DEMO_DRAFT_HEAD)])
def test_info_says_the_same(capsys, pair, name, source):
    found, expected = (
        json.loads(run(capsys, "info", str(path), "--json")[1]) for path in (pair / name, source)
    )
    assert found.pop("file_bytes") > 0.5 * expected.pop("file_bytes")
    assert found.pop("path") != expected.pop("path")
    assert found == expected


def test_safetensors_beside_it_are_refused(capsys, pair):
    surplus = pair / "target" / "model.safetensors"
    surplus.symlink_to(DEMO_TARGET / "model.safetensors")
    code, _, err = run(capsys, "info", str(pair / "target"))
    surplus.unlink()
    assert code == 2
    assert "remove the files of one of the two formats" in err


def test_without_orbax_the_extra_is_named(capsys, pair, monkeypatch):
    name = "jetspec_jax.checkpoint.orbax_arrays"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(jetspec_jax.checkpoint, "orbax_arrays", raising=False)
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    code, out, err = run(capsys, "generate", "--target", str(pair / "target"), PROMPT)
    assert (code, out) == (2, "")
    assert 'needs orbax-checkpoint: pip install "jetspec-jax[orbax]"' in err
    assert err.count("\n") == 1
