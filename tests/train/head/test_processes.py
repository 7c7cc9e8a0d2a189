"""Runs of a tiny head in other processes: killed ones, on many devices, and in two processes."""

import json
import shutil
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from tests.train.head.tiny import RECIPE, losses, records, write_documents

STEPS = RECIPE.fit.steps


def start(data, runs, **settings):
    text = json.dumps(
        {"data": str(data), "runs": [[str(work), changes] for work, changes in runs], **settings}
    )
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.head.worker", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process, wanted=0):
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == wanted, output[-4000:]
    return output


def same_head(work, other):
    left, right = (
        safetensors.numpy.load_file(folder / "draft_head" / "model.safetensors") for folder in (work, other)
    )
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        # Both are rounded to bfloat16.
        both = (x.astype(np.float32) for x in (tensor, right[name]))
        np.testing.assert_allclose(*both, rtol=2e-2, atol=1e-3, err_msg=name)


def close(work, whole, first=0):
    np.testing.assert_allclose(losses(work)[first:], losses(whole)[first:], rtol=1e-5)
    assert [record["step"] for record in records(work)] == [record["step"] for record in records(whole)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data, cache):
    """An uninterrupted run on one device."""
    work = tmp_path_factory.mktemp("whole")
    wait(start(data, [(work, {})], cache=cache))
    return work


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(whole, data, cache, tmp_path):
    for die in ({"write": 1}, {"save_best": 1}, {"save": 1}):
        wait(start(data, [(tmp_path, {})], cache=cache, die=die), -signal.SIGKILL)
        assert not (tmp_path / "draft_head").exists()
    wait(start(data, [(tmp_path, {})], cache=cache))
    assert len(losses(tmp_path)) == STEPS
    assert records(tmp_path) == records(whole)
    for name in ("draft_head/model.safetensors", "draft_head/config.json", "evaluation.json", "recipe.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.fixture(scope="module")
def meshes(tmp_path_factory, data, cache, whole):
    """The same run on 8 devices, by its mesh; the first goes on with a checkpoint of one device."""
    base = tmp_path_factory.mktemp("meshes")
    shutil.copytree(whole, base / "8x1")
    shutil.rmtree(base / "8x1" / "checkpoints" / str(STEPS))
    (base / "8x1" / "evaluation.json").unlink()  # or it would count as finished
    split = (base / "2x4", {"mesh": {"data": -1, "fsdp": 4}})
    wait(start(data, [(base / "8x1", {}), split], devices=8, cache=cache))
    return base


def check_layout(path, parts):
    """Everything large lies in so many parts, and all steps ran one program."""
    layout = json.loads(path.read_text())
    assert layout.pop("programs") == 1
    split = 0
    for name, (shape, part) in layout.items():
        if name.startswith("['metrics']") or not shape:
            assert part == shape, name
        else:
            # Weights, both moments, and the frozen target: everything has the model's width as an axis, but
            # for the norms of single heads.
            divided = np.prod(shape) // np.prod(part)
            assert divided == (1 if "q_norm" in name or "k_norm" in name else parts), name
            split += divided > 1
    assert split > 30 or parts == 1


@pytest.mark.parametrize(("mesh", "parts"), [("8x1", 1), ("2x4", 4)])
def test_devices_share_the_work_and_the_weights(whole, meshes, mesh, parts):
    close(meshes / mesh, whole)
    same_head(meshes / mesh, whole)
    check_layout(meshes / mesh / "layout-0.json", parts)
    check_layout(whole / "layout-0.json", 1)


def test_a_checkpoint_of_one_device_goes_on_on_eight(whole, meshes):
    # The records of what was done before are the old ones, those after are new.
    assert losses(meshes / "8x1")[: STEPS - 2] == losses(whole)[: STEPS - 2]
    assert losses(meshes / "8x1")[STEPS - 2 :] != losses(whole)[STEPS - 2 :]


def test_two_processes_train_one_head_and_evaluate_it_by_decoding(whole, data, cache, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    # Weights are split over both processes, and both write and read the checkpoints; each decodes alone.
    runs = [(tmp_path / "run", {"mesh": {"data": 1, "fsdp": 8}, "evaluation": {"prompts": 2}})]
    processes = [start(data, runs, devices=4, cache=cache, process=[i, 2, port]) for i in range(2)]
    for process in processes:
        wait(process)
    close(tmp_path / "run", whole)
    for index in range(2):
        check_layout(tmp_path / "run" / f"layout-{index}.json", 8)
    # One process writes: every record is there once, and there is one file of events.
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    taus = [record["tau"]["16"] for record in records(tmp_path / "run") if "tau" in record]
    assert len(taus) == 2
    # The exported head, loaded again, does what the one in training did.
    final = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert final["tau"]["16"] == final["score"] == max(taus) >= 1
