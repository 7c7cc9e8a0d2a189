"""Runs on packed windows: they say how full those are, and go on to the same bits."""

import pytest

from tests.decode.tiny import TINY, random_target
from tests.train.head.tiny import RECIPE, changed, records, write_documents
from tests.train.loop.test_trainer import StopAfter
from train.data.documents import Documents
from train.head.training import train_head
from train.loop.stages import Deadline, OutOfTime

# Two runs of training.
pytestmark = pytest.mark.wide

PACKED = changed(RECIPE, window=40, packing=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


def test_a_stopped_run_continues_to_the_same_bits(data, tmp_path, capsys):
    target = random_target(TINY, 0)
    train_head(tmp_path / "whole", PACKED, target, data, Deadline())
    said = capsys.readouterr().out
    assert "head: 30 documents in 16 windows of 40 tokens, of which 93.4% are real\n" in said
    with pytest.raises(OutOfTime):
        train_head(tmp_path / "stopped", PACKED, target, data, StopAfter(1))
    assert len([line for line in records(tmp_path / "stopped") if "loss" in line]) < RECIPE.fit.steps
    train_head(tmp_path / "stopped", PACKED, target, data, Deadline())
    found = records(tmp_path / "stopped")
    assert found == records(tmp_path / "whole")
    steps = [line for line in found if "loss" in line]
    # Four steps of eight windows are two epochs.
    assert sum(line["real_tokens"] for line in steps) == 2 * Documents.open(data).lengths.sum()
    # Four anchors in each window.
    assert all(24 < line["distinct_anchors"] <= 32 for line in steps)
    name = "draft_head/model.safetensors"
    assert (tmp_path / "stopped" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    with pytest.raises(ValueError, match=r"packing: True there, False here"):
        train_head(tmp_path / "stopped", changed(PACKED, packing=False), target, data, Deadline())
