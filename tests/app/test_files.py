"""Files that are written whole or not at all, in the place of other files only."""

import os
import stat

import pytest

from jetspec_jax.files import check_writable, replacing


def write(path, text):
    with replacing(path) as partial:
        partial.write_text(text)


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
