"""The host's side of decoding: requests wait, get a slot and pages, are prefilled, decode, and leave.

The host launches prefills and a loop of many rounds, then waits for that loop's records. All that depends on
a request travels as arrays, so after a first run nothing compiles.
"""

import functools
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jetspec_jax.cache.stores import NO_PAGE, PagePool
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.settings import PLAIN, TreeSettings, decoders_of, make_decoder
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, SlotSettings
from jetspec_jax.decode.unseen import FEED_ROWS, feeds_for
from jetspec_jax.device.memory import array_bytes
from jetspec_jax.engine.auto_budget import AcceptanceEstimate, AutoBudget, Choice
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.request import Request, TokenIds, check_request
from jetspec_jax.engine.round_costs import round_costs
from jetspec_jax.engine.size import (
    PAGE_SIZE,
    PREFILL_CHUNK,
    EngineSize,
    check_engine_memory,
)
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import (
    Hints,
    tree_buckets,
)
from pallas_kernels.dispatch import gpu_problem

MAX_SLOTS = 8
# Rounds between two looks of the host: enough to hide its work, and, where a slot can end while the loop goes
# on, few enough to see that soon.
ROUNDS_PER_DISPATCH = 64
ROUNDS_TO_AN_END = 16

_log = logging.getLogger("jetspec_jax")


#: Runs up to so many rounds, as `TreeDecoder.decode` does: weights, state (donated), rounds. Afterwards the
#: proposer has seen all of them.
Decode = Callable[[DecodeWeights, DecodeState, np.int32], tuple[DecodeState, RoundRecord]]


class Engine:
    """A fixed number of slots over one pool of pages. An engine belongs to one thread."""

    def __init__(
        self,
        target: Target,
        head: Head | None = None,
        settings: TreeSettings = PLAIN,
        *,
        slots: int = 1,
        capacity: int | None = None,
        num_pages: int | None = None,
        proposer: Proposer | None = None,
        proposer_weights: object = None,
        implementation: str | None = None,
    ):
        """Allocates the stores; compiles nothing yet.

        Args:
            target: The target.
            head: A draft head; None decodes plainly unless a proposer is given.
            settings: The trees.
            slots: Requests that decode at the same time.
            capacity: Tokens that a slot can hold, prompt and output together.
            num_pages: Pages of all slots together; None is enough for every slot to be full.
            proposer: A proposer other than the head's.
            proposer_weights: That proposer's parameters.
            implementation: Of tree attention; None picks the best.

        Raises:
            ValueError: The head does not fit, or a setting is out of its range.
            DeviceMemoryError: The device cannot hold the stores and what a round needs beside them.
        """
        if head is not None:
            proposer_weights = head.weights
        self.decoder = make_decoder(
            target.config,
            None if head is None else head.config,
            settings,
            proposer=proposer,
            implementation=implementation,
        )
        if self.decoder.proposer is None:
            proposer_weights = None
        # With "auto" one for each bucket, from plain decoding up; else only the engine's own.
        self._decoders = decoders_of(self.decoder)
        # Greedy and sampled requests have other shares of their drafts accepted.
        self._acceptance = {
            kind: AcceptanceEstimate(tree_buckets(self.decoder.bucket)) for kind in (False, True)
        }
        self._auto: dict[bool, AutoBudget] = {}
        self.target, self.settings = target, settings
        self.weights = DecodeWeights(target.weights, proposer_weights)
        size = EngineSize.of(target.config, slots, capacity, num_pages)
        check_engine_memory(self.decoder, size, self.dtype)
        self._allocate(size)
        if implementation is None:
            say_which_attention()

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights, and so of the stores."""
        return self.target.weights["embed_tokens"].dtype

    def resize(self, slots: int, capacity: int) -> None:
        """Changes the number of slots and their capacity, while nobody waits or runs.

        Raises:
            RuntimeError: Somebody does.
            ValueError: A setting is out of its range.
            DeviceMemoryError: The device cannot hold it. The engine is as it was, in all three cases.
        """
        if self.busy:
            raise RuntimeError("the engine is in use")
        self._learn()
        size, old = EngineSize.of(self.target.config, slots, capacity), self.size
        check_engine_memory(self.decoder, size, self.dtype, reclaimed=array_bytes(self.state))
        del self.state  # two sets of stores may not fit the device
        try:
            self._allocate(size)
        except BaseException:
            self._allocate(old)
            raise

    def _allocate(self, size: EngineSize) -> None:
        """Makes all slots and pages anew; whatever waited or ran is forgotten."""
        self.state = size.empty_state(self.decoder, self.dtype)
        self.size = size
        self._auto = {}  # what a round costs depends on the size
        self.pool = PagePool(size.num_pages)
        self._free_slots = deque(range(size.slots))
        # Of these, those that are on the device as their last request left them.
        self._left: set[int] = set()
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        # Whether the proposer was shown anything since the last rounds began.
        self._fed = False
        # Launched, but not handed out; and whether the proposer has seen these rounds.
        self._first_tokens: list[tuple[Request, jax.Array]] = []
        self._records: RoundRecord | None = None
        self._seen = True
        # What a dispatch tells, not yet taken in.
        self._untold: Callable[[], None] | None = None

    def submit(self, prompt: TokenIds, params: SamplingParams, routing: Hints | None = None) -> Request:
        """Queues a prompt.

        Args:
            prompt: Its tokens.
            params: How it is sampled and when it stops.
            routing: What is known of it ("task", "mode", "text"), for algorithms that look at that.

        Raises:
            ValueError: The request cannot be served: empty, token ids out of range, too long for the target
                or for a slot, stop strings without a tokenizer, or unknown routing.
        """
        ids = check_request(self.target, prompt, params, capacity=self.size.capacity)
        stop_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.target.eos_token_ids)}
        settings = SlotSettings.of(
            params,
            stop_ids,
            vocab_size=self.target.config.vocab_size,
            budget=self.settings.budget,
            depth=self.decoder.depth if self.settings.depth is None else self.settings.depth,
            routing=routing,
        )
        request = Request(ids, params, settings, Output(params, stop_ids, self.target.tokenizer))
        if request.num_pages > self.pool.num_pages:
            raise ValueError(
                f"the request needs {request.num_pages} pages, and the engine has {self.pool.num_pages}"
            )
        self._waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs that somebody still wants."""
        return not all(request.abandoned for request in [*self._waiting, *self._running])

    def cancel(self, request: Request) -> None:
        """Takes a request out, wherever it is; its slot and pages are free again."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._release(request)

    def complete(
        self,
        prompts: Sequence[TokenIds],
        params: Sequence[SamplingParams],
        routing: Sequence[Hints | None] | None = None,
    ) -> list[Request]:
        """Serves prompts to their ends, with a progress bar on a terminal if it takes a while.

        Raises:
            ValueError: As for `submit`.
        """
        requests = []
        try:
            hints = [None] * len(prompts) if routing is None else routing
            for prompt, own, hint in zip(prompts, params, hints, strict=True):
                requests.append(self.submit(prompt, own, hint))
            with tqdm(total=len(requests), unit=" prompts", delay=2, disable=None, leave=False) as bar:
                for _ in self.run():
                    bar.update(sum(r.output.finish_reason is not None for r in requests) - bar.n)
        except BaseException:
            # Also an interrupt: the next call must not go on with these.
            for request in requests:
                request.abandoned = True
            raise
        return requests

    def run(self) -> Iterator[None]:
        """Serves until nobody waits or runs, yielding after every dispatch."""
        while self.busy:
            self.step()
            yield

    def step(self, rounds: int | None = None, decode: Decode | None = None) -> None:
        """Admits what fits, runs up to ``rounds`` rounds, and hands out their tokens.

        Args:
            rounds: How many, unless all slots end before; None is as many as suit the requests.
            decode: What runs them; None is the decoder's `TreeDecoder.decode`, or with "auto" one of several.
        """
        if decode is None:
            self._prepare_auto()
        if self._records is not None:
            self._hand_out(*self._fetch())  # what a step that was interrupted has launched
        for request in [*self._waiting, *self._running]:
            if request.abandoned:
                self.cancel(request)
        self._admit()
        self._clear()
        if self._waiting and not self._running:
            raise RuntimeError(
                f"only {self.pool.num_free} of {self.pool.num_pages} pages are free while nothing runs"
            )
        left = max([1, *(request.left for request in self._running)])
        if rounds is None:
            rounds = self._usual_rounds(left)
        decoder, learner, choice = self.decoder, None, Choice(0, rounds)
        context, new = self._mean_context(), len(self._first_tokens) / max(len(self._running), 1)
        auto = None
        if decode is None and self._auto:
            auto = self._auto[any(request.params.temperature > 0 for request in self._running)]
            auto.acceptance.begin(new)
            feeds = sum(feeds_for(request.committed - request.seen) for request in self._running)
            choice = auto.choose(context, rounds, left, feeds)
            decoder, learner = self._decoders[choice.bucket], auto if choice.learns else None
        if decode is None and decoder.feeds_late:
            self._make_room(decoder.max_rounds)
            self._seen, decode = False, decoder.decode_unfed
        else:
            self._feed()
            self._seen, decode = True, decode or decoder.decode
        behind, self._fed = self._fed or bool(self._first_tokens), False
        timed = learner is not None and (not behind or learner.wants_time(choice.bucket))
        if behind and timed:
            # Rounds are timed alone, not with what the device is still at.
            jax.block_until_ready((self.state.unseen, self.state.proposer))
        started = time.perf_counter()
        # A NumPy scalar has one type on every call; a Python int is another program than an array.
        self.state, self._records = decode(self.weights, self.state, np.int32(choice.rounds))
        # Of the dispatch before, while the device is at this one; on a GPU, whose loops keep the host until
        # they end, while the records are on their way.
        self._records.packed.copy_to_host_async()
        if self._learn() and auto is not None:
            auto.acceptance.begin(new)  # what was told is of the texts before
        tokens, records = self._fetch()
        if learner is not None:
            seconds = time.perf_counter() - started if timed else None
            self._untold = functools.partial(learner.observe, choice.bucket, context, records, seconds)
        self._hand_out(tokens, records)
        if choice.rounds < rounds:
            self._learn()

    def _usual_rounds(self, left: int) -> int:
        """Rounds of a dispatch that suit the requests, none of which may get more than so many tokens."""
        # A slot that somebody waits for may end among others, and a stop string any.
        among = self._waiting and len(self._running) > 1
        if among or any(request.params.stop for request in self._running):
            return ROUNDS_TO_AN_END
        # What one dispatch can finish is not cut in two.
        return left if left <= self.decoder.max_rounds else ROUNDS_PER_DISPATCH

    def _fetch(self) -> tuple[list[np.ndarray], RoundRecord]:
        """Waits for what was launched: first tokens, and what the rounds did."""
        return jax.device_get(([token for _, token in self._first_tokens], self._records))

    def _hand_out(self, tokens: Sequence[np.ndarray], records: RoundRecord) -> None:
        """Gives requests their tokens; those that end leave."""
        for (request, _), token in zip(self._first_tokens, tokens, strict=True):
            request.output.add_tokens([int(token)])
        self._first_tokens, self._records = [], None
        for request in list(self._running):
            request.collect(records)
            if self._seen:
                request.seen = request.committed
            if request.output.finish_reason is not None:
                self._release(request)

    def _learn(self) -> bool:
        """Takes in what a dispatch told, if one did."""
        untold, self._untold = self._untold, None
        if untold is not None:
            untold()
        return untold is not None

    def _make_room(self, rows: int) -> None:
        """Where so many rows of a slot would overwrite what the proposer has not seen, it sees that first."""
        if self.state.unseen is None:
            return
        most = max((request.committed - request.seen for request in self._running), default=0)
        if most + rows > self.state.unseen.shape[1]:
            self._feed()

    def _feed(self) -> None:
        """Shows the proposer all that it has not seen."""
        if self.state.unseen is None:
            return
        for request in self._running:
            while request.seen < request.committed:
                slot, seen = np.int32(request.slot), np.int32(request.seen)
                self.state = self.decoder.feed(self.weights, self.state, slot, seen)
                request.seen = min(request.seen + FEED_ROWS, request.committed)
                self._fed = True

    def _prepare_auto(self) -> None:
        """For the algorithm "auto" makes what chooses the buckets; measures costs that nobody knows yet."""
        if self._auto or len(self._decoders) == 1:
            return
        # Nobody runs: slots are taken after this, and an engine in use is not resized.
        try:
            costs, self.state = round_costs(
                self._decoders,
                self.weights,
                self.state,
                num_pages=self.size.num_pages,
                page_size=PAGE_SIZE,
                rounds=ROUNDS_PER_DISPATCH,
            )
        except BaseException as error:
            # The state was given away. Frames that hold another go first: two may not fit the device.
            traceback.clear_frames(error.__traceback__)
            self.state = self.size.empty_state(self.decoder, self.dtype)
            raise
        auto = self.decoder.auto
        assert auto is not None, "several decoders are those of auto"
        self._auto = {
            kind: AutoBudget(known, costs, auto.probing) for kind, known in self._acceptance.items()
        }

    def _mean_context(self) -> float:
        """Committed tokens of a running slot."""
        tokens = [len(request.prompt) + len(request.output.token_ids) for request in self._running]
        return sum(tokens) / max(len(tokens), 1)

    def _admit(self) -> None:
        """Gives free slots and pages to waiting requests, in order, and launches their prefills."""
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            pages = self.pool.reserve(request.num_pages)
            if pages is None:
                break
            self._waiting.popleft()
            request.slot, request.pages = self._free_slots.popleft(), pages
            self._running.append(request)
            table = np.full(self.size.pages_per_slot, NO_PAGE, np.int32)
            table[: len(pages)] = pages
            self.state = self.decoder.insert(self.state, np.int32(request.slot), table, request.settings)
            self._left.discard(request.slot)
            self._first_tokens.append((request, self._prefill(request)))

    def _prefill(self, request: Request) -> jax.Array:
        """Launches the prompt's chunks; the first generated token, still on the device."""
        token = None
        for start in range(0, len(request.prompt), PREFILL_CHUNK):
            part = request.prompt[start : start + PREFILL_CHUNK]
            self._make_room(PREFILL_CHUNK)
            self.state, token = self.decoder.prefill_unfed(
                self.weights,
                self.state,
                np.int32(request.slot),
                np.pad(part, (0, PREFILL_CHUNK - len(part))),
                np.int32(len(part)),
                np.bool_(start + PREFILL_CHUNK >= len(request.prompt)),
            )
            request.prefilled += len(part)
        assert token is not None, "check_request lets no empty prompt in"
        return token

    def _release(self, request: Request) -> None:
        """Frees its slot and pages."""
        self._left.add(request.slot)
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self.pool.release(list(request.pages))
        # The next request clears its slot itself, which saves a launch.
        if not self._waiting:
            self._clear()

    def _clear(self) -> None:
        """Tells the device which slots are free."""
        for slot in sorted(self._left):
            self.state = self.decoder.release(self.state, np.int32(slot))
            self._left.remove(slot)


@functools.cache
def say_which_attention() -> None:
    """Logs, once in a process, why the GPU kernels cannot run, if they cannot."""
    if problem := gpu_problem():
        _log.warning("tree attention runs on XLA: %s", problem)
