"""A folder of texts as passages, as entries, and as documents."""

import numpy as np
import pytest

from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from tests.train.folders import read
from train.command import main
from train.data.corpus import PASSAGE, read_passages
from train.data.documents import Documents
from train.data.prompts import Dropped, read_entries

MODULE = "import os\n\n\n" + "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(80))


@pytest.fixture
def corpus(tmp_path):
    """Modules, one with Windows' line ends and a byte-order mark, beside what is no text."""
    folder = tmp_path / "Lib"
    (folder / "test").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "long.py").write_text(MODULE)
    (folder / "test" / "short.py").write_bytes(b"\xef\xbb\xbfdef caf\xc3\xa9():\r\n    pass\r\n")
    (folder / "blank.txt").write_text("\n \n")
    (folder / ".git" / "hidden.py").write_text("x = 1\n")
    (folder / "image.png").write_bytes(b"\x89PNG")
    (folder / "table.bin").write_bytes(b"a\0b")
    return folder


def test_passages_are_whole_lines_of_texts_alone(corpus):
    refused = []
    found = list(read_passages(corpus, refused.append))
    assert [str(error).removeprefix(f"{corpus}/") for error in refused] == [
        "image.png: not UTF-8: invalid start byte at its byte 0",
        "table.bin: not a text: it has a zero byte",
    ]
    *long, (where, short) = found
    assert (where, short) == (f"{corpus}/test/short.py:1", "def café():\n    pass\n")
    assert len(long) > 1
    assert "".join(text for _, text in long) == MODULE
    lines = MODULE.splitlines()
    for where, text in long:
        path, _, number = where.rpartition(":")
        assert path == str(corpus / "long.py")
        assert text.splitlines()[0] == lines[int(number) - 1]
        assert len(text) <= PASSAGE


def test_a_long_line_is_a_passage(tmp_path):
    long = "x" * (PASSAGE + 1)
    (tmp_path / "a.txt").write_text(f"one\n{long}\ntwo")
    found = [text for _, text in read_passages(tmp_path, pytest.fail)]
    assert found == ["one\n", f"{long}\n", "two"]


def test_entries_of_a_folder(corpus, tmp_path):
    dropped = Dropped()
    entries = read_entries(corpus, dropped=dropped)
    assert {entry.kind for entry in entries} == {"text"}
    assert len(dropped.reasons) == 2
    assert read_entries(corpus, 1, dropped=dropped) == entries[:1]
    with pytest.raises(ValueError, match=r"2 rows cannot be used: .*image\.png: not UTF-8"):
        read_entries(corpus)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no entries; it needs files with text"):
        read_entries(tmp_path / "empty")


def test_documents_of_a_folder(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "data --target demo --prompts Lib --mode corpus --heldout 1 --out out"
    assert main(words.split()) == 0
    tokenizer, out = load_tokenizer(DEMO_TARGET), tmp_path / "out"
    texts = [tokenizer.decode(document.tokens.tolist()) for document in read(out)]
    assert texts == [entry.value for entry in read_entries(corpus, dropped=Dropped())]
    documents = Documents.open(out)
    assert set(documents.sources) == {"Lib"}
    assert all(np.all(documents[i].learn[1:]) for i in range(len(documents)))
