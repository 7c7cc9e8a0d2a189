"""The taps that the proposer has not seen, with a proposer that writes down what it is shown."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache.stores import Slots
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.decode.state import DecodeWeights, SlotSettings
from jetspec_jax.decode.unseen import FEED_ROWS, as_words, empty_rows, feed, from_words, words_of, write_rows
from jetspec_jax.sampling.params import SamplingParams
from tests.decode.oracle import OracleProposer
from tests.decode.tiny import TINY, random_head, random_target

SLOTS, LENGTH, FEATURES, FLOAT32 = 3, 1000, 2, jnp.dtype("float32")


class Notes(OracleProposer):
    """Rows by slot and position."""

    def commit(self, weights, state, taps, slots, count):
        rows = jnp.arange(taps.shape[1])
        # What is not to count would be seen at once: it goes in everywhere else.
        at = jnp.where(rows < count[0], slots.lengths[0] + rows, LENGTH - 1)
        return state.at[slots.rings[0], at].set(taps[0])


def test_every_row_is_shown_once_in_order():
    """Where they lie goes round several times: 640 rows are written to the 384 of a slot."""
    rng = np.random.default_rng(0)
    unseen, lengths = empty_rows(SLOTS, 300, FEATURES, FLOAT32), np.array([7, 40, 3])
    assert unseen.shape == (SLOTS, 3 * FEED_ROWS, FEATURES)
    notes, seen = jnp.zeros((SLOTS, LENGTH, FEATURES)), lengths.copy()
    expected = np.zeros(notes.shape, np.float32)

    def put(slots, new, counts):
        nonlocal unseen
        rows = rng.normal(size=(len(slots), new, FEATURES)).astype(np.float32)
        words = as_words(jnp.asarray(rows))
        unseen = write_rows(unseen, jnp.asarray(slots), words, jnp.asarray(lengths[slots]))
        for slot, own, count in zip(slots, rows, counts, strict=True):
            expected[slot, lengths[slot] : lengths[slot] + count] = own[:count]
            lengths[slot] += count

    for turn in range(4):
        put([0], FEED_ROWS, [5])
        put([2], FEED_ROWS, [90])
        put([0, 1, 2], 64, [64, 10, 0])
        put([0, 1, 2], 64, [3, 0, 64])
        assert (lengths - seen).tolist() == [72, 10, 154]
        slots = Slots.of(jnp.zeros((SLOTS, 1), jnp.int32), jnp.asarray(lengths, jnp.int32))
        # Beyond the last there is nothing.
        for slot, shown in ((0, 0), (2, 0), (1, 0), (2, 128), (2, 256)):
            where = np.int32(slot), np.int32(seen[slot] + shown)
            notes = feed(Notes(64), None, notes, unseen, slots, *where, features=FEATURES, dtype=FLOAT32)
        seen = lengths.copy()
        np.testing.assert_array_equal(notes[:, : LENGTH - 1], expected[:, : LENGTH - 1], err_msg=str(turn))
    assert lengths.max() > 600


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("features", [1, 6, 7])
def test_taps_as_words(dtype, features):
    """Bit for bit, whatever they are: infinities, and numbers that are none."""
    size = jnp.dtype(dtype).itemsize
    bits = np.random.default_rng(0).integers(0, 2 ** (8 * size), (5, 3, features), f"uint{8 * size}")
    words = as_words(jnp.asarray(bits).view(dtype))
    assert (words.shape, words.dtype) == ((5, 3, words_of(features, jnp.dtype(dtype))), jnp.int32)
    assert words.shape[-1] == (features if size == 4 else (features + 1) // 2)
    back = from_words(words, features, jnp.dtype(dtype))
    assert back.dtype == dtype
    np.testing.assert_array_equal(np.asarray(back).view(bits.dtype), bits)


def test_more_than_there_is_room_for():
    unseen = empty_rows(SLOTS, 300, FEATURES, FLOAT32)
    with pytest.raises(ValueError, match=r"500 tokens .* room for 384: take .*unseen_rows=500"):
        write_rows(unseen, jnp.array([0]), jnp.zeros((1, 500, FEATURES), jnp.int32), jnp.array([3]))


def test_more_rounds_than_there_is_room_for():
    """Of one dispatch, whose rounds write one row each."""
    target, head = random_target(TINY, 0), random_head(TINY, 0)
    decoder = TreeDecoder(target.config, DraftHeadProposer(head.config), max_rounds=200)
    size = {"num_pages": 4, "pages_per_slot": 4, "page_size": 64, "dtype": FLOAT32}
    assert decoder.empty_state(1, **size).unseen.shape[1] == 256
    state = decoder.empty_state(1, **size, unseen_rows=100)
    with pytest.raises(ValueError, match=r"200 tokens .* room for 128: take .*unseen_rows=200"):
        decoder.decode(DecodeWeights(target.weights, head.weights), state, np.int32(2))


@pytest.mark.parametrize(("rounds", "feeds"), [(4, 1), (128, 1), (129, 2), (300, 2)])
def test_decode_shows_what_its_rounds_can_have_committed(monkeypatch, rounds, feeds):
    target, head = random_target(TINY, 0), random_head(TINY, 0)
    decoder = TreeDecoder(target.config, DraftHeadProposer(head.config), max_rounds=200)
    shown, feed = [], TreeDecoder.feed
    monkeypatch.setattr(TreeDecoder, "feed", lambda *own: shown.append(int(own[-1])) or feed(*own))
    state = decoder.empty_state(1, num_pages=4, pages_per_slot=4, page_size=64, dtype=FLOAT32)
    decoder.decode(DecodeWeights(target.weights, head.weights), state, np.int32(rounds))
    assert shown == [0, 128][:feeds]


def test_a_plain_decoder_that_observes_keeps_its_records():
    """Their tokens, whatever else is packed with them."""
    target, head = random_target(TINY, 0), random_head(TINY, 0)
    weights, tokens = DecodeWeights(target.weights, head.weights), []
    for observes in (False, True):
        decoder = TreeDecoder(target.config, DraftHeadProposer(head.config), max_rounds=4, observes=observes)
        state = decoder.empty_state(1, num_pages=4, pages_per_slot=4, page_size=64, dtype=FLOAT32)
        settings = SlotSettings.of(SamplingParams(max_tokens=9), (), vocab_size=TINY.vocab_size)
        state = decoder.insert(state, np.int32(0), np.arange(4, dtype=np.int32), settings)
        chunk = np.zeros(32, np.int32), np.int32(3), np.bool_(True)
        state, _ = decoder.prefill(weights, state, np.int32(0), *chunk)
        _, records = decoder.decode(weights, state, np.int32(4))
        assert records.counts.tolist() == [[1]] * 4
        tokens.append(records.tokens.tolist())
    assert tokens[0] == tokens[1]
