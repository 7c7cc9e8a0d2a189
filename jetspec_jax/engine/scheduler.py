"""Who waits, who runs, who gets pages, and what the next batch is: the host's decisions, without a device."""

import time
from collections.abc import Sequence
from dataclasses import replace

from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.engine.budget_policy import BudgetPolicy, Dispatch, LiveSlot
from jetspec_jax.engine.chunks import cut_prompts
from jetspec_jax.engine.holdings import Holdings
from jetspec_jax.engine.line import count_overtaken, in_order
from jetspec_jax.engine.logprobs import by_round
from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.records import Admission, Batch, Chunk, DispatchRecord, Growth, SlotCopy
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.grammar import Matcher
from jetspec_jax.sampling.token_sets import NO_CHOICE

#: Most rounds of a dispatch in which a grammar has a say. They are slower than what is known of rounds, and
#: each returns to the host anyway, so that short dispatches cost little and keep nobody waiting.
MASKED_ROUNDS = 4


class Scheduler:
    """Requests in slots over one pool of pages.

    `next_batch` and `take` are called in turn, and only they give slots and pages, or take them. Requests are
    served in the order of `jetspec_jax.engine.line.rank`: one that finds no slot or too few pages lets nobody
    pass, nor does one that waits until another has filled the pages that both begin with. It gets the pages
    of its prompt and of one round, and before each dispatch those of the rounds to come: see `Holdings`.
    """

    def __init__(self, size: EngineSize, policy: BudgetPolicy, round_tokens: int):
        """All slots and pages are free.

        Args:
            size: How much there is.
            policy: Chooses each dispatch.
            round_tokens: Tokens that a round commits to a slot, at most.
        """
        self.size, self.policy = size, policy
        self._round_tokens = round_tokens
        self._holdings = Holdings(size, round_tokens)
        self._requests: list[Request] = []
        self._arrivals = 0
        # Slots that the device believes to be taken.
        self._taken: set[int] = set()
        # Those of the last batch that have a slot, and those of them that decode.
        self._running: Sequence[Request] = ()
        self._members: Sequence[Request] = ()

    @property
    def pool(self) -> PagePool:
        """The pages; a request that has ended holds its own until the next batch."""
        return self._holdings.pool

    @property
    def requests(self) -> list[Request]:
        """Those that wait or run, first come first."""
        return [request for request in self._requests if request.open]

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return any(request.open for request in self._requests)

    @property
    def free_pages(self) -> int:
        """Pages that are free, or will be in the next batch; cached ones count as free."""
        return self.size.num_pages - len({page for request in self.requests for page in request.pages})

    @property
    def free_slots(self) -> list[int]:
        """The slots that are free, or will be in the next batch."""
        taken = {request.slot for request in self.requests}
        return [slot for slot in range(self.size.slots) if slot not in taken]

    @property
    def matchers(self) -> dict[int, Matcher]:
        """By slot, the grammars of those that decode in the last batch."""
        return {own.slot: own.matcher for own in self._members if own.matcher is not None}

    def add(self, request: Request, now: float | None = None) -> None:
        """Queues a request that comes now, by `time.monotonic`.

        Raises:
            ValueError: It can never be served: it needs more pages than there are, or than a slot can name.
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

    def next_batch(self, most_rounds: int | None = None, now: float | None = None) -> Batch:
        """What the device does next: admissions, their prompts, and rounds for all that decode.

        Args:
            most_rounds: Rounds after which the caller wants to look; None leaves it to the policy.
            now: By `time.monotonic`: for deadlines, and for figures.
        """
        now = time.monotonic() if now is None else now
        self._end(now)
        running = list(in_order(request for request in self._requests if request.slot >= 0))
        admitted, chunks, copies = self._begin(running, now)
        members = [request for request in running if not request.to_prefill]
        others = len(self._requests) - len(members)
        choice = self._choose(members, others, most_rounds)
        before, self._taken = self._taken, {request.slot for request in running}
        self._running, self._members = running, members
        table, changed = self._holdings.table, self._holdings.changed() - admitted.keys()
        return Batch(
            tuple(sorted(before - self._taken)),  # an admission clears the slot itself
            tuple(self._admission(request, length) for request, length in admitted.items()),
            tuple(Growth(request.slot, table(request)) for request in running if request in changed),
            tuple(chunks),
            self._live(members),
            choice.bucket,
            choice.rounds,
            any(request.params.adjusts for request in members),
            any(request.params.logprobs is not None for request in members),
            tuple(copies),
            tuple(sorted(self.matchers)),
        )

    def take(self, record: DispatchRecord, now: float | None = None) -> list[Request]:
        """Hands out what a batch did. The requests that decoded.

        Raises:
            ValueError: A request that runs met logits that are not numbers.
        """
        now = time.monotonic() if now is None else now
        columns = {slot: column for column, slot in enumerate(record.live)}
        served = [request for request in self._members if not request.cancelled]
        for request in served:
            _check_choices(request, record, columns[request.slot])
        for request in served:
            _hand_out(request, record, columns[request.slot], now)
        self._holdings.name(self._running)
        scored = dict(record.scored)
        for request in self._running:
            if request.slot in scored:
                request.take_scores(scored[request.slot])
            if not request.open:
                self._holdings.free(request)
            request.publish()
        if self._members:
            self.policy.observe(record)
        self._running = self._members = ()
        return served

    def drop_closed(self) -> None:
        """Lets go of requests that are over, while nothing is in flight."""
        self._end(time.monotonic())

    def _end(self, now: float) -> None:
        """Lets go of those that nobody waits for, or whose time is over."""
        everyone, self._requests = self._requests, []
        for request in everyone:
            if request.deadline is not None and request.deadline <= now and request.open:
                request.fail(request.too_late(now))
            # Asked once: a request that is cancelled from here on keeps slot and pages until the next batch.
            if request.open:
                self._requests.append(request)
            else:
                self._holdings.free(request)

    def _begin(
        self, running: list[Request], now: float
    ) -> tuple[dict[Request, int], list[Chunk], list[SlotCopy]]:
        """Makes room for those that run, admits others, who join them, and prefills.

        Returns:
            Those that were admitted, with the tokens that their pages hold already; forwards of prompts; and
            copies of what slots keep, to snapshots and back.
        """
        admitted: dict[Request, int] = {}
        chunks: list[Chunk] = []
        copies: list[SlotCopy] = []
        has_room, left = self._holdings.make_room(running), self.size.prefill_tokens
        while True:
            if has_room:
                for request in self._admit(running, now):
                    admitted[request] = request.committed
                    place = self._holdings.restored_from(request)
                    if place is not None:
                        copies.append(SlotCopy(len(chunks), request.slot, place, restores=True))
            more, kept = self._prefill(running, left)
            if not more:
                return admitted, chunks, copies
            copies += [copy._replace(after=copy.after + len(chunks)) for copy in kept]
            chunks += more
            left = None if left is None else left - sum(int(chunk.counts.sum()) for chunk in more)
            # Forwards run in order: prompts that begin alike share what the ones before them fill.
            self._holdings.name(running)

    def _admit(self, running: list[Request], now: float) -> list[Request]:
        """Gives free slots and pages to those that wait, in order; they join the running."""
        taken = {request.slot for request in running}
        slots = [slot for slot in range(self.size.slots) if slot not in taken]
        line = in_order(request for request in self._requests if request.slot < 0) if slots else ()
        admitted = []
        for slot, request in zip(slots, line, strict=False):
            if self._holdings.waits_for_others(request, running):
                break
            if not self._holdings.admit(request, running):
                break
            request.slot = slot
            if request.started is None:
                request.started, request.prefix_tokens = now, request.committed
            admitted.append(request)
            running.append(request)
            count_overtaken(request, line[len(admitted) :])
        return admitted

    def _prefill(self, running: Sequence[Request], most: int | None) -> tuple[list[Chunk], list[SlotCopy]]:
        """Forwards for so many tokens of prompts, which count as committed from here on; and snapshots."""
        prefilling = {request.slot: request for request in in_order(running) if request.to_prefill}
        left = {
            slot: request.span(request.committed, request.length - 1) for slot, request in prefilling.items()
        }
        cuts = {
            slot: [PAGE_SIZE * end - request.committed for end in request.cuts]
            for slot, request in prefilling.items()
        }
        chunks = cut_prompts(left, self.size.chunks, self.size.slots, most, cuts)
        copies = []
        for number, chunk in enumerate(chunks, 1):
            for slot, count in zip(chunk.slots.tolist(), chunk.counts.tolist(), strict=True):
                if not count:
                    continue
                request = prefilling[slot]
                request.committed += count
                place = self._holdings.kept_in(request)
                if place is not None:
                    copies.append(SlotCopy(number, slot, place, restores=False))
        return chunks, copies

    def _choose(self, members: Sequence[Request], others: int, most_rounds: int | None) -> Dispatch:
        """The policy's choice, with pages for all its rounds as far as there are pages.

        A slot that reaches the end of its pages pauses for the rest of the dispatch.
        """
        if not members:
            return Dispatch(1, 0)
        bucket, rounds = self.policy.choose([_live_slot(request) for request in members], others)
        rounds = rounds if most_rounds is None else min(rounds, most_rounds)
        if any(request.matcher is not None for request in members):
            rounds = min(rounds, MASKED_ROUNDS)
        tokens = rounds * (1 if bucket == 1 else self._round_tokens)
        for request in members:
            self._holdings.grow(request, tokens)
        return Dispatch(bucket, rounds)

    def _live(self, members: Sequence[Request]) -> tuple[int, ...]:
        """The slots of those that decode, and idle ones up to a number for which there is a program."""
        if not members:
            return ()
        slots = {request.slot for request in members}
        idle = [slot for slot in range(self.size.slots) if slot not in slots]
        padding = self.size.live_for(len(slots)) - len(slots)
        return tuple(sorted([*slots, *idle[:padding]]))

    def _admission(self, request: Request, length: int) -> Admission:
        return Admission(
            request.slot,
            self._holdings.table(request),
            length=length,
            anchor=int(request.span(request.length - 1, request.length)[0]),
            active=length == request.length - 1,
            params=replace(request.params, stop=(), bad_words=()),
            remaining=request.left,
            stop_ids=tuple(sorted(request.stop_ids)),
            budget=request.budget,
            depth=request.depth,
            routing=request.routing,
            adjusting=request.adjusting,
            scored=request.scored,
            output=() if request.matcher is None else tuple(request.tokens),
        )


def _live_slot(request: Request) -> LiveSlot:
    return LiveSlot(
        request.committed,
        request.left,
        sampled=request.params.temperature > 0,
        watched=bool(request.params.stop),
        fresh=not request.tokens,
        budget=request.budget,
    )


def _hand_out(request: Request, record: DispatchRecord, column: int, now: float) -> None:
    """Gives a request what the rounds of a dispatch committed to its slot."""
    ran = record.tree_sizes[:, column] > 0
    own = record.tokens[ran, column]
    sizes = record.tree_sizes[ran, column].tolist()
    counts, told = (own >= 0).sum(axis=1).tolist(), by_round(record.logprobs, ran, column)
    for tokens, count, size, logprobs in zip(own.tolist(), counts, sizes, told, strict=True):
        request.take_round(tokens[:count], size, logprobs)
    request.follow()
    if request.first_token is None and request.tokens:
        request.first_token = now
    if request.ended is None and request.finish_reason is not None:
        request.ended = now


def _check_choices(request: Request, record: DispatchRecord, column: int) -> None:
    """Refuses to hand out anything of a dispatch that lacks a token; a request that may forbid all, fails."""
    if not (record.tokens[:, column] == NO_CHOICE).any():
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
