"""Prompts in chunks."""

import numpy as np
import pytest

from jetspec_jax.engine.chunks import cut_prompts

GPU = ((1, 128), (1, 1024), (8, 128))


def prompts(*lengths):
    return {slot: 1000 * slot + np.arange(length, dtype=np.int32) for slot, length in enumerate(lengths)}


def shapes(*lengths, most=None):
    return [chunk.tokens.shape for chunk in cut_prompts(prompts(*lengths), GPU, 9, most)]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((), []),
        ((1,), [(1, 128)]),
        ((300,), [(1, 128)] * 3),
        ((1000,), [(1, 1024)]),
        ((1100,), [(1, 1024), (1, 128)]),
        ((100,) * 8, [(8, 128)]),
        ((20, 20), [(1, 128)] * 2),
        ((120,) * 9, [(8, 128), (1, 128)]),
    ],
)
def test_shapes_take_the_most_for_what_they_cost(lengths, expected):
    assert shapes(*lengths) == expected


def test_a_number_of_tokens_may_not_be_exceeded():
    """But each chunk takes what it can of it, and there is one at least."""
    for most in (1, 100, 129, 1000, 3000):
        chunks = cut_prompts(prompts(700, 50, 2000), GPU, 9, most)
        assert sum(int(chunk.counts.sum()) for chunk in chunks) == min(most, 2750)


@pytest.mark.parametrize("seed", range(5))
def test_all_is_taken_once_and_in_order(seed):
    rng = np.random.default_rng(seed)
    left = prompts(*rng.integers(1, 900, 7))
    menu = [((1, 128), (1, 1024), (7, 128)), ((4, 32),), ((2, 64), (7, 16))][seed % 3]
    got, ready = {slot: [] for slot in left}, []
    for chunk in cut_prompts(left, menu, 7):
        assert chunk.tokens.shape in menu
        assert len(set(chunk.slots.tolist())) == len(chunk.slots)
        assert set(chunk.slots.tolist()) <= set(range(7))
        assert chunk.counts.any()
        for slot, tokens, count, last in zip(*chunk, strict=True):
            assert count or not last
            assert not tokens[count:].any()
            got[slot] += tokens[:count].tolist()
            ready += [int(slot)] if last else []
            assert last == (count > 0 and len(got[slot]) == len(left[slot]))
    assert sorted(ready) == sorted(left)
    assert all(got[slot] == tokens.tolist() for slot, tokens in left.items())
