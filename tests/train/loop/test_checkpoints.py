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


def flip(path, bit=12345):
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def empty(place):
    shutil.rmtree(place)
    place.mkdir()


DAMAGES = {
    "truncated-arrays": lambda place: truncate(largest(place)),
    "flipped-bit": lambda place: flip(largest(place)),
    "no-manifest": lambda place: (place / "state" / "manifest.ocdbt").unlink(),
    "no-metadata": lambda place: (place / "state" / "_METADATA").unlink(),
    "truncated-json": lambda place: truncate(place / "host" / "metadata"),
    "no-host": lambda place: shutil.rmtree(place / "host"),
    "empty-folder": empty,
}
IN_SHORT = ("flipped-bit", "no-host")


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


def numbers(folder):
    return [sorted(path.name for path in (folder / part).iterdir()) for part in ("checkpoints", "best")]


@pytest.mark.parametrize(
    "damage", [lambda place: truncate(largest(place)), shutil.rmtree], ids=["cut", "gone"]
)
def test_without_its_best_weights_a_run_resumes_from_the_checkpoint_before_them(folder, caplog, damage):
    """The other one would end with weights that it knows not to be the best."""
    damage(folder / "best" / "2")
    with Checkpoints(folder) as checkpoints:
        resumed = checkpoints.restore(state(0))
        assert (resumed.step, resumed.best) == (3, Best(3, -1.0 / 3))
        same(resumed.state, state(3))
        assert f"{folder / 'checkpoints' / '6'} needs {folder / 'best' / '2'}, which is not" in caplog.text
        # Both come again.
        checkpoints.save_best(Best(6, -1.0 / 6), state(6))
        checkpoints.save(6, state(6), {"data": 6})
    assert numbers(folder) == [["3", "6"], ["1", "2"]]
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(state(0)).best == Best(6, -1.0 / 6)


def test_best_weights_that_the_newest_checkpoint_does_not_need(folder):
    with Checkpoints(folder) as checkpoints:
        checkpoints.save_best(Best(9, -0.1), state(9))
    truncate(largest(folder / "best" / "3"))
    with Checkpoints(folder) as checkpoints:
        resumed = checkpoints.restore(state(0))
        assert (resumed.step, resumed.best) == (6, Best(6, -1.0 / 6))
        checkpoints.save_best(Best(9, -0.1), state(9))
    shutil.rmtree(folder / "best" / "2")
    with Checkpoints(folder) as checkpoints:
        # Later and better ones take their place.
        resumed = checkpoints.restore(state(0))
        assert (resumed.step, resumed.best) == (6, Best(9, -0.1))
        same(checkpoints.restore_best(state(0))[1], state(9))


@pytest.mark.parametrize("also", ["best/1", "checkpoints/3"])
def test_without_a_checkpoint_before_its_best_weights_a_run_ends_and_all_of_it_stays(folder, also):
    for place in ("best/2", also):
        truncate(largest(folder / place))
    with Checkpoints(folder) as checkpoints:
        with pytest.raises(TrainingCheckpointError, match="no checkpoint is whole: ") as failure:
            checkpoints.restore(state(0))
        for place in ("best/2", also):
            assert f"{folder / place} is damaged (" in str(failure.value)
    assert numbers(folder) == [["3", "6"], ["1", "2"]]


def test_weights_before_the_best_ones_are_not_the_best(folder):
    truncate(largest(folder / "best" / "2"))
    for read_only in (False, True):
        refused = pytest.raises(TrainingCheckpointError, match=r"best/2 is damaged \(.*; bring back a copy")
        with Checkpoints(folder, read_only=read_only) as checkpoints, refused:
            checkpoints.restore_best(state(0))
    assert numbers(folder) == [["3", "6"], ["1", "2"]]


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
    with Checkpoints(folder, read_only=True) as checkpoints:
        assert checkpoints.restore_best(state(0))[0].step == 6
    assert {path.name for path in (folder / "best").iterdir()} == {"1", "2", unfinished.name}
    with Checkpoints(folder):
        # Orbax cleans up in a thread of its own.
        until(lambda: not unfinished.exists())


@pytest.mark.parametrize("part", ["checkpoints", "best"])
def test_every_flipped_bit_is_noticed_or_harmless(folder, part):
    """One checkpoint, so that a damaged one is an error; the files take turns."""
    place = folder / part / {"checkpoints": "6", "best": "2"}[part]
    shutil.rmtree(place.with_name({"6": "3", "2": "1"}[place.name]))
    files = sorted(path for path in place.rglob("*") if path.is_file())
    random = np.random.default_rng(0)
    noticed = set()
    with Checkpoints(folder) as checkpoints:
        restore = checkpoints.restore if part == "checkpoints" else checkpoints.restore_best
        for number in range(30):
            path = files[number % len(files)]
            before = path.read_bytes()
            flip(path, int(random.integers(8 * len(before))))
            try:
                found = restore(state(0))
            except TrainingCheckpointError:
                noticed.add(path)
            else:
                same(found.state if part == "checkpoints" else found[1], state(6))
            path.write_bytes(before)
    # What Orbax writes last, and nobody reads.
    assert set(files) - noticed == {place / "_CHECKPOINT_METADATA", place / "commit_success.txt"}


def test_a_folder_that_was_renamed_is_an_error_that_says_its_name(folder):
    for part, name, restore in (
        ("checkpoints", "6", Checkpoints.restore),
        ("best", "2", Checkpoints.restore_best),
    ):
        place = folder / part / name
        wanted = f"{folder / part / '9'} was written as {name}; rename the folder to {name}"
        place.rename(place.with_name("9"))
        with Checkpoints(folder) as checkpoints, pytest.raises(TrainingCheckpointError) as failure:
            restore(checkpoints, state(0))
        assert str(failure.value) == wanted
        place.with_name("9").rename(place)


def test_a_run_does_not_begin_anew_beside_a_folder_without_a_number(folder):
    shutil.rmtree(folder / "checkpoints" / "3")
    (folder / "checkpoints" / "6").rename(folder / "checkpoints" / "last")
    wanted = pytest.raises(TrainingCheckpointError, match="last was written as 6; rename the folder to 6")
    with Checkpoints(folder) as checkpoints, wanted:
        checkpoints.restore(state(0))


def test_a_checkpoint_of_an_earlier_version_is_read_with_a_warning(folder, caplog):
    (folder / "checkpoints" / "6" / "SHA256SUMS").unlink()
    with Checkpoints(folder) as checkpoints:
        resumed = checkpoints.restore(state(0))
    assert resumed.step == 6
    same(resumed.state, state(6))
    [line] = [record.getMessage() for record in caplog.records if record.name == "jetspec_jax.train"]
    assert line.startswith(f"{folder / 'checkpoints' / '6'} has no checksums")


def test_a_new_folder_holds_nothing(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        resumed = checkpoints.restore(first := state(0))
        assert (resumed.step, resumed.best) == (0, Best())
        assert resumed.state is first
        assert checkpoints.restore_best(state(0)) is None
