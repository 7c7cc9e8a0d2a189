"""Files that are written whole or not at all, in the place of other files only."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jetspec_jax.checkpoint.files import check_writable, new_folder, replacing, write_json
from jetspec_jax.checkpoint.files import write_text as write


def test_a_file_takes_the_place_of_another(tmp_path):
    path = tmp_path / "new" / "x.json"
    for text in "one", "two":
        write(path, text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_what_is_interrupted_leaves_what_was_there(tmp_path):
    path = tmp_path / "x.json"
    write(path, "one")

    def interrupted():
        with replacing(path) as partial:
            partial.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_are_on_the_disk_before_the_file_gets_its_name(tmp_path, monkeypatch):
    path, events = tmp_path / "x.json", []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("sync"), sync(file)))
    monkeypatch.setattr(Path, "rename", lambda own, to: (events.append(Path(to).name), rename(own, to))[1])
    write_json(path, {"é": [1.5, None]})
    assert events == ["sync", "x.json"]
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": [1.5, None]}


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_no_file_stays(tmp_path, linked):
    path = fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    if linked:
        path = tmp_path / "link"
        path.symlink_to(fifo)
    for attempt in (check_writable, lambda own: write(own, "text")):
        with pytest.raises(OSError, match=f"cannot write {path}: it is no regular file"):
            attempt(path)
        with pytest.raises(OSError, match=f"cannot write {tmp_path}: it is a folder"):
            attempt(tmp_path)
    assert stat.S_ISFIFO(fifo.stat().st_mode)
    assert path.is_symlink() == linked


@pytest.mark.parametrize("there", [False, True])
def test_a_link_stays_and_its_file_is_replaced(tmp_path, there):
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    if there:
        file.write_text("one")
    write(link, "two")
    assert link.is_symlink()
    assert file.read_text() == "two"


def test_a_folder_is_made_only_if_that_is_wanted(tmp_path):
    path = tmp_path / "new" / "er" / "x.json"
    with pytest.raises(OSError, match=f"^cannot write {path}: No such file or directory$"):
        check_writable(path)
    check_writable(path, make_folder=True)
    assert list(path.parent.iterdir()) == []


class TestNewFolder:
    def test_another_process_may_not_write_it_too(self, tmp_path):
        folder = tmp_path / "new"
        with new_folder(folder) as partial:
            (partial / "file").write_text("ours")
            with pytest.raises(FileExistsError, match=f"another process is writing {folder}"):
                new_folder(folder).__enter__()
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
        assert (folder / "file").read_text() == "ours"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755

    def test_what_a_killed_process_left_is_removed(self, tmp_path):
        code = (
            "import os, sys, pathlib\n"
            "from jetspec_jax.checkpoint.files import new_folder\n"
            "with new_folder(pathlib.Path(sys.argv[1])) as partial:\n"
            "    (partial / 'half').write_text('half')\n"
            "    (partial / 'deep').mkdir()\n"
            "    os.kill(os.getpid(), 9)\n"
        )
        folder = tmp_path / "new"
        ran = subprocess.run([sys.executable, "-c", code, str(folder)], check=False)
        assert ran.returncode == -9
        [left] = tmp_path.iterdir()
        assert sorted(path.name for path in left.iterdir()) == ["deep", "half"]
        with new_folder(folder) as partial:
            assert list(partial.iterdir()) == []
            (partial / "file").write_text("whole")
        assert [path.name for path in tmp_path.iterdir()] == ["new"]
        assert [path.name for path in folder.iterdir()] == ["file"]

    def test_a_link_is_not_followed(self, tmp_path):
        kept = tmp_path / "kept"
        kept.mkdir()
        (kept / "notes").write_text("keep")
        (tmp_path / ".new.partial").symlink_to(kept)
        with pytest.raises(OSError, match=r"new\.partial"):
            new_folder(tmp_path / "new").__enter__()
        assert (kept / "notes").read_text() == "keep"
