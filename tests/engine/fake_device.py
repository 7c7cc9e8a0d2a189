"""A device made of NumPy: does what a runner does with a batch, and checks that it may.

Its pages hold tokens, and what a slot says next is a function of its seed and of all tokens that its pages
hold. So a page that is another's, was written twice, or lacks a token gives other tokens.
"""

import zlib

import numpy as np

from jetspec_jax.cache.slots import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.records import DispatchRecord

VOCAB = 997


def follow(seed, sequence, count):
    """The tokens that follow a sequence."""
    said, tokens = zlib.crc32(np.asarray(sequence, np.int32).tobytes(), seed), []
    for _ in range(count):
        tokens.append(said % VOCAB)
        said = zlib.crc32(np.int32(tokens[-1]).tobytes(), said)
    return tokens


def expected_tokens(request):
    """What a request gets alone."""
    tokens = follow(request.params.seed, request.prompt, request.max_tokens)
    end = next((i + 1 for i, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
    return tokens[:end]


class Slot:
    """What the device knows of a slot."""

    def __init__(self, own):
        self.pages = own.pages[own.pages != NO_PAGE].tolist()
        self.length, self.anchor, self.active = own.length, own.anchor, own.active
        self.seed, self.remaining, self.stop_ids = own.params.seed, own.remaining, own.stop_ids

    @property
    def room(self):
        return PAGE_SIZE * len(self.pages)


class FakeDevice:
    """Slots over pages of tokens."""

    def __init__(self, size, round_tokens, seed=0, pool=None):
        """Takes how much it holds, the most tokens of a round, and a pool whose shared pages stay."""
        self.size, self.round_tokens, self.pool = size, round_tokens, pool
        self.pages = np.full((size.num_pages, PAGE_SIZE), -1, np.int32)
        self.slots = {}
        self.paused = self.batches = 0
        self._rng = np.random.default_rng(seed)

    def run(self, batch):
        """What the rounds did."""
        self.batches += 1
        for slot in batch.releases:
            del self.slots[slot]  # an error if it was told before
        for own in batch.admissions:
            self.slots.pop(own.slot, None)
        for own in batch.admissions:
            assert own.slot not in self.slots, "admitted twice"
            self.slots[own.slot] = slot = Slot(own)
            assert own.length % PAGE_SIZE == 0
            assert (self._read(slot) >= 0).all(), "shares what is not written"
        for slot, pages in batch.growths:
            self._grow(self.slots[slot], pages[pages != NO_PAGE].tolist())
        for chunk in batch.chunks:
            self._prefill(chunk)
        return self._decode(batch)

    def _grow(self, slot, pages):
        used = -(-slot.length // PAGE_SIZE)
        assert pages[:used] == slot.pages[:used], "moves pages that hold tokens"
        slot.pages = pages

    def _prefill(self, chunk):
        assert chunk.tokens.shape in self.size.chunks
        assert len(set(chunk.slots.tolist())) == len(chunk.tokens)
        for number, tokens, count, ready in zip(*(part.tolist() for part in chunk), strict=True):
            if not count:
                assert not ready
                continue
            slot = self.slots[number]
            assert not slot.active, "prefills what decodes"
            self._write(slot, tokens[:count])
            slot.length += count
            slot.active = ready

    def _decode(self, batch):
        active = {number for number, slot in self.slots.items() if slot.active}
        if batch.rounds:
            allowed = {*self.size.live, self.size.slots}
            assert len(batch.live) in allowed
            assert len(batch.live) == min(own for own in allowed if own >= len(active))
            assert sorted(set(batch.live)) == list(batch.live)
            assert active
            assert active <= set(batch.live)
        else:
            assert batch.live == ()
        most = 1 if batch.bucket == 1 else self.round_tokens
        tokens, sizes = [], []
        while len(tokens) < batch.rounds:
            row = np.full((len(batch.live), self.round_tokens), -1, np.int32)
            size = np.zeros(len(batch.live), np.int32)
            for column, number in enumerate(batch.live):
                slot = self.slots.get(number)
                if slot is None or not slot.active:
                    continue
                if slot.length + most > slot.room < slot.length + slot.remaining:
                    self.paused += 1
                    continue
                own = self._round(slot, int(self._rng.integers(1, most + 1)))
                row[column, : len(own)], size[column] = own, batch.bucket
            if not size.any():
                break
            tokens.append(row)
            sizes.append(size)
        return DispatchRecord(
            batch.bucket,
            batch.live,
            None,
            np.array(tokens, np.int32).reshape(len(tokens), len(batch.live), self.round_tokens),
            np.array(sizes, np.int32).reshape(len(tokens), len(batch.live)),
        )

    def _round(self, slot, count):
        own = follow(slot.seed, [*self._read(slot), slot.anchor], count)
        # What overshoots the request's end is dropped.
        kept = min(count, slot.remaining)
        self._write(slot, [slot.anchor, *own][:kept])
        slot.length += kept
        slot.anchor, slot.remaining = own[-1], slot.remaining - count
        slot.active = slot.remaining > 0 and not set(own) & set(slot.stop_ids)
        return own

    def _read(self, slot):
        used = slot.pages[: -(-slot.length // PAGE_SIZE)]
        return self.pages[used].reshape(-1)[: slot.length]

    def _write(self, slot, tokens):
        for place, token in enumerate(tokens, slot.length):
            assert place < slot.room, "a token beyond the room"
            page = slot.pages[place // PAGE_SIZE]
            if place % PAGE_SIZE == 0 or place == slot.length:
                holders = [own for own in self.slots.values() if page in own.pages]
                assert holders == [slot], "writes what others read"
                assert self.pool is None or not self.pool.is_shared(page), "writes what is cached"
            self.pages[page, place % PAGE_SIZE] = token
