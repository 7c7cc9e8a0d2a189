"""The host's side of decoding: requests wait, get a slot and pages, are prefilled, decode, and leave.

The host waits once per dispatch: it launches prefills and a loop of many rounds, then fetches that loop's
records. All that depends on a request travels as arrays, so after the first request nothing compiles.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from jetspec_jax.cache import PagePool
from jetspec_jax.checkpoint import Head, Target
from jetspec_jax.completion import Output
from jetspec_jax.config import ModelConfig, check_head_fits
from jetspec_jax.decode import TreeDecoder
from jetspec_jax.proposer import DraftHeadProposer, Proposer
from jetspec_jax.sampling import Sampling, SamplingParams
from jetspec_jax.state import DecodeWeights, RoundRecord, SlotSettings
from jetspec_jax.tree import bucket_for, check_algorithm

MAX_SLOTS = 8
PAGE_SIZE = 64
PREFILL_CHUNK = 128
# Rounds between two looks of the host: enough to hide its work, few enough to free a finished slot soon.
ROUNDS_PER_DISPATCH = 16
# Tokens that a slot can hold unless a request needs more: most requests then share their programs.
DEFAULT_CAPACITY = 1024


@dataclass(frozen=True)
class TreeSettings:
    """The trees of a run, checked against what the models can do.

    Attributes:
        budget: Most nodes, root included; 1 is plain decoding.
        width: Most children of a node.
        depth: Largest depth; None is all that the proposer drafts.
        algorithm: Name of the tree algorithm.
    """

    budget: int = 128
    width: int = 7
    depth: int | None = None
    algorithm: str = "accum_logp"

    def check(self, target: ModelConfig, max_depth: int | None) -> None:
        """Raises ValueError naming the setting that is out of range; no head, no bound on the depth."""
        check_algorithm(self.algorithm)
        for name, value, most in (
            ("budget", self.budget, None),
            ("width", self.width, target.vocab_size),
            ("depth", self.depth, max_depth),
        ):
            if value is None and name == "depth":
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool):
                raise ValueError(f"{name} must be an integer, not {value!r}")
            if most is not None and not 1 <= value <= most:
                raise ValueError(f"{name} must lie in 1..{most}, not {value}")
        bucket_for(self.budget)


PLAIN = TreeSettings(budget=1)


@dataclass(eq=False)
class Request:
    """A prompt on its way through the engine.

    Attributes:
        prompt: Its tokens.
        params: How it is sampled and when it stops.
        output: What it has got so far.
    """

    prompt: np.ndarray
    params: SamplingParams
    output: Output
    slot: int = -1
    pages: Sequence[int] = ()


class Engine:
    """A fixed number of slots over one pool of pages."""

    def __init__(
        self,
        target: Target,
        head: Head | None = None,
        settings: TreeSettings = PLAIN,
        *,
        slots: int = 1,
        capacity: int | None = None,
        proposer: Proposer | None = None,
        proposer_weights: object = None,
    ):
        """Allocates the stores; compiles nothing yet.

        Args:
            target: The target.
            head: A draft head; None decodes plainly unless a proposer is given.
            settings: The trees.
            slots: Requests that decode at the same time.
            capacity: Tokens that a slot can hold, prompt and output together.
            proposer: A proposer other than the head's.
            proposer_weights: That proposer's parameters.

        Raises:
            ValueError: The head does not fit, or a setting is out of its range.
        """
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, not {slots}")
        if head is not None:
            check_head_fits(head.config, target.config)
            proposer, proposer_weights = DraftHeadProposer(head.config), head.weights
        if proposer is not None:
            settings.check(target.config, proposer.depth)
        if settings.budget == 1:
            # No tree has a use for drafts: decode without the head and its context.
            proposer, proposer_weights = None, None
        self.target, self.settings, self.slots = target, settings, slots
        self.capacity = capacity or default_capacity(target.config, 0)
        self.decoder = TreeDecoder(
            target.config, proposer, bucket_for(settings.budget), settings.width, settings.algorithm
        )
        self.weights = DecodeWeights(target.weights, proposer_weights)
        pages_per_slot = -(-self.capacity // PAGE_SIZE)
        self.pool = PagePool(slots * pages_per_slot)
        self._pages_per_slot = pages_per_slot
        self.state = self.decoder.empty_state(
            slots,
            num_pages=self.pool.num_pages,
            pages_per_slot=pages_per_slot,
            page_size=PAGE_SIZE,
            dtype=target.weights["embed_tokens"].dtype,
        )
        self._free_slots = deque(range(slots))
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> Request:
        """Queues a prompt.

        Raises:
            ValueError: The request cannot be served: empty, token ids out of range, too long for the target
                or for a slot, or stop strings without a tokenizer.
        """
        check_request(self.target, prompt, params, capacity=self.capacity)
        stop_ids = {
            *params.stop_token_ids,
            *(() if params.ignore_eos else self.target.eos_token_ids),
        }
        output = Output(params, stop_ids, self.target.tokenizer)
        request = Request(np.asarray(prompt, np.int32), params, output)
        self._waiting.append(request)
        return request

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def cancel(self, request: Request) -> None:
        """Takes a request out, wherever it is; its slot and pages are free again."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._release(request)

    def complete(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[Request]:
        """Serves prompts to their ends, with a progress bar on a terminal if it takes a while.

        Raises:
            ValueError: As for `submit`.
        """
        requests = [self.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        with tqdm(total=len(requests), unit=" prompts", delay=2, disable=None, leave=False) as bar:
            for _ in self.run():
                bar.update(sum(r.output.finish_reason is not None for r in requests) - bar.n)
        return requests

    def run(self) -> Iterator[None]:
        """Serves until nobody waits or runs, yielding after every dispatch."""
        while self.busy:
            self.step()
            yield

    def step(self, rounds: int = ROUNDS_PER_DISPATCH) -> None:
        """Admits what fits, runs up to ``rounds`` rounds, and hands out their tokens."""
        first_tokens = self._admit()
        if self._waiting and not self._running:
            raise RuntimeError(
                f"only {self.pool.num_free} of {self.pool.num_pages} pages are free while nothing runs"
            )
        # A NumPy scalar has one type on every call; a Python int is another program than an array.
        self.state, records = self.decoder.decode(self.weights, self.state, np.int32(rounds))
        first_tokens, records = jax.device_get((first_tokens, records))
        for request, token in first_tokens:
            request.output.add_tokens([int(token)])
        for request in list(self._running):
            _collect(request, records)
            if request.output.finish_reason is not None:
                self._release(request)

    def _admit(self) -> list[tuple[Request, jax.Array]]:
        """Gives free slots and pages to waiting requests, in order, and launches their prefills."""
        admitted = []
        while self._waiting and self._free_slots:
            request = self._waiting[0]
            need = len(request.prompt) + request.params.max_tokens
            pages = self.pool.reserve(-(-need // PAGE_SIZE))
            if pages is None:
                break
            self._waiting.popleft()
            request.slot, request.pages = self._free_slots.popleft(), pages
            self._running.append(request)
            self._insert(request)
            admitted.append((request, self._prefill(request)))
        return admitted

    def _insert(self, request: Request) -> None:
        table = np.full(self._pages_per_slot, self.pool.num_pages, np.int32)
        table[: len(request.pages)] = request.pages
        depth = self.decoder.depth if self.settings.depth is None else self.settings.depth
        fields: Any = (
            Sampling.of(request.params),
            np.int32(self.settings.budget),
            np.int32(depth),
            np.int32(request.params.max_tokens),
            _stop_bits(request.output.stop_ids, self.target.config.vocab_size),
        )
        self.state = self.decoder.insert(self.state, np.int32(request.slot), table, SlotSettings(*fields))

    def _prefill(self, request: Request) -> jax.Array:
        """Launches the prompt's chunks; the first generated token, still on the device."""
        token = None
        for start in range(0, len(request.prompt), PREFILL_CHUNK):
            part = request.prompt[start : start + PREFILL_CHUNK]
            self.state, token = self.decoder.prefill(
                self.weights,
                self.state,
                np.int32(request.slot),
                np.pad(part, (0, PREFILL_CHUNK - len(part))),
                np.int32(len(part)),
                np.bool_(start + PREFILL_CHUNK >= len(request.prompt)),
            )
        assert token is not None, "check_request lets no empty prompt in"
        return token

    def _release(self, request: Request) -> None:
        self.state = self.decoder.release(self.state, np.int32(request.slot))
        self._running.remove(request)
        self._free_slots.append(request.slot)
        self.pool.release(list(request.pages))


def check_request(
    target: Target, prompt: Sequence[int], params: SamplingParams, *, capacity: int | None = None
) -> None:
    """Checks a request before anything is done for it.

    Raises:
        ValueError: What is wrong with it.
    """
    config = target.config
    if not len(prompt):
        raise ValueError("the prompt is empty; it needs at least one token")
    for name, ids in (("prompt", prompt), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not isinstance(token, int | np.integer) or isinstance(token, bool):
                raise ValueError(f"{name} must hold token ids, not {token!r}")
            if not 0 <= token < config.vocab_size:
                raise ValueError(
                    f"token id {token} in {name} lies outside the vocabulary 0..{config.vocab_size - 1}"
                )
    total = len(prompt) + params.max_tokens
    limit = min(config.max_position_embeddings, capacity or config.max_position_embeddings)
    if total > limit:
        raise ValueError(
            f"{len(prompt)} prompt tokens plus max_tokens={params.max_tokens} make {total}, beyond the "
            f"context limit of {limit}; max_tokens could be at most {limit - len(prompt)}"
        )
    if params.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the target has none; use stop_token_ids")


def default_capacity(config: ModelConfig, need: int) -> int:
    """Tokens per slot: the usual capacity, or the next power of two that holds ``need``."""
    usual = max(DEFAULT_CAPACITY, 1 << (need - 1).bit_length() if need else 0)
    return min(usual, config.max_position_embeddings)


def _collect(request: Request, records: RoundRecord) -> None:
    """Hands a request the tokens of the rounds that it took part in."""
    for i in itertools.takewhile(lambda i: records.counts[i, request.slot], range(len(records.counts))):
        count = records.counts[i, request.slot]
        tokens = records.tokens[i, request.slot, :count].tolist()
        request.output.add_round(tokens, int(records.tree_sizes[i, request.slot]))


def _stop_bits(ids: frozenset[int], vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in ids:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits
