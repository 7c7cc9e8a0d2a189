"""The target's states, computed once: what a window gets, shards that last, and sizes that do not fit."""

import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.head.tiny import write_documents
from tests.train.loop.test_trainer import StopAfter
from train.data.documents import Documents
from train.data.windows import Windows
from train.head import target_states
from train.head.target_states import TargetStates, check_bound
from train.loop.stages import Deadline, OutOfTime

WINDOW, WIDTH, BATCH = 24, 6, 3
FLOAT32 = np.dtype("float32")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return Documents.open(write_documents(tmp_path_factory.mktemp("data") / "documents"))


@pytest.fixture(params=[3, None], ids=["packed", "alone"])
def windows(request, documents):
    return Windows(documents, WINDOW, request.param)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(target_states, "SHARD_WINDOWS", 5)


class Target:
    """States that tell token, place and window apart, and a count of calls."""

    def __init__(self, dtype=FLOAT32):
        self.calls, self.dtype = 0, dtype

    def __call__(self, batch):
        self.calls += 1
        assert batch["tokens"].shape == (BATCH, WINDOW)
        place = np.arange(WINDOW)[None, :, None] / 100
        return (batch["tokens"][:, :, None] + place + np.arange(WIDTH) * 1000.0).astype(self.dtype)


def stored(folder, windows, dtype=FLOAT32):
    return TargetStates(folder, windows, WIDTH, np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", jnp.bfloat16])
def test_each_window_has_its_states_and_zeros_behind_them(tmp_path, windows, dtype):
    target = Target(np.dtype(dtype))
    states = stored(tmp_path / "states", windows, dtype)
    states.make(target, BATCH, Deadline())
    assert len(states) == len(windows)
    written = sum(path.stat().st_size for path in (tmp_path / "states").glob("*.states"))
    assert written == states.bytes
    for index in range(len(windows)):
        window, plain = states[index], windows[index]
        kept = window.pop("states")
        assert window.keys() == plain.keys()
        real = int(plain["real"])
        filled = {name: np.repeat(np.asarray(x)[None], BATCH, axis=0) for name, x in plain.items()}
        assert kept.dtype == dtype
        np.testing.assert_array_equal(kept[:real], target(filled)[0][:real])
        assert not kept[real:].any()


def test_an_interrupted_part_is_made_again_and_finished_shards_are_kept(tmp_path, windows, capsys):
    whole, target = stored(tmp_path / "whole", windows), Target()
    whole.make(target, BATCH, Deadline())
    each, folder = target.calls, tmp_path / "states"
    with pytest.raises(OutOfTime, match=r"target states: 1 of \d shards are written"):
        stored(folder, windows).make(Target(), BATCH, StopAfter(1))
    # What a process that was killed leaves.
    (folder / "00001.states").write_bytes(b"half")
    again = Target()
    stored(folder, windows).make(again, BATCH, Deadline())
    assert again.calls == each - 2
    for path in (tmp_path / "whole").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    # Finished, it needs no target; a damaged shard alone is computed again.
    idle = Target()
    stored(folder, windows).make(idle, BATCH, Deadline())
    assert idle.calls == 0
    with (folder / "00000.states").open("r+b") as file:
        file.write(b"x")
    repaired = Target()
    stored(folder, windows).make(repaired, BATCH, Deadline())
    assert repaired.calls == 2
    assert "00000.states cannot be used (its checksum is another) and is computed" in capsys.readouterr().out
    assert (folder / "00000.states").read_bytes() == (tmp_path / "whole" / "00000.states").read_bytes()
    for damage in ("{", "[]", "{}"):
        (folder / "00000.json").write_text(damage)
        repaired.calls = 0
        stored(folder, windows).make(repaired, BATCH, Deadline())
        assert repaired.calls == 2


def test_states_of_another_type_or_of_other_windows_are_not_read(tmp_path, windows, capsys):
    folder, target = tmp_path / "states", Target()
    stored(folder, windows).make(target, BATCH, Deadline())
    calls, target.calls, target.dtype = target.calls, 0, np.dtype("float16")
    stored(folder, windows, "float16").make(target, BATCH, Deadline())
    assert target.calls == calls
    # Documents of the same lengths that were made again, with other tokens.
    other = Documents.open(write_documents(tmp_path / "documents", vocab_size=20))
    again = Windows(other, WINDOW, windows.seed)
    assert len(again) == len(windows)
    stored(folder, again, "float16").make(target, BATCH, Deadline())
    assert target.calls == 2 * calls
    shards = len(list(folder.glob("*.states")))
    reason = "cannot be used (it has states of other windows or of another type)"
    assert capsys.readouterr().out.count(reason) == 2 * shards


def test_several_processes_are_refused(monkeypatch):
    check_bound(1.0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="--cache-target-states is for one process, not 2"):
        check_bound(1.0)


def test_sizes_that_do_not_fit_are_refused_with_both_numbers(tmp_path, windows, monkeypatch):
    states = stored(tmp_path / "work" / "states", windows)
    gib = states.bytes / 2**30
    assert states.check(gib).startswith(f"the target's states of {windows.contents.tokens:,} tokens take ")
    with pytest.raises(ValueError, match=rf"take .* GiB, and --cache-target-states allows {gib / 2:g} GiB"):
        states.check(gib / 2)
    for bound in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="must be above 0 GiB"):
            states.check(bound)
        with pytest.raises(ValueError, match=f"must be above 0 GiB, not {bound}"):
            check_bound(bound)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=states.bytes - 1))
    with pytest.raises(ValueError, match=r"take .* GiB, of which 0 GiB are written, and .* has .* GiB free"):
        states.check(1)
    assert not (tmp_path / "work").exists()
