"""``python -m bench loading``: what it writes, and what it says of reading it."""

import json
import math
import mmap

import jax
import numpy as np
import pytest

from bench.__main__ import main
from bench.common.shapes import CONFIGS, SHAPES
from bench.loading import command, measure
from bench.loading.measure import Job
from jetspec_jax import load_target
from jetspec_jax.models import abstract, weights_of
from tests.events import until


@pytest.fixture
def call(tmp_path):
    """The report of a command that must succeed."""
    path = tmp_path / "loading.json"

    def run(*words):
        assert main(["loading", *map(str, words), "--json", str(path)]) == 0
        report = json.loads(path.read_text())
        assert str(tmp_path) not in path.read_text()
        return report

    return run


def sizes(config, itemsize):
    return itemsize * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights_of(abstract(config))))


def test_two_devices_read_what_was_written(call, monkeypatch, tmp_path):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")  # of the process that reads
    work = tmp_path / "work"
    words = "--shape tiny --tensor-parallel-size 2 --dtype float32 --profile"
    report = call(*words.split(), "--work", work)
    assert list(work.iterdir()) == []
    assert (report["devices"], report["dtype"], report["pages_of_files"]) == (2, "float32", "just written")
    written = sizes(SHAPES["tiny"].target, 2)
    assert written < report["file_bytes"] < written + 10_000
    assert report["bytes_per_second"] == pytest.approx(report["file_bytes"] / report["load_seconds"])
    # Norms are whole on both devices.
    halves = [own["weights"] for own in report["memory_of_devices"]]
    assert written < halves[0] == halves[1] < 1.1 * written
    assert len(report["profile"]) == measure.LONGEST
    assert report["profile"][0]["seconds"] > 0
    assert {report["write_seconds"] > 0, report["read_again_seconds"] > 0} == {True}


def test_a_checkpoint_that_is_there(call, monkeypatch, tmp_path):
    """What a run keeps, the next one reads; in this process, as the other test has one of its own."""
    monkeypatch.setattr(command, "in_fresh_process", measure.measure)
    work = tmp_path / "work"
    call("--shape", "tiny", "--work", work, "--keep")
    [folder] = work.glob("*/tiny")
    target = load_target(folder, dtype="bfloat16")
    assert target.config == SHAPES["tiny"].target
    for leaf in jax.tree.leaves(target.weights):
        assert (np.asarray(leaf) == command.VALUE).all()
    report = call("--target", folder, "--cold")
    assert (report["devices"], report["pages_of_files"]) == (1, "asked to be forgotten")
    assert "write_seconds" not in report
    assert report["memory_of_devices"][0]["weights"] == sizes(target.config, 4)
    assert list(folder.glob("*.safetensors"))


def test_memory_of_the_host_is_the_most_of_the_reading(monkeypatch, tmp_path):
    """Beside what there was before: 300 bytes for a moment, after 100."""
    command.write_target(tmp_path / "tiny", CONFIGS["tiny"])
    read, sizes, seen = measure.read_target, iter([100, 150, 300]), []

    def anonymous():
        seen.append(next(sizes, 120))
        return seen[-1]

    def watched(*arguments):
        until(lambda: len(seen) > 3)
        return read(*arguments)

    monkeypatch.setattr(measure, "_anonymous", anonymous)
    monkeypatch.setattr(measure, "read_target", watched)
    assert measure.measure(Job(tmp_path / "tiny", "auto"))["host"]["anonymous"] == 200


def test_memory_that_is_held_is_anonymous():
    if (before := measure._anonymous()) is None:
        pytest.skip("no /proc")
    # Of the kernel, not of the allocator, which may give memory that was already counted.
    with mmap.mmap(-1, 64 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert measure._anonymous() - before > len(held) - 4 * 2**20


def test_every_shape_has_its_config():
    assert list(CONFIGS) == list(SHAPES)


def test_refusals(refusal, monkeypatch):
    assert "goes with neither" in refusal("loading", "--target", "x", "--shape", "tiny")
    assert "--shape must be one of tiny" in refusal("loading", "--shape", "qwen9")
    assert refusal("loading", "--target", "{}/none").endswith("is neither a folder nor a hub id (owner/name)")
    monkeypatch.setattr(command.shutil, "disk_usage", lambda _: command.shutil._ntuple_diskusage(9, 1, 8))
    assert "8 are free; name another --work" in refusal("loading", "--shape", "tiny")
