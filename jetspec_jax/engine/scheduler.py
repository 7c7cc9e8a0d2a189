"""The scheduler: waiting and running requests, slots, pages, and the next batch. It uses no device."""

import functools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.engine.batch import Admission, Batch, BatchResult, Chunk, Growth, Kind, Shape, SlotCopy
from jetspec_jax.engine.compiler import Compiler
from jetspec_jax.engine.pages import PageAllocator, PagePool
from jetspec_jax.engine.policy import BudgetPolicy, LiveSlot
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.size import EngineSize, cut_prompts
from jetspec_jax.sampling.grammar import Matcher
from jetspec_jax.sampling.token_sets import NO_CHOICE

#: A request that more urgent, later requests overtook this often goes first.
MOST_OVERTAKEN = 64
#: Most rounds of a dispatch with a grammar. Such rounds are slower than the measured costs, and each returns
#: to the host anyway, so short dispatches cost little and do not delay waiting requests.
MASKED_ROUNDS = 4


class QueueFull(RuntimeError):
    """The waiting queue is full; the request was not queued, and may be submitted again."""


def check_room(waiting: int, coming: int, most: int) -> None:
    """Raises QueueFull if more than ``most`` would wait; if slots are free, ``waiting`` is negative."""
    if waiting + coming > most:
        beside = f", and {coming} have come" if coming > 1 else ""
        raise QueueFull(
            f"{max(waiting, 0)} requests wait already{beside}; no more than {most} may wait: try again later"
        )


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Requests in the order of service: by priority, then by arrival.

    A preempted request keeps its place, before all of its priority that never had a slot, and counts as
    overtaken by requests that use its pages. A request that was overtaken `MOST_OVERTAKEN` times goes before
    all others, whatever their priority. So no request starves: from then on a finite number is before it,
    and the first request in order is never preempted.
    """

    def rank(request: Request) -> tuple[bool, int, int]:
        starves = request.overtaken >= MOST_OVERTAKEN
        return not starves, 0 if starves else request.priority, request.number

    return sorted(requests, key=rank)


class Scheduler:
    """Schedules requests on slots and a page pool.

    `next_batch` decides a batch; `update` takes the results of the oldest one. They alone, and `drop_closed`,
    assign and free slots and pages. Requests are admitted `in_order`. A request without a slot or pages
    blocks all later ones; so does a request that waits until another has filled pages of their common prefix.
    An admitted request gets the pages of its prompt and one round, and before each dispatch pages for its
    rounds: see `PageAllocator`.

    If batches are ``overlapped``, two are in flight, so a batch is decided before the results of the one
    before are known. The device runs them in order, each on the state that the one before left. Hence:

    * Prefilled tokens count from when they are scheduled. Rounds in flight are known by bounds only: at most
      their deepest paths, and at least a token each, unless the request ends or pauses. Pages are allocated
      for the upper bound. A slot without room for a round pauses on the device, so a lack of pages costs
      time, but no token.
    * A request that ends in flight is in the next batch too. If it ended by itself, its slot is idle there;
      if the caller ended it, it may still commit tokens. Both are dropped, and counted in ``idle_rounds``.
    * Slots, pages and snapshots that are freed get new owners in a later batch, and the device has run all
      earlier ones by then. Pages that a request keeps are only taken beyond the upper bound of its tokens.
    * Keys of cached pages are those of prefilled and fetched tokens; rounds in flight write behind them.
    * A request is preempted only if nothing is in flight, because it resumes from its known tokens. Nothing
      is in flight either while a batch is decided for a request with a grammar: its masks follow from all its
      tokens.
    """

    def __init__(
        self,
        size: EngineSize,
        policy: BudgetPolicy,
        round_tokens: int,
        compiler: Compiler | None = None,
        *,
        overlapped: bool = False,
    ):
        """All slots and pages are free.

        A round commits at most ``round_tokens`` tokens to a slot. Without a ``compiler`` any shape has a
        program. If batches are ``overlapped``, two are in flight, of one round each; else one, of as many
        rounds as the policy chooses.
        """
        self.size, self.policy = size, policy
        self._compiler = compiler
        self._round_tokens, self._overlapped = round_tokens, overlapped
        self._allocator = PageAllocator(size, round_tokens)
        self._requests: list[Request] = []
        self._arrivals = 0
        # Slots that are occupied on the device after all launches.
        self._occupied: set[int] = set()
        # With each batch: the requests that have a slot, and those that it decodes.
        self._in_flight: deque[tuple[Batch, list[Request], list[Request]]] = deque()
        #: Rounds of the last fetched batch for requests that had ended before: one per round and request.
        self.idle_rounds = 0

    @property
    def pool(self) -> PagePool:
        """The page pool. A request that has ended keeps its pages until its last results are there."""
        return self._allocator.pool

    @property
    def requests(self) -> list[Request]:
        """Waiting and running requests, in order of arrival."""
        return [request for request in self._requests if request.open]

    @property
    def has_room(self) -> bool:
        """Whether another batch may be in flight."""
        return len(self._in_flight) < (2 if self._overlapped else 1)

    @property
    def matchers(self) -> dict[int, Matcher]:
        """Grammar matchers of the newest batch's decoding requests, by slot."""
        return _matchers(self._in_flight[-1][2]) if self._in_flight else {}

    def add(self, request: Request, now: float | None = None) -> None:
        """Queues a request that arrives now, by `time.monotonic`.

        Raises ValueError if it can never be served, as it needs more pages than the engine or a slot has.
        """
        for most, holder in (
            (self.size.num_pages, "the engine has"),
            (self.size.pages_per_slot, "a slot can name"),
        ):
            if request.num_pages > most:
                raise ValueError(
                    f"the request needs {request.num_pages} pages for {len(request.prompt)} prompt tokens "
                    f"and max_tokens={request.max_tokens}, and {holder} {most}"
                )
        if not request.arrival:
            request.arrival = time.monotonic() if now is None else now
        request.number, self._arrivals = self._arrivals, self._arrivals + 1
        self._requests.append(request)

    def next_batch(self, now: float | None = None, traced: Request | None = None) -> Batch | None:
        """The next batch: admissions, prefill, and rounds of all decoding requests.

        With a ``traced`` request it has one round of that alone; nothing may be in flight then. None if there
        is nothing to do, or if the batch in flight must be fetched first.
        """
        now = time.monotonic() if now is None else now
        self.drop_closed(now)
        running = in_order(request for request in self._requests if request.slot >= 0)
        if not self.has_room or (self._in_flight and _matchers(running)):
            return None
        admits = self._allocator.make_room(running, preempts=not self._in_flight)
        if admits is None:
            return None
        admitted, chunks, copies = self._admit_and_prefill(running, now, admits=admits)
        due = [each for each in running if (not each.traced if traced is None else each is traced)]
        decoding = [request for request in due if not request.to_prefill]
        waiting = len(self._requests) - len(decoding)
        if all(request.ends_in_flight for request in decoding):
            decoding = []
        if not (decoding or chunks or admitted):
            return None  # slots are released with the next batch
        before, occupied = self._occupied, {request.slot for request in running}
        batch = Batch(
            releases=tuple(sorted(before - occupied)),  # an admission clears the slot itself
            chunks=tuple(chunks),
            kind=Kind.union(Kind.of(request.params) for request in decoding),
            copies=tuple(copies),
        )
        if decoding:
            batch = self._with_rounds(batch, decoding, waiting)
        for request in decoding:
            self._allocator.grow(request, tokens := self._most_tokens(batch))
            request.in_flight_tokens += tokens
        self._in_flight.append((batch, running, decoding))
        self._occupied = occupied
        # With the pages of the rounds.
        admissions = tuple(self._admission(request, length) for request, length in admitted.items())
        table, changed = self._allocator.table, self._allocator.changed() - admitted.keys()
        growths = tuple(Growth(request.slot, table(request)) for request in running if request in changed)
        return batch._replace(admissions=admissions, growths=growths)

    def update(self, result: BatchResult, now: float | None = None) -> list[Request]:
        """Appends the tokens of the oldest batch to their requests; returns the requests that decoded.

        Raises ValueError if a request's logits are not numbers.
        """
        now = time.monotonic() if now is None else now
        batch, running, decoding = self._in_flight.popleft()
        served = [request for request in decoding if request.open]
        self.idle_rounds = len(decoding) - len(served) if self._overlapped else 0
        for request in decoding:
            request.in_flight_tokens -= self._most_tokens(batch)
        for request in served:
            _check_choices(request, result.tokens[:, batch.live.index(request.slot)])
        for request in served:
            _hand_out(request, result, batch.live.index(request.slot), now)
        self._allocator.cache_full_pages(running)
        for request in running:
            if not request.open:
                self._allocator.free(request)
            request.publish()
        if not any(request.traced for request in decoding):
            self.policy.observe(result)
        return served

    def drop_closed(self, now: float | None = None) -> None:
        """Removes requests that have ended, were cancelled, or passed their deadline."""
        now = time.monotonic() if now is None else now
        requests, self._requests = self._requests, []
        for request in requests:
            if request.deadline is not None and request.deadline <= now and request.open:
                request.fail(request.deadline_error(now))
            # Checked once: a request that is cancelled from here on keeps slot and pages until the next one.
            if request.open:
                self._requests.append(request)
                continue
            if request.finish_reason is None:
                request.state = State.CANCELLED
            self._allocator.free(request)

    def _admit_and_prefill(
        self, running: list[Request], now: float, *, admits: bool
    ) -> tuple[dict[Request, int], list[Chunk], list[SlotCopy]]:
        """Admits waiting requests to ``running`` if ``admits``, and prefills.

        Returns the admitted requests with the tokens that their pages already hold, prefill forwards, and
        copies to snapshots and back.
        """
        admitted: dict[Request, int] = {}
        chunks: list[Chunk] = []
        copies: list[SlotCopy] = []
        most = self.size.prefill_tokens
        while True:
            if admits:
                for request in self._admit(running, now):
                    admitted[request] = request.committed
                    place = self._allocator.snapshot_to_restore(request)
                    if place is not None:
                        copies.append(SlotCopy(len(chunks), request.slot, place, restores=True))
            more, kept = self._prefill(running, most)
            if not more:
                return admitted, chunks, copies
            copies += [copy._replace(after=copy.after + len(chunks)) for copy in kept]
            chunks += more
            most = None if most is None else most - sum(int(chunk.counts.sum()) for chunk in more)
            # Forwards run in order: later prompts share the pages that earlier forwards fill.
            self._allocator.cache_full_pages(running)

    def _admit(self, running: list[Request], now: float) -> list[Request]:
        """Gives free slots and pages to waiting requests, in order, and adds them to ``running``."""
        # A request that was cancelled since the last look keeps its slot and pages.
        taken = {request.slot for request in self._requests}
        slots = [slot for slot in range(self.size.slots) if slot not in taken]
        waiting = in_order(request for request in self._requests if request.slot < 0) if slots else ()
        admitted = []
        for slot, request in zip(slots, waiting, strict=False):
            if self._allocator.waits_for_others(request, running):
                break
            if not self._allocator.admit(request, running):
                break
            request.slot = slot
            request.state = State.PREFILLING if request.to_prefill else State.DECODING
            if request.started is None:
                request.started, request.prefix_tokens = now, request.committed
            admitted.append(request)
            running.append(request)
            for other in waiting[len(admitted) :]:
                other.overtaken += other.number < request.number
        return admitted

    def _prefill(self, running: Sequence[Request], most: int | None) -> tuple[list[Chunk], list[SlotCopy]]:
        """Prefill forwards of at most ``most`` tokens, which count as committed from here on; snapshots."""
        prefilling = {request.slot: request for request in in_order(running) if request.to_prefill}
        remaining = {
            slot: request.span(request.committed, request.length - 1) for slot, request in prefilling.items()
        }
        cuts = {
            slot: [PAGE_SIZE * end - request.committed for end in request.cuts]
            for slot, request in prefilling.items()
        }
        shapes = self.size.chunks if self._compiler is None else self._compiler.chunks(self.size.chunks)
        chunks = cut_prompts(remaining, shapes, self.size.slots, most, cuts)
        copies = []
        for number, chunk in enumerate(chunks, 1):
            for slot, count in zip(chunk.slots.tolist(), chunk.counts.tolist(), strict=True):
                if not count:
                    continue
                request = prefilling[slot]
                request.committed += count
                if request.traced:
                    chunk.ready[chunk.slots == slot] = False
                request.state = State.PREFILLING if request.to_prefill else State.DECODING
                place = self._allocator.snapshot_to_keep(request)
                if place is not None:
                    copies.append(SlotCopy(number, slot, place, restores=False))
        return chunks, copies

    def _with_rounds(self, batch: Batch, decoding: Sequence[Request], waiting: int) -> Batch:
        """The batch with rounds of some requests, in the bucket and the number that the policy chooses.

        Some live slots may be idle, as only some numbers of live slots have programs. A slot that reaches the
        end of its pages pauses for the rest of the dispatch.
        """
        if bucket := decoding[0].traced:
            return batch._replace(live=(decoding[0].slot,), bucket=bucket, rounds=1)
        slots = [
            LiveSlot(each.remaining, each.params.temperature > 0, not each.tokens, each.budget)
            for each in decoding
        ]
        shape_of = functools.partial(self._shape, str(batch.kind))
        (live, bucket), rounds = self.policy.choose(slots, waiting, batch.forwards, shape_of)
        rounds = min(rounds, MASKED_ROUNDS) if batch.kind.masked else rounds
        rounds = 1 if self._overlapped else rounds
        busy = {request.slot for request in decoding}
        idle = [slot for slot in range(self.size.slots) if slot not in busy]
        all_live = tuple(sorted([*busy, *idle[: live - len(busy)]]))
        return batch._replace(live=all_live, bucket=bucket, rounds=rounds)

    def _most_tokens(self, batch: Batch) -> int:
        """Most tokens that a batch commits to a slot."""
        return batch.rounds * (1 if batch.bucket == 1 else self._round_tokens)

    def _shape(self, kind: str, live: int, bucket: int) -> Shape:
        """See `Compiler.shape`; a program that is compiled at once is one for all present requests."""
        if self._compiler is None:
            return live, bucket
        coming = self.size.live_for(min(len(self._requests), self.size.slots))
        coming = coming if self.size.allows(coming, bucket) else live
        return self._compiler.shape(kind, live, bucket, coming)

    def _admission(self, request: Request, length: int) -> Admission:
        return Admission(
            request.slot,
            self._allocator.table(request),
            length=length,
            anchor=int(request.span(request.length - 1, request.length)[0]),
            active=length == request.length - 1 and not request.traced,
            params=replace(request.params, stop=(), bad_words=()),
            remaining=request.remaining,
            stop_ids=tuple(sorted(request.stop_ids)),
            budget=request.budget,
            depth=request.depth,
            routing=request.routing,
            adjusting=request.adjusting,
        )


def _matchers(requests: Iterable[Request]) -> dict[int, Matcher]:
    return {request.slot: request.matcher for request in requests if request.matcher is not None}


def _hand_out(request: Request, result: BatchResult, column: int, now: float) -> None:
    """Appends a dispatch's tokens of one slot to its request."""
    ran = np.flatnonzero(result.tree_sizes[:, column])
    rows = (each[ran, column].tolist() for each in (result.tokens, result.tree_sizes, result.tree_depths))
    for number, tokens, size, depth in zip(ran, *rows, strict=True):
        logprobs = result.logprobs and tuple(each[number, column] for each in result.logprobs)
        request.append_round([token for token in tokens if token >= 0], size, logprobs, depth)
    request.advance_grammar()
    if request.first_token is None and request.tokens:
        request.first_token = now
    if request.ended is None and request.finish_reason is not None:
        request.ended = now


def _check_choices(request: Request, tokens: np.ndarray) -> None:
    """Checks that a choice existed in every round of a request.

    A request whose own settings may forbid all tokens fails alone; else the whole dispatch is an error.
    """
    if not (tokens == NO_CHOICE).any():
        return
    if request.params.adjusts or request.matcher is not None:
        form = "" if request.matcher is None else "the grammar, "
        request.fail(
            ValueError(
                f"no token is left to choose: {form}allowed_token_ids, bad_words and min_tokens forbid all, "
                "or the target's logits are not numbers"
            )
        )
    else:
        raise ValueError(
            "the target's logits are not numbers: its weights are damaged, or its hidden states outgrow "
            "their type, as those of models that were trained in bfloat16 may in float16"
        )
