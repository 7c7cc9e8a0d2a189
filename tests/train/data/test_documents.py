"""Documents on disk: what was written is what is read, and whatever is wrong is named."""

import itertools
import json
import os
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.train.folders import begin, contents, same, settings, shards_of, write
from train.data import documents as documents_module
from train.data.documents import Documents, Writer
from train.data.holdout import default_heldout, hold_out
from train.data.manifest import HELDOUT, MANIFEST, TRAIN, DocumentsManifest, Shard
from train.data.records import Document, decode, encode, learn_spans


def texts(count, seed=0):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, count)
    return [Document(rng.integers(0, 1000, n).astype(np.int32), rng.random(n) < 0.5) for n in sizes]


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
    # As the documentation says.
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
    held = hold_out(range(count), heldout)
    assert len(held) == heldout
    gaps = np.diff(held)
    assert not len(gaps) or gaps.max() - gaps.min() <= 1
    split = DocumentsManifest(settings(count, heldout=heldout), tuple(held), (("a", count),)).split()
    assert split[HELDOUT].tolist() == held
    assert sorted([*split[TRAIN], *split[HELDOUT]]) == list(range(count))


@hypothesis.given(st.lists(st.integers(0, 12), min_size=2, max_size=120), st.data())
def test_equal_documents_go_to_one_split(keys, data):
    heldout = data.draw(st.integers(1, len(keys) - 1))
    if len(set(keys)) == 1:
        with pytest.raises(ValueError, match=f"all {len(keys)} prompts or texts are equal"):
            hold_out(keys, heldout)
        return
    held = hold_out(keys, heldout)
    inside = {keys[i] for i in held}
    assert held == [i for i, key in enumerate(keys) if key in inside]
    assert 0 < len(held) < len(keys)
    if len(held) > heldout:  # each key has more documents than are wanted
        assert len(inside) == 1
        assert min(map(keys.count, keys)) == len(held)
    elif len(held) < heldout:  # no further key fits
        assert all(keys.count(key) > heldout - len(held) for key in set(keys) - inside)


def test_which_documents_are_held_out():
    assert hold_out("abcdef", 2) == [1, 4]
    assert hold_out("ababcd", 2) == [0, 2]
    # Prompts are spread also where each recurs.
    for keys in np.repeat(np.arange(30), 4), np.tile(np.arange(30), 4):
        assert np.diff(sorted({int(keys[i]) for i in hold_out(keys.tolist(), 12)})).tolist() == [10, 10]
    assert [default_heldout(n) for n in (1, 2, 15, 16, 512, 10_000)] == [0, 1, 1, 2, 64, 64]


@pytest.mark.parametrize("held", [[1, 5], [5, 1, 8], [1, 1, 5], [1, 5, 9], [-1, 1, 5]])
def test_held_out_documents_must_be_there_once(tmp_path, held):
    with pytest.raises(ValueError, match=r"held out|held-out"):
        Writer(tmp_path / "d", settings(9, heldout=3), held)
    assert not (tmp_path / "d").exists()


def test_a_folder_keeps_what_is_held_out(tmp_path):
    written, held = texts(9), [0, 7, 8]
    write(tmp_path, written, held=held)
    for split, numbers in ((HELDOUT, held), (TRAIN, [1, 2, 3, 4, 5, 6])):
        documents = Documents.open(tmp_path, split)
        assert documents.numbers.tolist() == numbers
        assert all(same(documents[i], written[n]) for i, n in enumerate(numbers))
    with pytest.raises(ValueError, match=r"begun with other settings \(other documents are held out\)"):
        begin(tmp_path, 9, [1, 7, 8])


def test_each_document_has_its_source(tmp_path):
    names = [*"aabba", *"bbbb"]
    write(tmp_path, texts(9), held=[0, 3, 4], sources=names)
    raw = json.loads((tmp_path / MANIFEST).read_text())
    assert raw["sources"] == [["a", 2], ["b", 2], ["a", 1], ["b", 4]]
    for split, expected in ((HELDOUT, "aba"), (TRAIN, "abbbbb")):
        assert "".join(Documents.open(tmp_path, split).sources) == expected
    with pytest.raises(ValueError, match="its documents come from other sources"):
        begin(tmp_path, 9, [0, 3, 4], ["a"] * 9)
    with pytest.raises(ValueError, match="the sources have 8 documents instead of 9"):
        begin(tmp_path / "other", 9, [0, 3, 4], names[:8])
    assert not (tmp_path / "other").exists()


def test_a_folder_of_an_earlier_version_goes_on_with_one_source(tmp_path):
    write(tmp_path, texts(9), shards=1)
    raw = json.loads((tmp_path / MANIFEST).read_text())
    del raw["sources"]
    (tmp_path / MANIFEST).write_text(json.dumps(raw))
    write(tmp_path, texts(9), sources=[*"aaaaabbbb"])
    assert Documents.open(tmp_path).sources == ["prompts.jsonl"] * len(Documents.open(tmp_path))


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
        numbers += documents.numbers.tolist()
    assert sorted(numbers) == list(range(21))
    manifest = DocumentsManifest.read(tmp_path / "d")
    assert manifest.settings == settings(21)
    shards = shards_of(tmp_path / "d")
    assert begin(tmp_path / "d", 21).missing == []
    assert sum(shard.tokens for shard in shards) == sum(len(t.tokens) for t in written)
    assert sum(shard.learn_tokens for shard in shards) == sum(t.learn.sum() for t in written)
    assert sum(shard.ended or 0 for shard in shards) == 4 * 2 + 1 + 1


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


def test_other_settings_are_refused_and_listed(tmp_path):
    write(tmp_path, texts(9), 1)
    with pytest.raises(
        ValueError, match=r"seed: \[3, 1\] there, \[4\] here; shard_documents: 4 there, 5 here"
    ):
        begin(tmp_path, 9, seed=(4,), shard_documents=5)


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


@pytest.mark.parametrize("token", [-1, 1000])
def test_token_ids_outside_the_vocabulary_are_not_written(tmp_path, token):
    written = texts(9)
    written[2].tokens[-1] = token
    with pytest.raises(ValueError, match=f"document 2 has token id {token}, outside the vocabulary 0..999"):
        write(tmp_path, written)
    assert not shards_of(tmp_path)


def test_token_ids_outside_the_vocabulary_are_not_read(tmp_path):
    write(tmp_path, [Document(np.array([900], np.int32), np.array([True]))] * 4)
    path = tmp_path / MANIFEST
    path.write_text(path.read_text().replace('"vocab_size": 1000', '"vocab_size": 800'))
    with pytest.raises(ValueError, match=r"train-00000\.array_record has token id 900"):
        Documents.open(tmp_path)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, r"is jetspec-documents 2, and this reads .* 1"),
        ({"settings": {}}, "is damaged"),
        ({"held": [0, 1]}, "is damaged"),
        ({"sources": [["a", 10], ["b", -1]]}, "is damaged: ValueError: the source 'b' has no documents"),
        ("[]", "is damaged"),
        ('{"format": "jetspec-documents", "version": 1}', "is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_named(tmp_path, change, message):
    write(tmp_path, texts(4))
    path = tmp_path / MANIFEST
    path.write_text(
        change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    )
    for opening in (lambda: Documents.open(tmp_path), lambda: begin(tmp_path, 4)):
        with pytest.raises(ValueError, match=rf"documents\.json {message}"):
            opening()


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("array_record", lambda data: data[:-1], "is damaged: 131071 bytes instead of"),
        ("array_record", None, "is missing"),
        ("json", lambda _: b"{}", "is damaged: KeyError: 'index'"),
        (
            "json",
            lambda data: data.replace(b"00001", b"00000"),
            r"is damaged: .* it describes train-00000\.array_record",
        ),
    ],
)
def test_a_lost_shard_is_named_and_can_be_written_again(tmp_path, capsys, name, damage, message):
    written = texts(13)
    write(tmp_path, written)
    before = contents(tmp_path)
    record, damaged = tmp_path / "train-00001.array_record", tmp_path / f"train-00001.{name}"
    data = damaged.read_bytes()
    damaged.unlink()
    if damage:
        damaged.write_bytes(damage(data))
    with pytest.raises(ValueError, match=rf"train-00001\.{name} {message}"):
        Documents.open(tmp_path)
    writer = begin(tmp_path, 13)
    assert [plan.file for plan in writer.missing] == [record.name]
    assert writer.progress == f"{tmp_path}: 3 of 4 shards are written"
    assert capsys.readouterr().out == (
        f"{tmp_path}: missing or damaged, to be written again: {record.name}\n"
    )
    # Until it is written, nothing passes it for finished.
    with pytest.raises(ValueError, match="is not finished: 1 shards are missing"):
        Documents.open(tmp_path)
    write(tmp_path, written)
    assert contents(tmp_path) == before
    assert capsys.readouterr().out == ""


def test_shards_without_a_manifest_are_left_alone(tmp_path):
    write(tmp_path, texts(9))
    (tmp_path / MANIFEST).unlink()
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"has shards and no documents\.json"):
        begin(tmp_path, 9)
    assert contents(tmp_path) == before


def test_a_crash_before_the_description_leaves_the_shard_missing(tmp_path, monkeypatch):
    written = texts(9)
    with monkeypatch.context() as patch:
        patch.setattr(Shard, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path, written)
    assert (tmp_path / "train-00000.array_record").is_file()
    assert len(begin(tmp_path, 9).missing) == 3
    write(tmp_path, written)
    write(tmp_path / "whole", written)
    assert contents(tmp_path / "whole").items() <= contents(tmp_path).items()


def test_bytes_are_on_the_disk_before_files_get_their_names(tmp_path, monkeypatch):
    events = []
    sync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("sync"), sync(file)))
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append(Path(to).name), rename(path, to))[1])
    for shards in (1, None):  # the manifest is not written again
        write(tmp_path, texts(8), shards, heldout=0)
    shards = [f"train-0000{i}.{kind}" for i in range(2) for kind in ("array_record", "json")]
    assert events == [name for file in (MANIFEST, *shards) for name in ("sync", file)]


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
    # What is learnt is not what its description says.
    second.write_bytes(bytes(data[:150] + bytes([data[150] ^ 255]) + data[151:]))
    described = second.with_suffix(".json")
    raw = json.loads(described.read_text())
    raw["index"][0][1][0][0] += 1
    described.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"are not those of train-00001\.json"):
        list(Documents.open(tmp_path))
