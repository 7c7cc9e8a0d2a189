"""``python -m bench train``: a step of training, on one device and on several."""

import json

import pytest

from bench.__main__ import main
from bench.common.training_batch import make_batch
from tests.meshes import need_devices

pytestmark = pytest.mark.wide

TINY = ["--shape", "tiny", "--window", "16", "--anchors", "2", "--batch", "4", "--chunk", "8", "--steps", "1"]


def report_of(path, *words):
    assert main(["train", *TINY, *words, "--json", str(path)]) == 0
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return report_of(tmp_path_factory.mktemp("one") / "train.json")


def test_one_device(one):
    assert (one["devices"], one["batch"], one["batch_per_device"]) == (1, 4, 4)
    assert one["mesh"] == {"data": 1, "fsdp": 1, "expert": 1, "tensor": 1}
    assert one["tokens_per_second"] == pytest.approx(4 * 16 / one["step_seconds"])
    # All tokens are real, and each but the first of a window is learnt.
    assert one["real_tokens_per_second"] == one["tokens_per_second"]
    assert one["learnable_tokens"] == 4 * 15
    assert one["distinct_anchors"] == 4 * 2
    assert len(one["peak_memory_bytes_of_devices"]) == 1
    assert "parallel" not in one["command"]


def test_packed_documents_and_documents_alone(tmp_path):
    words = ["--document-tokens", "5"]
    alone = report_of(tmp_path / "alone.json", *words)
    packed = report_of(tmp_path / "packed.json", *words, "--packing")
    assert alone["documents"] == 4 < packed["documents"]
    assert packed["real_tokens"] > 2 * alone["real_tokens"]
    assert packed["real_tokens_per_second"] == pytest.approx(packed["real_tokens"] / packed["step_seconds"])
    assert 4 < packed["distinct_anchors"] <= 8


def test_several_devices_compute_the_same_step(one, tmp_path):
    """With the same batch on all of them together; two of them share the target."""
    need_devices(8)
    words = "--data-parallel-size -1 --fsdp 2 --tensor-parallel-size 2"
    report = report_of(tmp_path / "train.json", *words.split())
    assert (report["devices"], report["batch"], report["batch_per_device"]) == (8, 4, 1)
    assert report["mesh"]["data"] * report["mesh"]["fsdp"] == 4
    assert report["mesh"]["tensor"] == 2
    assert report["loss_value"] == pytest.approx(one["loss_value"], rel=1e-5)
    assert len(report["peak_memory_bytes_of_devices"]) == 8
    assert report["operations"] == one["operations"]
    assert words in report["command"]


def test_meshes_that_do_not_fit_are_refused(refusal):
    need_devices(8)
    assert "does not divide 8 devices" in refusal("train", "--shape", "tiny", "--data-parallel-size", "3")
    said = refusal("train", "--shape", "tiny", "--tensor-parallel-size", "8")
    assert "8 devices cannot split the model: 2 KV heads for 4 query heads over 8 parts" in said
    assert "for models with experts" in refusal("train", *TINY, "--expert-parallel-size", "2")
    said = refusal("train", "--shape", "tiny", "--batch", "4", "--data-parallel-size", "8")
    assert "a batch of 4 sequences does not divide" in said


@pytest.mark.parametrize(("packing", "tokens", "documents"), [(False, 550, 1), (True, 2048, 2048 / 550)])
def test_two_windows_stand_for_a_set_of_documents(packing, tokens, documents):
    batch = make_batch(2, 2048, 100, document_tokens=550, packing=packing)
    assert batch.real / 2 == pytest.approx(tokens, rel=0.1)
    assert len(batch.lengths) / 2 == pytest.approx(documents, rel=0.1)


@pytest.mark.parametrize(("packing", "batch"), [(True, 3), (False, 5000)])
def test_there_are_documents_for_all_windows(packing, batch):
    """4,096 documents of 2 tokens fill fewer windows than these."""
    made = make_batch(batch, 4096 if packing else 4, 100, document_tokens=2, packing=packing)
    assert made.arrays["real"].shape == (batch,)
    assert made.arrays["real"].min() > 0
