"""Who waits, who runs, who gets pages, and what the next batch is: the host's decisions, without a device."""

from dataclasses import replace

import numpy as np

from jetspec_jax.cache.slots import NO_PAGE
from jetspec_jax.engine.budget_policy import BudgetPolicy, LiveSlot
from jetspec_jax.engine.chunks import whole_prompts
from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.records import Admission, Batch, DispatchRecord
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.choice import NO_CHOICE
from jetspec_jax.tree.routing import Routing


class Scheduler:
    """Requests in slots over one pool of pages: first come, first served.

    `next_batch` and `take` are called in turn. Pages are reserved for all of a request when it gets its slot.
    Only the requests are kept: which slots and pages are free follows from who holds them, and a request that
    nobody waits for holds nothing.
    """

    def __init__(self, size: EngineSize, policy: BudgetPolicy):
        """All slots and pages are free."""
        self.size, self.policy = size, policy
        self._requests: list[Request] = []
        # Slots that the device believes to be taken.
        self._taken: set[int] = set()
        # The members of the last batch.
        self._members: list[Request] = []

    @property
    def requests(self) -> list[Request]:
        """Those that wait or run, first come first."""
        return [request for request in self._requests if request.open]

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.requests)

    @property
    def pool(self) -> PagePool:
        """The pages that are free now."""
        return _pool(self.size, self.requests)

    @property
    def free_slots(self) -> list[int]:
        """The slots that are free now."""
        return _free_slots(self.size, self.requests)

    @property
    def room(self) -> int:
        """Requests that would get a slot at once."""
        return self.size.slots - len(self.requests)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: It needs more pages than there are.
        """
        if request.num_pages > self.size.num_pages:
            raise ValueError(
                f"the request needs {request.num_pages} pages, and the engine has {self.size.num_pages}"
            )
        self._requests.append(request)

    def cancel(self, request: Request) -> None:
        """Takes a request out, wherever it is; its slot and pages are free again."""
        request.abandoned = True

    def next_batch(self, most_rounds: int | None = None) -> Batch:
        """What the device does next: admissions, their prompts, and rounds for all that decode.

        Args:
            most_rounds: Rounds after which the caller wants to look; None leaves it to the policy.
        """
        # Whoever is abandoned from here on still holds what it has until the next batch.
        self._requests = self.requests
        admitted = self._admit()
        self._members = [request for request in self._requests if request.slot >= 0]
        before, self._taken = self._taken, {request.slot for request in self._members}
        live = [
            LiveSlot(
                request.committed, request.left, request.params.temperature > 0, bool(request.params.stop)
            )
            for request in self._members
        ]
        choice = self.policy.choose(live, len(self._requests) - len(self._members))
        return Batch(
            tuple(sorted(before - self._taken)),  # an admission clears the slot itself
            tuple(self._admission(request) for request in admitted),
            (),
            tuple(
                whole_prompts(
                    {request.slot: request.prompt[:-1] for request in admitted},
                    self.size.chunks,
                    self.size.slots,
                )
            ),
            tuple(range(self.size.slots)),
            choice.bucket,
            choice.rounds if most_rounds is None else min(choice.rounds, most_rounds),
            {own.slot: own.matcher for own in self._members if own.matcher is not None},
        )

    def take(self, dispatch: DispatchRecord) -> list[Request]:
        """Hands out what a batch did. The requests that got something.

        Raises:
            ValueError: A request that runs met logits that are not numbers.
        """
        served = [request for request in self._members if not request.dropped]
        _check_choices(dispatch, [request.slot for request in served])
        for request in served:
            ran = dispatch.tree_sizes[:, request.slot] > 0
            own = dispatch.tokens[ran, request.slot]
            sizes = dispatch.tree_sizes[ran, request.slot].tolist()
            for tokens, count, size in zip(own.tolist(), (own >= 0).sum(axis=1).tolist(), sizes, strict=True):
                request.take_round(tokens[:count], size)
        for request in served:
            request.follow()
        self._members = []
        self.policy.observe(dispatch)
        return served

    def _admit(self) -> list[Request]:
        """Gives free slots and pages to those that wait, in order."""
        waiting = [request for request in self._requests if request.slot < 0]
        if not waiting:
            return []
        slots, pool = _free_slots(self.size, self._requests), _pool(self.size, self._requests)
        admitted = []
        for slot, request in zip(slots, waiting, strict=False):
            pages = pool.reserve(request.num_pages)
            if pages is None:
                break
            request.slot, request.pages = slot, pages
            admitted.append(request)
        return admitted

    def _admission(self, request: Request) -> Admission:
        table = np.full(self.size.pages_per_slot, NO_PAGE, np.int32)
        table[: len(request.pages)] = request.pages
        params, stops = replace(request.params, stop=()), tuple(sorted(request.stop_ids))
        routing = Routing.of_one(None) if request.routing is None else request.routing
        anchor, active = int(request.prompt[-1]), len(request.prompt) == 1
        begins = 0, anchor, active, params, request.max_tokens
        return Admission(request.slot, table, *begins, stops, request.budget, request.depth, routing)


def _pool(size: EngineSize, requests: list[Request]) -> PagePool:
    return PagePool(size.num_pages, (page for request in requests for page in request.pages))


def _free_slots(size: EngineSize, requests: list[Request]) -> list[int]:
    taken = {request.slot for request in requests}
    return [slot for slot in range(size.slots) if slot not in taken]


def _check_choices(dispatch: DispatchRecord, slots: list[int]) -> None:
    """Refuses to hand out anything of a batch that lacks a token for one of these slots."""
    if (dispatch.tokens[:, slots] == NO_CHOICE).any():
        raise ValueError(
            "the target's logits are not numbers: its weights are damaged, or its hidden states outgrow "
            "their type, as those of models that were trained in bfloat16 may in float16"
        )
