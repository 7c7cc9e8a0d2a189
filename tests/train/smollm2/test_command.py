"""What is refused before anything is decoded."""

import json

import pytest

from train.command import main
from train.smollm2.command import make_head
from train.smollm2.recipe import SMOLLM2


def test_a_set_that_is_missing_is_an_error_before_anything_is_decoded(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl"):
        make_head(SMOLLM2, tmp_path / "work", gsm8k=tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "Why?"}) + "\n", encoding="utf-8")
    files = {"gsm8k": tmp_path / "test.jsonl"}
    with pytest.raises(FileNotFoundError, match=r"test\.jsonl"):
        make_head(SMOLLM2, tmp_path / "work", gsm8k=tmp_path / "train.jsonl", evaluated=files)
    assert not (tmp_path / "work" / "written").exists()


@pytest.mark.parametrize("given", ["mbpp=x.jsonl", "gsm8k"])
def test_a_set_that_is_not_evaluated_is_refused(tmp_path, capsys, given):
    assert main(["smollm2", "--work", str(tmp_path / "work"), "--evaluated", given]) == 2
    assert (
        f"--evaluated takes SET=FILE for the sets gsm8k, humaneval, mt-bench, not '{given}'"
        in capsys.readouterr().err
    )
