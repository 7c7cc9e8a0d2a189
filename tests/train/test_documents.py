"""Documents on disk: what was written is what is read, and whatever is wrong is named."""

import itertools
import json
import threading

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from train import documents as documents_module
from train.documents import Documents, Writer
from train.manifest import HELDOUT, MANIFEST, TRAIN, Manifest, Settings, default_heldout, split_indices
from train.records import Document, decode, encode, learn_spans

VOCABULARY = 1000


def settings(count, **changes):
    fields = {
        "mode": "corpus",
        "target": "tiny",
        "vocab_size": VOCABULARY,
        "dtype": None,
        "temperatures": (0.0, 0.8),
        "sampling": {"top_k": [None, 5]},
        "seed": (3, 1),
        "source": "prompts.jsonl",
        "sha256": "abc",
        "count": count,
        "heldout": default_heldout(count),
        "shard_documents": 4,
    }
    return Settings(**{**fields, **changes})


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, count)
    return [Document(rng.integers(0, VOCABULARY, n).astype(np.int32), rng.random(n) < 0.5) for n in sizes]


def write(folder, texts, shards=None, **changes):
    writer = Writer(folder, settings(len(texts), **changes))
    for plan in writer.missing[:shards]:
        writer.write(plan, [texts[i] for i in plan.indices], len(plan.indices) // 2)
    return writer


def same(a, b):
    return np.array_equal(a.tokens, b.tokens) and np.array_equal(a.learn, b.learn)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), max_size=40), st.integers(0, 200)
)
def test_a_record_holds_its_document(pairs, cut):
    document = Document(np.array([t for t, _ in pairs], np.int32), np.array([m for _, m in pairs], bool))
    record = encode(document)
    read = decode(record)
    assert same(read, document)
    assert (read.tokens.dtype, read.learn.dtype) == (np.int32, bool)
    if cut < len(record):
        with pytest.raises(ValueError, match="bytes"):
            decode(record[:cut])
    with pytest.raises(ValueError, match="bytes"):
        decode(record + b"\0")
    with pytest.raises(ValueError, match="version 2"):
        decode(b"\2" + record[1:])


def test_a_record_is_what_the_documentation_says():
    record = encode(Document(np.array([7, 258, 1], np.int32), np.array([False, True, True])))
    assert record == bytes([1, 0, 0, 0, 3, 0, 0, 0, 7, 0, 0, 0, 2, 1, 0, 0, 1, 0, 0, 0, 0b110])


@hypothesis.given(st.lists(st.booleans(), max_size=30))
def test_spans_are_the_runs_of_marks(marks):
    learn = np.array(marks, bool)
    spans = learn_spans(learn)
    rebuilt = np.zeros(len(learn), bool)
    for start, stop in spans:
        assert start < stop
        rebuilt[start:stop] = True
    assert np.array_equal(rebuilt, learn)
    # Runs that touch would be one.
    assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


@hypothesis.given(st.integers(2, 300), st.data())
def test_held_out_documents_are_evenly_spaced(count, data):
    heldout = data.draw(st.integers(0, count - 1))
    split = split_indices(count, heldout)
    assert len(split[HELDOUT]) == heldout
    assert sorted([*split[TRAIN], *split[HELDOUT]]) == list(range(count))
    gaps = np.diff(split[HELDOUT])
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_which_documents_are_held_out():
    assert split_indices(6, 2)[HELDOUT].tolist() == [1, 4]
    assert [default_heldout(n) for n in (1, 2, 15, 16, 512, 10_000)] == [0, 1, 1, 2, 64, 64]


def test_what_was_written_is_read(tmp_path):
    written = texts(21)
    write(tmp_path / "d", written)
    numbers = []
    for split, count in ((TRAIN, 19), (HELDOUT, 2)):
        documents = Documents.open(tmp_path / "d", split)
        assert len(documents) == count
        assert documents.lengths.tolist() == [len(written[i].tokens) for i in documents.numbers]
        for i, number in enumerate(documents.numbers):
            assert same(documents[i], written[number])
            own = documents.spans[documents.spans[:, 0] == i]
            assert own[:, 1:].tolist() == learn_spans(written[number].learn)
        with pytest.raises(IndexError, match=f"has {count} documents"):
            documents[count]
        numbers += documents.numbers.tolist()
    assert sorted(numbers) == list(range(21))
    manifest = Manifest.read(tmp_path / "d")
    assert manifest.settings == settings(21)
    assert sum(shard.tokens for shard in manifest.shards) == sum(len(t.tokens) for t in written)
    assert sum(shard.learn_tokens for shard in manifest.shards) == sum(t.learn.sum() for t in written)
    assert sum(shard.ended or 0 for shard in manifest.shards) == 4 * 2 + 1 + 1


def test_opening_reads_no_shard(tmp_path, monkeypatch):
    write(tmp_path, texts(9))

    def refuse(*_, **__):
        raise AssertionError("a shard was opened")

    monkeypatch.setattr(documents_module.array_record_module, "ArrayRecordReader", refuse)
    assert len(Documents.open(tmp_path)) == 8
    assert len(Documents.open(tmp_path).spans)


def test_several_threads_read_the_same_documents(tmp_path):
    written = texts(40)
    write(tmp_path, written, heldout=0)
    documents, wrong = Documents.open(tmp_path), []

    def read(seed):
        order = np.random.default_rng(seed).permutation(40)
        wrong.extend(i for i in order if not same(documents[int(i)], written[i]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_a_folder_that_was_left_is_gone_on_with(tmp_path, shards):
    written = texts(21)
    write(tmp_path / "whole", written)
    write(tmp_path / "left", written, shards)
    (tmp_path / "left" / "train-00004.array_record.partial").write_bytes(b"half")
    with pytest.raises(ValueError, match=f"is not finished: {6 - shards} shards"):
        Documents.open(tmp_path / "left")
    before = contents(tmp_path / "left")
    writer = write(tmp_path / "left", written)
    assert not writer.missing
    after = contents(tmp_path / "left")
    assert after == contents(tmp_path / "whole")
    kept = [name for name in before if name.endswith(".array_record")]
    assert len(kept) == shards
    assert all(before[name] == after[name] for name in kept)


def test_the_order_of_writing_does_not_show(tmp_path):
    written = texts(21)
    write(tmp_path / "a", written)
    writer = Writer(tmp_path / "b", settings(21))
    for plan in reversed(writer.missing):
        writer.write(plan, [written[i] for i in plan.indices], len(plan.indices) // 2)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_other_settings_are_refused_and_listed(tmp_path):
    write(tmp_path, texts(9), 1)
    with pytest.raises(
        ValueError, match=r"seed: \[3, 1\] there, \[4\] here; shard_documents: 4 there, 5 here"
    ):
        Writer(tmp_path, settings(9, seed=(4,), shard_documents=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0, "heldout": 0}, "at least one prompt"),
        ({"heldout": 9}, r"0\.\.8 can"),
        ({"heldout": -1}, r"0\.\.8 can"),
        ({"shard_documents": 0}, "at least one document"),
    ],
)
def test_counts_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**{"count": 9, **changes})


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    written = texts(9)
    writer = write(tmp_path, written, 1)
    before = contents(tmp_path)
    real = documents_module.array_record_module.ArrayRecordWriter

    class Full(real):
        def close(self):
            super().close()
            raise RuntimeError("no space left")

    monkeypatch.setattr(documents_module.array_record_module, "ArrayRecordWriter", Full)
    plan = writer.missing[0]
    with pytest.raises(OSError, match=f"{plan.file} cannot be written: no space left"):
        writer.write(plan, [written[i] for i in plan.indices], None)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_token_ids_outside_the_vocabulary_are_not_written(tmp_path, token):
    written = texts(9)
    written[2].tokens[-1] = token
    with pytest.raises(ValueError, match=f"document 2 has token id {token}, outside the vocabulary 0..999"):
        write(tmp_path, written)
    assert not Manifest.read(tmp_path).shards


def test_token_ids_outside_the_vocabulary_are_not_read(tmp_path):
    write(tmp_path, [Document(np.array([900], np.int32), np.array([True]))] * 4)
    path = tmp_path / MANIFEST
    path.write_text(path.read_text().replace('"vocab_size": 1000', '"vocab_size": 800'))
    with pytest.raises(ValueError, match=r"train-00000\.array_record has token id 900"):
        Documents.open(tmp_path)[0]


def test_a_manifest_of_another_version_is_refused(tmp_path):
    write(tmp_path, texts(4))
    path = tmp_path / MANIFEST
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    for opening in (lambda: Documents.open(tmp_path), lambda: Writer(tmp_path, settings(4))):
        with pytest.raises(ValueError, match=r"documents\.json is jetspec-documents 2, and this reads .* 1"):
            opening()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "settings": {}}),
        lambda text: json.dumps({**json.loads(text), "shards": [{}]}),
        lambda text: json.dumps({"format": "jetspec-documents", "version": 1}),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, damage):
    write(tmp_path, texts(4))
    path = tmp_path / MANIFEST
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match=r"documents\.json is damaged"):
        Documents.open(tmp_path)


def test_no_documents_and_no_such_split(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no documents\.json"):
        Documents.open(tmp_path)
    write(tmp_path, texts(4))
    with pytest.raises(ValueError, match="train and heldout, not 'test'"):
        Documents.open(tmp_path, "test")


def test_a_missing_or_shorter_shard_is_named(tmp_path):
    write(tmp_path, texts(9))
    shard = tmp_path / "train-00001.array_record"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"train-00001\.array_record is damaged: 131071 bytes instead of"):
        Documents.open(tmp_path)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train-00001\.array_record is missing"):
        Writer(tmp_path, settings(9))


def test_damage_within_a_shard_is_found_when_it_is_read(tmp_path):
    write(tmp_path, texts(9))
    first, second = (tmp_path / f"train-0000{i}.array_record" for i in (0, 1))
    intact = Documents.open(tmp_path)[0]
    data = bytearray(second.read_bytes())
    data[150] ^= 255
    second.write_bytes(data)
    documents = Documents.open(tmp_path)
    assert same(documents[0], intact)
    with pytest.raises(ValueError, match=r"train-00001\.array_record is damaged"):
        list(documents)
    # A sound shard in another's place is found as well.
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"train-00001\.array_record is damaged: \d+ tokens instead of \d+"):
        list(Documents.open(tmp_path))
