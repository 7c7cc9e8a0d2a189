"""Packed windows: full, whole documents, each once an epoch, and the same plan everywhere."""

from itertools import islice

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.train.folders import write
from train.data.documents import Documents
from train.data.packing import pack
from train.data.records import Document
from train.data.windows import Windows, check_enough

WINDOW = 16


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Documents of 1..40 tokens, no token twice and none 0; the answer is the second half."""
    rng, ids = np.random.default_rng(0), iter(range(1, 100_000))
    made = [
        Document(np.array(list(islice(ids, length)), np.int32), np.arange(length) >= length // 2)
        for length in [1, 2, 40, *rng.integers(2, 40, 30)]
    ]
    # Nothing to learn, and only a first token, which nothing precedes.
    made.append(Document(np.array([99_001, 99_002], np.int32), np.zeros(2, bool)))
    made.append(Document(np.array([99_003, 99_004], np.int32), np.array([True, False])))
    folder = tmp_path_factory.mktemp("packed")
    write(folder, made, vocab_size=100_000, heldout=0, shard_documents=8)
    return Documents.open(folder)


def test_the_plan_of_the_docstring():
    packed = pack(np.array([3, 2, 6, 5, 4]), 8, 0)
    assert packed.pieces.tolist() == [2, 1, 3, 0, 4]
    assert packed.first.tolist() == [0, 2, 4, 5]


@hypothesis.given(st.lists(st.integers(1, 24), max_size=60), st.integers(0, 2**32 - 1))
def test_every_piece_has_a_place_and_no_window_overflows(lengths, seed):
    lengths = np.array(lengths, np.int64)
    packed = pack(lengths, 24, seed)
    assert sorted(packed.pieces.tolist()) == list(range(len(lengths)))
    windows = [packed.pieces[a:b] for a, b in zip(packed.first, packed.first[1:], strict=False)]
    used = [int(lengths[own].sum()) for own in windows]
    assert all(0 < tokens <= 24 for tokens in used)
    # Any two windows would overflow together, so at most one is half empty.
    assert sum(tokens <= 12 for tokens in used) <= 1


def test_the_seed_decides_among_equals_and_nothing_else_does():
    lengths = np.full(40, 5)
    plans = [pack(lengths, 16, seed).pieces.tolist() for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]
    # The same numbers on every machine and with every version.
    assert plans[0][:6] == [3, 5, 24, 27, 26, 2]


def test_short_documents_fill_their_windows():
    lengths = np.random.default_rng(0).lognormal(np.log(430), 0.7, 4000).astype(int).clip(8, 2048)
    packed = pack(lengths, 2048, 0)
    assert lengths.sum() / (2048 * (len(packed.first) - 1)) > 0.99


def test_each_token_of_a_kept_document_lies_in_one_window_and_documents_stay_whole(documents):
    windows = Windows(documents, WINDOW, 3)
    alone = Windows(documents, WINDOW)
    pieces = sorted(tuple(w["tokens"][: w["real"]].tolist()) for w in (alone[i] for i in range(len(alone))))
    found, learnt = [], 0
    for i in range(len(windows)):
        window = windows[i]
        tokens, starts, real = window["tokens"], window["starts"], int(window["real"])
        assert (tokens[:real] > 0).all()
        assert not tokens[real:].any()
        assert not window["learn"][real:].any()
        assert (starts[real:] == real).all()
        for start in np.unique(starts[:real]):
            own = np.flatnonzero(starts == start)
            assert own[0] == start
            found.append(tuple(tokens[own].tolist()))
            learnt += int(window["learn"][own].sum())
    assert sorted(found) == pieces
    assert learnt == sum(int(alone[i]["learn"].sum()) for i in range(len(alone)))
    # A document that fits is one piece.
    whole = [tuple(d.tokens.tolist()) for d in documents if len(d.tokens) <= WINDOW and d.learn[1:].any()]
    assert {*whole} <= {*found}
    assert len(windows) < 0.75 * len(alone)


def test_fewer_windows_than_a_batch_are_refused_with_the_remedies(documents):
    windows = Windows(documents, WINDOW, 0)
    check_enough(windows, len(windows))
    with pytest.raises(ValueError, match=rf"leaves {len(windows)} windows .* fit\.batch to at most"):
        check_enough(windows, len(windows) + 1)
    # Unpacked windows repeat within a batch, as they always did.
    check_enough(Windows(documents, WINDOW), 10_000)
