"""Which parts of which prompts one forward takes in."""

import numpy as np
import pytest

from jetspec_jax.engine.size import chunks_for, cut_prompts

SHAPES = ((1, 128), (1, 1024), (8, 128))


def prompts_of(*lengths):
    """By slot; no two tokens are equal."""
    rng = np.random.default_rng(0)
    slots = rng.permutation(len(lengths) + 3)[: len(lengths)].tolist()
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.int32)
    return dict(zip(slots, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True))


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((1,), (1, 128)),
        ((128,), (1, 128)),
        ((300,), (1, 128)),
        ((700,), (1, 1024)),
        ((5000,), (1, 1024)),
        ((100, 100), (1, 128)),
        ((128,) * 4, (8, 128)),
        ((5000,) * 8, (1, 1024)),
        ((3,) * 8, (8, 128)),
    ],
)
def test_the_shape_that_takes_most_for_its_cost(lengths, shape):
    remaining = prompts_of(*lengths)
    chunk = cut_prompts(remaining, SHAPES, 11)[0]
    assert chunk.tokens.shape == shape
    assert chunk.slots.tolist()[: len(lengths)] == list(remaining)[: shape[0]]


@pytest.mark.parametrize("lengths", [(1,), (129, 5, 1024), (40,) * 9, (2000, 1, 300, 128, 128, 7, 9, 700)])
def test_prompts_come_whole_and_in_order(lengths):
    remaining, seen = prompts_of(*lengths), {}
    for chunk in cut_prompts(remaining, SHAPES, len(lengths) + 8):
        assert len(set(chunk.slots.tolist())) == len(chunk.slots)
        assert chunk.counts.any()
        for slot, tokens, count, ready in zip(*chunk, strict=True):
            assert not tokens[count:].any()
            assert not (ready and not count)
            if count:
                prefilled = seen.setdefault(int(slot), [])
                prefilled += tokens[:count].tolist()
                assert ready == (len(prefilled) == len(remaining[int(slot)]))
    assert seen == {slot: tokens.tolist() for slot, tokens in remaining.items()}


@pytest.mark.parametrize("most", [1, 100, 129, 1000, 3000])
def test_no_more_than_so_many_tokens_are_taken(most):
    """First of those who came first."""
    remaining = prompts_of(700, 50, 2000)
    chunks = cut_prompts(remaining, SHAPES, 11, most)
    taken = dict.fromkeys(remaining, 0)
    for chunk in chunks:
        for slot, count, ready in zip(*(array.tolist() for array in chunk[:1] + chunk[2:]), strict=True):
            taken[slot] = taken.get(slot, 0) + count
            assert not count or ready == (taken[slot] == len(remaining[slot]))
    counts = [taken[slot] for slot in remaining]
    assert sum(counts) == min(most, 2750)
    assert counts == sorted(counts, key=bool, reverse=True)


def test_forwards_end_at_cuts():
    """And nowhere else that they would not end anyway; what comes behind a cut is not later than others."""
    remaining = prompts_of(300, 70, 40)
    first, second, third = remaining
    chunks = cut_prompts(remaining, ((1, 128), (2, 64)), 6, cuts={first: [64, 256], second: [64]})
    ends = {slot: [] for slot in remaining}
    taken = dict.fromkeys(remaining, 0)
    for chunk in chunks:
        for slot, count, ready in zip(*(array.tolist() for array in chunk[:1] + chunk[2:]), strict=True):
            if count:
                taken[slot] += count
                ends[slot].append(taken[slot])
                assert ready == (taken[slot] == len(remaining[slot]))
    assert ends == {first: [64, 192, 256, 300], second: [64, 70], third: [40]}


def test_usual_shapes():
    """None has more prompts than there are slots, and a CPU compiles one program."""
    for slots in (1, 7, 8, 64):
        assert chunks_for(slots, gpu=False) == ((1, 128),)
        shapes = chunks_for(slots, gpu=True)
        assert all(prompts <= slots for prompts, _ in shapes)
        assert (1, 1024) in shapes
    assert (8, 128) in shapes
