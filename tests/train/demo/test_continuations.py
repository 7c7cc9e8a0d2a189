"""Beginnings of documents in a corpus: they are lines, and the held-out ones are not those of training."""

import numpy as np
import pytest

from train.demo.continuations import cut_corpus, cut_splits


def test_corpus_prompts_begin_at_lines_and_fill_the_documents():
    rng = np.random.default_rng(0)
    stream = rng.integers(10, 64, 400).astype(np.uint16)
    stream[::7] = 3
    cuts = cut_corpus(stream, np.array([3]), count=8, prompt=(2, 5), temperatures=(0.0, 1.0), seed=(4,))
    chosen = cuts.prompts(20)
    text = stream.tolist()
    for prompt in chosen.tokens:
        assert 2 <= len(prompt) <= 5
        assert any(
            text[i - 1] == 3 and text[i : i + len(prompt)] == prompt.tolist() for i in range(1, len(text))
        )
    assert {own.temperature for own in chosen.params} == {0.0, 1.0}
    with pytest.raises(ValueError, match="no line of the corpus has"):
        cut_corpus(stream, np.array([3]), count=1, prompt=(2, 500), temperatures=(0.0,), seed=(4,))


def test_held_out_cuts_come_from_the_other_stream_and_have_prompts_of_their_own():
    rng = np.random.default_rng(0)
    streams = [rng.integers(low, low + 20, 300).astype(np.uint16) for low in (10, 40)]
    streams[1][:150] = streams[0][:150]  # what is in both is for training only
    for stream in streams:
        stream[::3] = 3
    settings = {"prompt": (1, 3), "temperatures": (0.0, 1.0), "seed": (4,)}
    cuts = cut_splits(*streams, np.array([3]), count=80, heldout=20, **settings)
    assert list(cuts.held_indices) == list(range(60, 80))
    asked, texts = cuts.prompts(12), cuts.documents(12)
    keys = [tokens.tobytes() for tokens in asked.tokens]
    assert len(keys) == len(asked.params) == len(texts) == 80
    assert not {*keys[:60]} & {*keys[60:]}
    for i, (prompt, text) in enumerate(zip(asked.tokens, texts, strict=True)):
        assert text.tokens[: len(prompt)].tolist() == prompt.tolist()
        assert np.array_equal(text.learn, np.arange(len(text.tokens)) >= len(prompt))
        own, size = streams[i >= 60].tolist(), len(text.tokens)
        assert any(own[j : j + size] == text.tokens.tolist() for j in range(len(own)))
    again = cut_splits(*streams, np.array([3]), count=80, heldout=20, **settings)
    assert [tokens.tobytes() for tokens in again.prompts(12).tokens] == keys
    same = np.tile(np.array([3, 7, 7], np.uint16), 10)
    with pytest.raises(ValueError, match="of 80 prompts for 20 held-out documents only 0 are none of"):
        cut_splits(same, same, np.array([3]), count=80, heldout=20, **settings)
