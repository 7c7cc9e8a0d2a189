"""The manifest pins the corpus; splits keep a module and its tests together."""

import shutil

import pytest

from train.demo.corpus import (
    HELDOUT,
    LIBRARY,
    TESTS,
    TRAIN,
    CorpusManifest,
    build_manifest,
    kind_of,
    read_corpus,
    split_of,
    unit_of,
)
from train.demo.recipes import DEMO


def test_a_manifest_survives_writing(corpus, tmp_path):
    manifest = build_manifest(corpus, name="tiny", origin="here")
    manifest.write(tmp_path / "m.json")
    assert CorpusManifest.read(tmp_path / "m.json") == manifest


def test_another_corpus_is_refused_and_the_files_are_named(corpus, tmp_path):
    manifest = build_manifest(corpus, name="tiny")
    copy = shutil.copytree(corpus, tmp_path / "Lib")
    (copy / "module1.py").unlink()
    (copy / "module3.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"module1\.py \(missing\), module3\.py \(differs\)"):
        read_corpus(copy, manifest)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_corpus(tmp_path / "nowhere", manifest)


def test_files_that_nobody_writes_are_left_out(tmp_path):
    kept = {"a.py": b"x = 1\n", "encodings/utf_8.py": b"y = 2\n", "pack/__init__.py": b"z = 3\n"}
    left = {
        "copy.py": b"x = 1\n",
        "empty.py": b"\n",
        "latin.py": b"# \xe9\n",
        "null.py": b"\0",
        "site-packages/p.py": b"p = 1\n",
        "encodings/cp437.py": b"decoding_table = (\n)\n",
        "pydoc_data/topics.py": b"topics = {}\n",
        "notes.txt": b"no source\n",
    }
    for name, data in {**kept, **left}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    manifest = build_manifest(tmp_path, name="x")
    assert {source.path for source in manifest.files} == kept.keys()


def test_a_module_and_its_tests_share_a_split():
    assert unit_of("test/test_heapq.py") == unit_of("heapq.py") == "heapq"
    assert unit_of("json/__init__.py") == "json"
    assert split_of("test/test_heapq.py") == split_of("heapq.py") == HELDOUT
    assert kind_of("test/test_heapq.py") == kind_of("idlelib/idle_test/x.py") == TESTS
    assert kind_of("unittest/case.py") == LIBRARY


def test_the_demo_corpus_is_listed_with_its_held_out_modules():
    manifest = CorpusManifest.read(DEMO.manifest_path())
    split = {source.path: source.split for source in manifest.files}
    assert len(split) == len(manifest.files) > 1500
    assert {split[p] for p in ("textwrap.py", "heapq.py", "test/test_textwrap.py")} == {HELDOUT}
    assert all(source.split == split_of(source.path) for source in manifest.files)
    sizes = {kind: sum(s.size for s in manifest.files if s.split == kind) for kind in (TRAIN, HELDOUT)}
    assert 0.02 < sizes[HELDOUT] / sizes[TRAIN] < 0.1
    assert "PSF-2.0" in manifest.licence
