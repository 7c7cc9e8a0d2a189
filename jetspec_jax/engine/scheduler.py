"""Who waits, who runs, who gets pages, and what the next batch is: the host's decisions, without a device."""

from collections import deque
from dataclasses import replace

import numpy as np

from jetspec_jax.cache.slots import NO_PAGE
from jetspec_jax.engine.budget_policy import BudgetPolicy, LiveSlot
from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.records import Admission, Batch, BatchRecord, Chunk
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import PREFILL_CHUNK, EngineSize
from jetspec_jax.sampling.choice import NO_CHOICE
from jetspec_jax.tree.routing import Routing


class Scheduler:
    """Requests in slots over one pool of pages: first come, first served.

    `next_batch` and `take` are called in turn. Pages are reserved for all of a request when it gets its slot.
    """

    def __init__(self, size: EngineSize, policy: BudgetPolicy):
        """All slots and pages are free."""
        self.size, self.policy = size, policy
        self.pool = PagePool(size.num_pages)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_slots = deque(range(size.slots))
        # Free here, but on the device as their last request left them.
        self._left: set[int] = set()
        self._prefilled: tuple[Request, ...] = ()

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs that somebody still wants."""
        return not all(request.abandoned for request in [*self.waiting, *self.running])

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: It needs more pages than there are.
        """
        if request.num_pages > self.pool.num_pages:
            raise ValueError(
                f"the request needs {request.num_pages} pages, and the engine has {self.pool.num_pages}"
            )
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Takes a request out, wherever it is; its slot and pages are free again."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.running:
            self._release(request)

    def next_batch(self, most_rounds: int | None = None) -> Batch:
        """What the device does next: admissions, their prompts, and rounds for all that decode.

        Args:
            most_rounds: Rounds after which the caller wants to look; None leaves it to the policy.

        Raises:
            RuntimeError: Nobody runs, and there are no pages for the first that waits.
        """
        for request in [*self.waiting, *self.running]:
            if request.abandoned:
                self.cancel(request)
        admitted = self._admit()
        if self.waiting and not self.running:
            raise RuntimeError(
                f"only {self.pool.num_free} of {self.pool.num_pages} pages are free while nothing runs"
            )
        self._prefilled = tuple(admitted)
        # An admission clears the slot itself.
        releases = tuple(sorted(self._left - {request.slot for request in admitted}))
        self._left.clear()
        live = [
            LiveSlot(
                request.committed, request.left, request.params.temperature > 0, bool(request.params.stop)
            )
            for request in self.running
        ]
        choice = self.policy.choose(live, len(self.waiting))
        return Batch(
            releases,
            tuple(self._admission(request) for request in admitted),
            tuple(chunk for request in admitted for chunk in _chunks(request)),
            choice.bucket,
            choice.rounds if most_rounds is None else min(choice.rounds, most_rounds),
        )

    def take(self, record: BatchRecord) -> list[Request]:
        """Hands out what a batch did; those that end leave. The requests that got something.

        Raises:
            ValueError: A request that runs met logits that are not numbers.
        """
        _check_choices(record, [request.slot for request in self.running])
        for request, token in zip(self._prefilled, record.first_tokens, strict=True):
            request.take([token])
        self._prefilled = ()
        dispatch, served = record.dispatch, list(self.running)
        for request in served:
            ran = dispatch.tree_sizes[:, request.slot] > 0
            own = dispatch.tokens[ran, request.slot]
            sizes = dispatch.tree_sizes[ran, request.slot].tolist()
            for tokens, count, size in zip(own.tolist(), (own >= 0).sum(axis=1).tolist(), sizes, strict=True):
                request.take_round(tokens[:count], size)
            if request.finish_reason is not None:
                self._release(request)
        self.policy.observe(dispatch)
        return served

    def _admit(self) -> list[Request]:
        """Gives free slots and pages to those that wait, in order."""
        admitted = []
        while self.waiting and self._free_slots:
            pages = self.pool.reserve(self.waiting[0].num_pages)
            if pages is None:
                break
            request = self.waiting.popleft()
            request.slot, request.pages = self._free_slots.popleft(), pages
            self.running.append(request)
            admitted.append(request)
        return admitted

    def _admission(self, request: Request) -> Admission:
        table = np.full(self.size.pages_per_slot, NO_PAGE, np.int32)
        table[: len(request.pages)] = request.pages
        params, stops = replace(request.params, stop=()), tuple(sorted(request.stop_ids))
        routing = Routing.of_one(None) if request.routing is None else request.routing
        return Admission(request.slot, table, params, stops, request.budget, request.depth, routing)

    def _release(self, request: Request) -> None:
        self._left.add(request.slot)
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self.pool.release(request.pages)


def _check_choices(record: BatchRecord, slots: list[int]) -> None:
    """Refuses to hand out anything of a batch that lacks a token for one of these slots."""
    if NO_CHOICE in record.first_tokens or (record.dispatch.tokens[:, slots] == NO_CHOICE).any():
        raise ValueError(
            "the target's logits are not numbers: its weights are damaged, or its hidden states outgrow "
            "their type, as those of models that were trained in bfloat16 may in float16"
        )


def _chunks(request: Request) -> list[Chunk]:
    """A prompt in chunks of one size."""
    chunks = []
    for start in range(0, len(request.prompt), PREFILL_CHUNK):
        part = request.prompt[start : start + PREFILL_CHUNK]
        padded = np.pad(part, (0, PREFILL_CHUNK - len(part)))
        chunks.append(Chunk(request.slot, padded, len(part), start + PREFILL_CHUNK >= len(request.prompt)))
    return chunks
