"""Checksums of a checkpoint's files: every changed bit is noticed, and so is a changed name."""

import hashlib

import pytest

from train.loop.checksums import FILE, ChecksumError, check_checksums, write_checksums, written_name

FILES = {"state/d/ab12": bytes(range(40)), "state/empty": b"", "host/metadata": b'{"data": 6}'}


@pytest.fixture
def folder(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "6" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    write_checksums(tmp_path / "6", "6")
    return tmp_path / "6"


def test_the_format_is_that_of_sha256sum(folder):
    wanted = {f"{hashlib.sha256(content).hexdigest()}  6/{name}" for name, content in FILES.items()}
    assert set((folder / FILE).read_text().splitlines()) == wanted
    assert written_name(folder) == "6"
    check_checksums(folder)


def test_every_byte_counts(folder):
    for name in (*FILES, FILE):
        content = (folder / name).read_bytes()
        for place in range(len(content)):
            changed = bytearray(content)
            changed[place] ^= 1 << place % 8
            (folder / name).write_bytes(changed)
            with pytest.raises(ChecksumError):
                check_checksums(folder)
        (folder / name).write_bytes(content)
    check_checksums(folder)


def test_what_is_wrong_is_named(folder):
    (folder / "state" / "empty").write_bytes(b"x")
    with pytest.raises(ChecksumError, match=r"^state/empty differs from its checksum$"):
        check_checksums(folder)
    (folder / "host" / "metadata").write_bytes(b"")
    with pytest.raises(ChecksumError, match=r"^host/metadata differs .* as do 1 other files$"):
        check_checksums(folder)
    (folder / "host" / "metadata").unlink()
    with pytest.raises(ChecksumError, match=r"^host/metadata is missing$"):
        check_checksums(folder)
    (folder / FILE).write_bytes(b"")
    with pytest.raises(ChecksumError, match="SHA256SUMS does not hold the checksums of one folder"):
        check_checksums(folder)


def test_every_file_is_in_one_part(folder):
    for name in FILES:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"x")
        noticed = 0
        for part in range(4):
            try:
                check_checksums(folder, part=part, parts=4)
            except ChecksumError:
                noticed += 1
        assert noticed == 1
        (folder / name).write_bytes(content)
