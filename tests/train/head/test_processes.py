"""Runs of a tiny head in other processes: killed ones, and ones on the eight devices of two processes."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import safetensors.numpy

from tests.events import PATIENCE, until
from tests.train.head.tiny import RECIPE, losses, records, write_documents
from tests.train.head.worker import DEATHS, VOCABULARY, train

STEPS = RECIPE.fit.steps


def start(data, runs, **settings):
    text = json.dumps(
        {"data": str(data), "runs": [(str(work), changes) for work, changes in runs], **settings}
    )
    return subprocess.Popen(
        [sys.executable, "-m", "tests.train.head.worker", text],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait(process, *wanted):
    """Waits for the end; ``wanted`` are the exit codes that are right, 0 if none is named."""
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode in (wanted or (0,)), output[-4000:]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("data") / "documents")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    work = tmp_path_factory.mktemp("whole")
    train(data, [(work, {})])
    return work


@pytest.mark.wide
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(whole, data, tmp_path):
    for place in DEATHS:
        wait(start(data, [(tmp_path, {})], die=place), -signal.SIGKILL)
        assert not (tmp_path / "draft_head").exists()
    train(data, [(tmp_path, {})])
    assert len(losses(tmp_path)) == STEPS
    assert records(tmp_path) == records(whole)
    for name in ("draft_head/model.safetensors", "draft_head/config.json", "evaluation.json", "recipe.json"):
        assert (tmp_path / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.wide
def test_kills_at_random_moments_change_nothing(data, tmp_path):
    # A checkpoint after every step, so that one is being written nearly always.
    changes = {
        "fit": {"steps": 60, "save_every": 1, "evaluate_every": 3, "learning_rate": 1e-3},
        "head": {"start": "target"},
    }
    killed, whole, random = tmp_path / "killed", tmp_path / "whole", np.random.default_rng(0)
    startup, unfinished = 0.0, 0
    for kill in range(4):
        process, begun = start(data, [(killed, changes)]), time.monotonic()
        if kill == 2:  # while it starts, compiles or reads a checkpoint
            time.sleep(random.uniform(0.3, 1) * startup)
        elif kill:  # while it writes one
            until(lambda own=process: unfinished_in(killed) or own.poll() is not None)
        else:
            before = names(killed)
            until(lambda old=before, own=process: names(killed) != old or own.poll() is not None)
            startup = time.monotonic() - begun
            time.sleep(random.uniform(0, 1))
        process.kill()
        wait(process, -signal.SIGKILL, 0)
        if not process.returncode:
            break
        unfinished += unfinished_in(killed)
    assert unfinished
    wait(start(data, [(killed, changes), (whole, changes)]))
    assert len(losses(killed)) == 60
    assert records(killed) == records(whole)
    for name in ("draft_head/model.safetensors", "draft_head/config.json", "evaluation.json", "recipe.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def unfinished_in(work):
    return any("tmp" in name for name in names(work))


def names(work):
    """What lies in the folders of a run's checkpoints, whole or not."""
    return {path.name for folder in ("checkpoints", "best") for path in (work / folder).glob("*")}


@pytest.fixture(scope="module")
def spread(tmp_path_factory, data, whole):
    """Runs of two processes with four devices each, by their mesh, and what a step is compiled to.

    "8x1" goes on with a checkpoint of one device. "1x8" splits the weights over both processes, which both
    write and read the checkpoints, and each decodes alone. So they do in "1x4x1x2", where in each process two
    times two devices share the target.
    """
    base = tmp_path_factory.mktemp("spread")
    shutil.copytree(whole, base / "8x1")
    shutil.rmtree(base / "8x1" / "checkpoints" / str(STEPS))
    (base / "8x1" / "evaluation.json").unlink()  # or it would count as finished
    runs = [
        (base / "8x1", {}),
        (base / "1x8", {"mesh": {"data": 1, "fsdp": 8}, "evaluation": {"prompts": 2}}),
        (base / "1x4x1x2", {"mesh": {"fsdp": 4, "tensor": 2}, "evaluation": {"prompts": 2}}),
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"devices": 4, "programs": str(base / "programs.json")}
    for process in [start(data, runs, process=[i, 2, port], **settings) for i in range(2)]:
        wait(process)
    return base


def same_head(work, whole):
    left, right = (
        safetensors.numpy.load_file(folder / "draft_head" / "model.safetensors") for folder in (work, whole)
    )
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        # Both are rounded to bfloat16.
        both = (x.astype(np.float32) for x in (tensor, right[name]))
        np.testing.assert_allclose(*both, rtol=2e-2, atol=1e-3, err_msg=name)


def check_run(work, whole, parts, processes=1):
    """It is the one of a single device; everything large lies in so many parts; all steps ran one program."""
    np.testing.assert_allclose(losses(work), losses(whole), rtol=1e-5)
    assert [record["step"] for record in records(work)] == [record["step"] for record in records(whole)]
    for index in range(processes):
        layout = json.loads((work / f"layout-{index}.json").read_text())
        assert layout.pop("programs") == 1
        split = 0
        for name, (shape, part) in layout.items():
            if name.startswith("['metrics']") or not shape:
                assert part == shape, name
            else:
                # Weights, both moments, and the frozen target: everything has the model's width as an axis,
                # but for the norms of single heads.
                divided = np.prod(shape) // np.prod(part)
                assert divided == (1 if "q_norm" in name or "k_norm" in name else parts), name
                split += divided > 1
        assert split > 30 or parts == 1


@pytest.mark.wide
@pytest.mark.parametrize(("mesh", "parts"), [("8x1", 1), ("1x8", 8)])
def test_devices_of_two_processes_share_the_work_and_the_weights(whole, spread, mesh, parts):
    check_run(spread / mesh, whole, parts, processes=2)


@pytest.mark.wide
def test_devices_of_one_process_share_the_work_and_the_weights(whole, data, tmp_path):
    check_run(whole, whole, 1)
    wait(start(data, [(tmp_path, {"mesh": {"data": -1, "fsdp": 4}})], devices=8))
    check_run(tmp_path, whole, 4)
    same_head(tmp_path, whole)


def check_shared(work, whole, part, processes=1):
    """It is the run of a single device, and each device has such a part of the target, and its norms."""
    np.testing.assert_allclose(losses(work), losses(whole), rtol=1e-4)
    for index in range(processes):
        layout = json.loads((work / f"layout-{index}.json").read_text())
        assert layout.pop("programs") == 1
        frozen = [sizes for name, sizes in layout.items() if name.startswith("['frozen']")]
        all_of_it, own = (sum(np.prod(shape) for shape in shapes) for shapes in zip(*frozen, strict=True))
        assert part < own / all_of_it < part + 0.02


def same_weights(work, whole):
    left, right = (np.load(folder / "weights.npz") for folder in (work, whole))
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], atol=1e-4, err_msg=name)


@pytest.mark.wide
def test_two_devices_share_the_target(whole, data, tmp_path):
    wait(start(data, [(tmp_path, {"mesh": {"tensor": 2}})], devices=2))
    check_shared(tmp_path, whole, 1 / 2)
    same_weights(tmp_path, whole)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, data):
    """Runs on four devices by their mesh, and beside each that of one device."""
    base = tmp_path_factory.mktemp("shared")
    decoding = {"evaluation": {"prompts": 2}}
    runs = {
        "1x2x1x2": decoding,
        "1x1x2x2": {"mixture": True, **decoding},
        "1x1x1x4": {"head": {"start": "target"}, **decoding},
    }
    train(data, [(base / "whole" / name, changes) for name, changes in runs.items()])
    axes = ("data", "fsdp", "expert", "tensor")
    meshes = {name: dict(zip(axes, map(int, name.split("x")), strict=True)) for name in runs}
    own = [(base / name, {"mesh": meshes[name], **changes}) for name, changes in runs.items()]
    wait(start(data, own, devices=4))
    return base


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mesh", "part"),
    # The tiny target's two KV heads are repeated for four devices.
    [("1x2x1x2", 1 / 2), ("1x1x2x2", 1 / 4), ("1x1x1x4", 1 / 4)],
)
def test_groups_that_share_the_target_train_and_decode_as_one_device_does(shared, mesh, part):
    work, whole = shared / mesh, shared / "whole" / mesh
    check_shared(work, whole, part)
    same_weights(work, whole)
    final, wanted = (json.loads((folder / "evaluation.json").read_text()) for folder in (work, whole))
    assert final["tau"] == wanted["tau"]
    assert final["prompts"] == wanted["prompts"]


@pytest.mark.wide
def test_a_checkpoint_of_one_device_goes_on_on_eight(whole, spread):
    same_head(spread / "8x1", whole)
    # The records of what was done before are the old ones, those after are new.
    assert losses(spread / "8x1")[: STEPS - 2] == losses(whole)[: STEPS - 2]
    assert losses(spread / "8x1")[STEPS - 2 :] != losses(whole)[STEPS - 2 :]


@pytest.mark.wide
def test_devices_of_each_of_two_processes_share_the_target(whole, spread):
    check_shared(spread / "1x4x1x2", whole, 1 / 2, processes=2)


@pytest.mark.wide
@pytest.mark.parametrize("mesh", ["1x8", "1x4x1x2"])
def test_two_processes_write_once_and_evaluate_by_decoding(spread, mesh):
    assert len(list((spread / mesh / "tensorboard").iterdir())) == 1
    taus = [record["tau"]["16"] for record in records(spread / mesh) if "tau" in record]
    assert len(taus) == 2
    # The exported head, loaded again, does what the one in training did.
    final = json.loads((spread / mesh / "evaluation.json").read_text())
    assert final["tau"]["16"] == final["score"] == max(taus) >= 1


@pytest.mark.wide
def test_weights_are_gathered_and_the_batch_is_not(spread):
    """What XLA makes of a step: no logits move, and split weights need hardly more room than whole ones."""
    programs = json.loads((spread / "programs.json").read_text())
    moved = programs["1x8"]["moved"]
    assert any(line.startswith("all-gather") for line in moved)
    vocabulary = [line for line in moved if str(VOCABULARY) in line]
    # The two tables of the target alone have the vocabulary as an axis, beside the model's width of 32.
    assert vocabulary
    assert all(f"[{VOCABULARY},32]" in line for line in vocabulary), vocabulary
    # The gathered tables are the larger part of so small a model.
    gathered = 2 * VOCABULARY * 32 * 4
    assert programs["1x8"]["temp"] < 1.2 * programs["8x1"]["temp"] + gathered
