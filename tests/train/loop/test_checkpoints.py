"""Checkpoints that were damaged after they were written: named, and the one before is read."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.events import until
from tests.marks import wide
from train.loop.checkpoints import Best, Checkpoints, TrainingCheckpointError


def state(number):
    """Arrays that differ by the number; one is too long to be stored beside its metadata."""
    noise = np.random.default_rng(number).normal(size=(60, 70)).astype(np.float32)
    return {"a": jnp.asarray(noise), "layers": {0: jnp.full(2, number), 1: jnp.arange(5)}}


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoints of steps 3 and 6, and the best weights of both."""
    folder = tmp_path_factory.mktemp("written")
    with Checkpoints(folder) as checkpoints:
        for step in (3, 6):
            checkpoints.save_best(Best(step, -1.0 / step), state(step))
            checkpoints.save(step, state(step), {"data": step})
    return folder


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path / "run")


def largest(place):
    """The file of a checkpoint that holds most of the arrays."""
    return max((path for path in place.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def empty(place):
    shutil.rmtree(place)
    place.mkdir()


DAMAGES = {
    "truncated-arrays": lambda place: truncate(largest(place)),
    "zeroed-arrays": lambda place: zero(largest(place)),
    "no-arrays": lambda place: largest(place).unlink(),
    "no-manifest": lambda place: (place / "state" / "manifest.ocdbt").unlink(),
    "truncated-metadata": lambda place: truncate(place / "state" / "_METADATA"),
    "no-metadata": lambda place: (place / "state" / "_METADATA").unlink(),
    "truncated-json": lambda place: truncate(place / "host" / "metadata"),
    "no-host": lambda place: shutil.rmtree(place / "host"),
    "no-state": lambda place: shutil.rmtree(place / "state"),
    "empty-folder": empty,
}
IN_SHORT = ("truncated-arrays", "no-metadata", "no-host", "empty-folder")


@pytest.mark.parametrize("damage", [name if name in IN_SHORT else wide(name) for name in DAMAGES])
def test_a_damaged_newest_one_is_named_and_the_one_before_it_is_read(folder, caplog, damage):
    DAMAGES[damage](folder / "checkpoints" / "6")
    with Checkpoints(folder) as checkpoints:
        resumed = checkpoints.restore(state(0))
        assert (resumed.step, resumed.host) == (3, {"data": 3})
        same(resumed.state, state(3))
        [line] = [record.getMessage() for record in caplog.records if record.name == "jetspec_jax.train"]
        assert line.startswith(f"{folder / 'checkpoints' / '6'} is damaged (")
        assert line.endswith("; going on with 3, the one before it")
        # Its step comes again.
        checkpoints.save(6, state(6), {"data": 6})
    with Checkpoints(folder) as checkpoints:
        same(checkpoints.restore(state(0)).state, state(6))


def test_damaged_best_weights_give_way_to_those_before_them(folder, caplog):
    truncate(largest(folder / "best" / "2"))
    with Checkpoints(folder) as checkpoints:
        best, weights = checkpoints.restore_best(state(0))
        assert best == Best(3, -1.0 / 3)
        same(weights, state(3))
        assert f"{folder / 'best' / '2'} is damaged (" in caplog.text
        checkpoints.save_best(Best(9, -0.1), state(9))
        assert checkpoints.restore_best(state(0))[0] == Best(9, -0.1)


def test_where_none_is_whole_all_are_named_and_stay(folder):
    for step in ("3", "6"):
        truncate(largest(folder / "checkpoints" / step))
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(TrainingCheckpointError, match="no checkpoint is whole: ") as failure:
            checkpoints.restore(state(0))
        for step in ("3", "6"):
            assert f"{folder / 'checkpoints' / step} is damaged (" in str(failure.value)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"3", "6"}


def test_a_reader_leaves_everything_to_the_run_that_writes(folder):
    unfinished = folder / "best" / "3.orbax-checkpoint-tmp"
    unfinished.mkdir()
    truncate(largest(folder / "best" / "2"))
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.restore_best(state(0))[0].step == 3
    assert {path.name for path in (folder / "best").iterdir()} == {"1", "2", unfinished.name}
    with Checkpoints(folder):
        # Orbax cleans up in a thread of its own.
        until(lambda: not unfinished.exists())


def test_a_new_folder_holds_nothing(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(state(0)) is None
        assert checkpoints.restore_best(state(0)) is None
