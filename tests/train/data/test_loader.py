"""Windows and batches: each once an epoch, in an order that can be left and taken up."""

import json
import threading
from itertools import islice

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.events import until
from tests.train.folders import write
from train.data.documents import Documents
from train.data.loader import batches
from train.data.records import Document, learn_spans
from train.data.windows import Windows, index_windows

WINDOW = 8


def write_folder(path, documents):
    write(path, documents, vocab_size=100_000, heldout=0, shard_documents=3)
    return path


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    """Ten documents of all lengths around the window's; no token occurs twice, and 0 does not occur."""
    ids = iter(range(1, 100_000))
    made = []
    for length in (1, 7, 8, 9, 15, 16, 17, 30, 5, 24):
        learn = np.arange(length) >= length // 3
        made.append(Document(np.array(list(islice(ids, length)), np.int32), learn))
    return Documents.open(write_folder(tmp_path_factory.mktemp("documents") / "d", made))


@pytest.fixture
def opened():
    """A function that makes batches, which are closed at the end with all their threads."""
    made = []

    def make(documents, window, *args, **kwargs):
        made.append(batches(Windows(documents, window), *args, **kwargs))
        return made[-1]

    yield make
    for iterator in made:
        iterator.close()
    until(lambda: not reading_threads(), reading_threads)


def reading_threads():
    """Threads of grain, which end a little later than their iterators."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("grain")]


def rows(batch):
    return [
        (tuple(t), tuple(m)) for t, m in zip(batch["tokens"].tolist(), batch["learn"].tolist(), strict=True)
    ]


def test_windows_are_the_consecutive_parts(tmp_path):
    tokens = np.arange(1, 11, dtype=np.int32)
    learn = np.isin(tokens, (2, 9))
    documents = Documents.open(write_folder(tmp_path, [Document(tokens, learn)]))
    windows = Windows(documents, 4)
    # The middle window has nothing to learn, and the last has it at its first token only.
    assert len(windows) == 1
    assert windows[0]["tokens"].tolist() == [1, 2, 3, 4]
    wide = Windows(documents, 6)
    assert [wide[i]["tokens"].tolist() for i in range(2)] == [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]]
    assert wide[1]["learn"].tolist() == [False, False, True, False, False, False]
    assert (wide[1]["tokens"].dtype, wide[1]["learn"].dtype) == (np.int32, bool)


@hypothesis.given(
    st.lists(st.lists(st.booleans(), min_size=1, max_size=25), min_size=1, max_size=6), st.integers(2, 9)
)
def test_the_index_is_what_looking_at_all_windows_gives(marks, window):
    spans = [(i, *span) for i, own in enumerate(marks) for span in learn_spans(np.array(own, bool))]
    document, start = index_windows(
        np.array([len(own) for own in marks]), np.array(spans, np.int64).reshape(-1, 3), window
    )
    expected = [
        (i, begin)
        for i, own in enumerate(marks)
        for begin in range(0, len(own), window)
        if any(own[begin + 1 : begin + window])
    ]
    assert list(zip(document.tolist(), start.tolist(), strict=True)) == expected


@pytest.mark.parametrize("batch", [1, 3, 5, 40])
def test_every_window_comes_once_an_epoch(documents, opened, batch):
    windows = Windows(documents, WINDOW)
    count = len(windows)
    everything = sorted(
        (tuple(windows[i]["tokens"].tolist()), tuple(windows[i]["learn"].tolist())) for i in range(count)
    )
    assert len(set(everything)) == count > 10
    taken = []
    iterator = opened(documents, WINDOW, batch, seed=3)
    while len(taken) < 3 * count:
        found = next(iterator)
        assert found["tokens"].shape == found["learn"].shape == (batch, WINDOW)
        assert (found["tokens"].dtype, found["learn"].dtype) == (np.int32, bool)
        taken += rows(found)
    epochs = [taken[i * count : (i + 1) * count] for i in range(3)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "every epoch has its own order"


def test_the_seed_decides_the_order(documents, opened):
    first, again, other = (
        [row for batch in islice(opened(documents, WINDOW, 4, seed=seed), 6) for row in rows(batch)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize("taken", [0, 1, 7, 20])
def test_a_position_is_left_and_taken_up(documents, opened, taken):
    iterator = opened(documents, WINDOW, 3, seed=5)
    for _ in range(taken):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    following = [rows(next(iterator)) for _ in range(8)]
    fresh = opened(documents, WINDOW, 3, seed=5)
    fresh.set_state(state)
    assert [rows(next(fresh)) for _ in range(8)] == following
    iterator.set_state(state)
    assert rows(next(iterator)) == following[0]


def test_the_parts_of_two_processes_are_the_batch_of_one(documents, opened):
    whole = opened(documents, WINDOW, 6, seed=2)
    parts = [opened(documents, WINDOW, 3, seed=2, process_index=i, process_count=2) for i in range(2)]
    for _ in range(12):
        expected, halves = next(whole), [next(part) for part in parts]
        for key, value in expected.items():
            np.testing.assert_array_equal(np.concatenate([half[key] for half in halves]), value)


def test_threads_end_with_the_iterator(documents):
    iterator = batches(Windows(documents, WINDOW), 3, seed=0)
    next(iterator)
    assert reading_threads()
    iterator.close()
    until(lambda: not reading_threads(), reading_threads)


def test_nothing_to_learn(tmp_path, documents):
    with pytest.raises(ValueError, match="at least 2 tokens, not 1"):
        Windows(documents, 1)
    write_folder(tmp_path / "unmarked", [Document(np.arange(9, dtype=np.int32), np.arange(9) == 4)])
    with pytest.raises(ValueError, match="holds no heldout documents"):
        Windows(Documents.open(tmp_path / "unmarked", "heldout"), WINDOW)
    with pytest.raises(ValueError, match=r"no window of 4 tokens of its train documents"):
        Windows(Documents.open(tmp_path / "unmarked"), 4)
    assert len(Windows(Documents.open(tmp_path / "unmarked"), 5)) == 1
