"""The queues of what the proposer has not seen, with a proposer that writes down what it is shown."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache import Slots
from jetspec_jax.unseen import FEED_ROWS, Unseen, feed
from tests.decode.oracle import OracleProposer

SLOTS, LENGTH, FEATURES = 3, 1000, 2


class Notes(OracleProposer):
    """Rows by slot and position."""

    def commit(self, weights, state, taps, slots, count):
        rows = jnp.arange(taps.shape[1])
        # What is not to count would be seen at once: it goes in everywhere else.
        at = jnp.where(rows < count[0], slots.lengths[0] + rows, LENGTH - 1)
        return state.at[slots.rings[0], at].set(taps[0])


def make():
    return Unseen.empty(SLOTS, 300, FEATURES, jnp.dtype("float32"))


def test_every_row_is_shown_once_in_order():
    rng = np.random.default_rng(0)
    unseen, lengths = make(), np.array([7, 40, 3])
    assert unseen.taps.shape == (SLOTS, 3 * FEED_ROWS, FEATURES)
    notes = jnp.zeros((SLOTS, LENGTH, FEATURES))
    expected = np.zeros(notes.shape, np.float32)

    def put(slot, rows):
        expected[slot, lengths[slot] : lengths[slot] + len(rows)] = rows
        lengths[slot] += len(rows)

    for turn in range(3):
        for slot, count in ((0, 5), (2, 90)):
            rows = rng.normal(size=(1, FEED_ROWS, FEATURES)).astype(np.float32)
            unseen = unseen.append_to(jnp.int32(slot), jnp.asarray(rows), jnp.array([count]))
            put(slot, rows[0, :count])
        for counts in ((64, 10, 0), (3, 0, 64)):
            rows = rng.normal(size=(SLOTS, 64, FEATURES)).astype(np.float32)
            unseen = unseen.append(jnp.asarray(rows), jnp.array(counts))
            for slot, count in enumerate(counts):
                put(slot, rows[slot, :count])
        assert unseen.counts.tolist() == [72, 10, 154]
        slots = Slots.of(jnp.zeros((SLOTS, 1), jnp.int32), jnp.asarray(lengths, jnp.int32))
        for slot, left in ((0, 0), (2, 26), (1, 0), (2, 0)):
            notes, unseen = feed(Notes(64), None, notes, unseen, slots, np.int32(slot))
            assert unseen.counts[slot] - unseen.shown[slot] == left
        np.testing.assert_array_equal(unseen.counts, 0, err_msg=str(turn))
        np.testing.assert_array_equal(notes[:, : LENGTH - 1], expected[:, : LENGTH - 1])


def test_a_slot_that_changes_hands_has_nothing_to_show():
    unseen = make().append(jnp.ones((SLOTS, 9, FEATURES)), jnp.array([9, 8, 7])).clear(jnp.int32(1))
    assert unseen.counts.tolist() == [9, 0, 7]


def test_more_than_there_is_room_for():
    with pytest.raises(ValueError, match=r"500 tokens .* room for 384: take .*unseen_rows=500"):
        make().append_to(jnp.int32(0), jnp.zeros((1, 500, FEATURES)), jnp.array([3]))
