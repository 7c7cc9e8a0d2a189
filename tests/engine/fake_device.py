"""A device made of NumPy: does what a runner does with a batch, and checks that it may.

Its pages hold tokens and, as keys and values would, what each knows of all before it. What a slot says next
is a function of its seed and of all tokens that its pages hold. So a page that is another's, was written
twice, or was read before it was written gives an error or other tokens.

Where pages are not all, each slot also has a sum of its tokens in a place of its own, as a recurrent state
is, and there are places for snapshots of it. A slot that begins behind shared pages must get that sum from a
snapshot before it reads anything.
"""

import zlib

import numpy as np

from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.batch import BatchResult

VOCAB = 997


def sum_of(tokens, before=0):
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), before)


def follow(seed, sequence, count):
    """The tokens that follow a sequence."""
    said, tokens = sum_of(sequence, seed), []
    for _ in range(count):
        tokens.append(said % VOCAB)
        said = sum_of(tokens[-1:], said)
    return tokens


def expected_tokens(request):
    """What a request gets alone."""
    tokens = follow(request.params.seed, request.prompt, request.max_tokens)
    end = next((i + 1 for i, token in enumerate(tokens) if token in request.stop_ids), len(tokens))
    return tokens[:end]


class Slot:
    """What the device knows of a slot."""

    def __init__(self, admission):
        self.pages = admission.pages[admission.pages != NO_PAGE].tolist()
        self.length, self.anchor, self.active = admission.length, admission.anchor, admission.active
        # Whether it has read nothing yet, so that others may still fill pages that it shares.
        self.is_new = True
        self.seed, self.remaining, self.stop_ids = (
            admission.params.seed,
            admission.remaining,
            admission.stop_ids,
        )
        # In its own place, behind shared pages: what another left there.
        self.recurrent = None if admission.length else (0, 0)

    @property
    def room(self):
        return PAGE_SIZE * len(self.pages)


class FakeDevice:
    """Slots over pages of tokens."""

    def __init__(self, size, round_tokens, seed=0, pool=None, *, ahead=False):
        """Takes how much it holds, the most tokens of a round, and a pool whose shared pages stay.

        ``ahead`` is whether batches are decided before it is known which slots have ended.
        """
        self.size, self.round_tokens, self.pool, self.ahead = size, round_tokens, pool, ahead
        self.pages = np.full((size.num_pages, PAGE_SIZE), -1, np.int32)
        self.sums = np.zeros((size.num_pages, PAGE_SIZE), np.uint32)
        self.slots = {}
        # Lengths and sums.
        self.snapshots = [None] * size.snapshots
        self.kept = self.restored = 0
        self.paused = self.batches = 0
        # Names of pages after the batch before that they have kept; those of this one are filled in it.
        self._keys = {}
        if pool is not None:
            evict = pool._evict

            def forgetting():
                page = evict()
                self._keys.pop(page, None)
                return page

            pool._evict = forgetting
        self._rng = np.random.default_rng(seed)

    def run(self, batch):
        """What the rounds did."""
        self.batches += 1
        for slot in batch.releases:
            del self.slots[slot]  # an error if it was told before
        for admission in batch.admissions:
            self.slots.pop(admission.slot, None)
        for admission in batch.admissions:
            assert admission.slot not in self.slots, "admitted twice"
            self.slots[admission.slot] = Slot(admission)
            assert admission.length % PAGE_SIZE == 0
        for slot, pages in batch.growths:
            self._grow(self.slots[slot], pages[pages != NO_PAGE].tolist())
        for number in range(len(batch.chunks) + 1):
            for copy in batch.copies:
                if copy.after == number:
                    self._copy(copy)
            if number < len(batch.chunks):
                self._prefill(batch.chunks[number])
        assert [copy.after for copy in batch.copies] == sorted(copy.after for copy in batch.copies)
        assert all(0 <= copy.after <= len(batch.chunks) for copy in batch.copies)
        for slot in self.slots.values():
            slot.is_new = False
        record = self._decode(batch)
        self._keys = {page: self._named(page) for page in range(self.size.num_pages)}
        return record

    def _grow(self, slot, pages):
        used = -(-slot.length // PAGE_SIZE)
        assert pages[:used] == slot.pages[:used], "moves pages that hold tokens"
        slot.pages = pages

    def _copy(self, copy):
        slot = self.slots[copy.slot]
        if copy.restores:
            assert slot.recurrent is None, "restored, though it knows"
            slot.recurrent = self.snapshots[copy.place]
            assert slot.recurrent[0] == slot.length, "the snapshot of another length"
            self.restored += 1
        else:
            assert slot.recurrent[0] == slot.length, "of tokens that are not all there"
            assert slot.length, "of nothing"
            assert slot.length % PAGE_SIZE == 0, "at no page's end"
            self.snapshots[copy.place] = slot.recurrent
            self.kept += 1

    def _prefill(self, chunk):
        assert chunk.tokens.shape in self.size.chunks
        assert len(set(chunk.slots.tolist())) == len(chunk.tokens)
        assert not (chunk.ready & (chunk.counts == 0)).any()
        used = [
            (self.slots[number], tokens[:count], ready)
            for number, tokens, count, ready in zip(*(part.tolist() for part in chunk), strict=True)
            if count
        ]
        # A forward reads all that it reads before it writes anything.
        read = [sum_of(self._read(slot)) for slot, _, _ in used]
        for (slot, tokens, ready), before in zip(used, read, strict=True):
            assert not slot.active, "prefills what decodes"
            self._write(slot, tokens, before)
            slot.length += len(tokens)
            slot.active = ready

    def _decode(self, batch):
        active = {number for number, slot in self.slots.items() if slot.active}
        if batch.rounds:
            allowed = {*self.size.live, self.size.slots}
            assert len(batch.live) in allowed
            assert sorted(set(batch.live)) == list(batch.live)
            if not self.ahead:
                assert len(batch.live) == min(live for live in allowed if live >= len(active))
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
                committed = self._round(slot, int(self._rng.integers(1, most + 1)))
                row[column, : len(committed)], size[column] = committed, batch.bucket
            if not size.any():
                break
            tokens.append(row)
            sizes.append(size)
        sizes = np.array(sizes, np.int32).reshape(len(tokens), len(batch.live))
        tokens = np.array(tokens, np.int32).reshape(len(tokens), len(batch.live), self.round_tokens)
        depths = np.where(sizes > 0, np.int32(most - 1), np.int32(0))
        return BatchResult(batch, None, tokens, sizes, depths)

    def _round(self, slot, count):
        read = self._read(slot)
        tokens = follow(slot.seed, [*read, slot.anchor], count)
        # What overshoots the request's end is dropped.
        kept = min(count, slot.remaining)
        self._write(slot, [slot.anchor, *tokens][:kept], sum_of(read))
        slot.length += kept
        slot.anchor, slot.remaining = tokens[-1], slot.remaining - count
        slot.active = slot.remaining > 0 and not set(tokens) & set(slot.stop_ids)
        return tokens

    def _named(self, page):
        return None if self.pool is None else self.pool._keys.get(page)

    def _read(self, slot):
        slot.is_new = False
        used = slot.pages[: -(-slot.length // PAGE_SIZE)]
        tokens = self.pages[used].reshape(-1)[: slot.length]
        if len(tokens):
            assert self.sums[used].reshape(-1)[slot.length - 1] == sum_of(tokens), "was written behind others"
        if not self.size.pages_alone:
            assert slot.recurrent == (len(tokens), sum_of(tokens)), "its own place is as for other tokens"
        return tokens

    def _write(self, slot, tokens, before):
        if not self.size.pages_alone:
            slot.recurrent = slot.recurrent[0] + len(tokens), sum_of(tokens, slot.recurrent[1])
        for place, token in enumerate(tokens, slot.length):
            assert place < slot.room, "a token beyond the room"
            page = slot.pages[place // PAGE_SIZE]
            if place % PAGE_SIZE == 0 or place == slot.length:
                if name := self._named(page):
                    assert self._keys.get(page) != name, "writes what is cached"
                others = [other for other in self.slots.values() if page in other.pages and other is not slot]
                assert all(other.is_new for other in others), "writes what others read"
            before = sum_of([token], before)
            self.pages[page, place % PAGE_SIZE], self.sums[page, place % PAGE_SIZE] = token, before
