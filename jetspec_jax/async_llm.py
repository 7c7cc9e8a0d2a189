"""`AsyncLLM`: streams completions to many callers of an event loop at once."""

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import Mesh

from jetspec_jax.arguments import (
    check_integer,
    check_number,
    check_type,
    either,
    parameters_of,
    refuse_unknown,
    refusing_attributes,
    shown,
)
from jetspec_jax.cache.pages import pages_for
from jetspec_jax.decode.settings import serving_algorithm
from jetspec_jax.device.compilations import num_compiled
from jetspec_jax.device.memory import DeviceMemoryError, fits, room_beside
from jetspec_jax.device.mesh import without_mesh
from jetspec_jax.engine.admission import CheckedRequest, check_models, check_request
from jetspec_jax.engine.engine import EngineClosed
from jetspec_jax.engine.output import Completion, Logprob, Output, Round
from jetspec_jax.engine.plan import EnginePlan, check_engine_memory, engine_bytes, state_bytes
from jetspec_jax.engine.prompts import Prompt
from jetspec_jax.engine.request import EngineFailed, Request
from jetspec_jax.engine.size import DEFAULT_CAPACITY, MAX_SLOTS, MOST_SLOTS
from jetspec_jax.engine.stats import EngineStats
from jetspec_jax.llm import LLM, refuse_keywords
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.vllm_names import ATTRIBUTES, ENGINE
from pallas_kernels.dispatch import gpu_problem

#: Default length limit of the waiting queue.
MAX_WAITING = 1024
#: Finish reason after `AsyncLLM.abort`.
ABORT = "abort"
# Event of a caller's queue after its deadline.
_LATE = "late"
# Tenths of the memory beside everything else that the pages of a server get.
_TENTHS_FOR_PAGES = 9


@dataclass(frozen=True)
class Delta:
    """The new part of a completion.

    Attributes:
        text: New text; empty without a tokenizer.
        token_ids: New tokens, whose text may still be held back.
        index: Number of the completion among the prompt's ``n``.
        finish_reason: None while it runs; as in `Completion`, or "abort".
        completion: The whole completion, once it has ended; after an abort, its tokens until then.
        logprobs: Log-probabilities of the new tokens, as in `Completion`.
        rounds: Each round's part of the delta.
        request_id: The caller's id of the request, or else one that `AsyncLLM` made.
        finished: Whether it is the last delta of the request.
    """

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: str | None = None
    completion: Completion | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    rounds: list[Round] = field(default_factory=list)
    request_id: str = ""
    finished: bool = False

    @property
    def outputs(self) -> "list[Delta]":
        """The delta itself: a result of vLLM has a list of completions, here it is a delta."""
        return [self]

    @property
    def stop_reason(self) -> int | str | None:
        """As in `Completion`; None while it runs."""
        return None if self.completion is None else self.completion.stop_reason


@refusing_attributes(ATTRIBUTES)
class AsyncLLM:
    """Serves requests that arrive at any time, with one engine for all of them.

    It may be used from several event loops at once. Its attribute ``llm`` is an `LLM` with the same engine.

    If several processes share the models, all of them make an `AsyncLLM` with the same settings. Process 0
    serves requests, and the workers call `follow`.

    Example::

        async with AsyncLLM(budget=16) as llm:
            async for delta in llm.generate("def copy(self):"):
                print(delta.text, end="")
    """

    @without_mesh
    def __init__(
        self,
        *models: Any,
        max_slots: int | None = None,
        capacity: int | None = None,
        max_waiting: int = MAX_WAITING,
        max_num_seqs: int | None = None,
        max_model_len: int | None = None,
        **settings: Any,
    ):
        """Loads the models; the first request makes the engine.

        Args:
            *models: Target and draft head, as for `LLM`.
            max_slots: Requests that decode at the same time, per copy of the models. None is as many as the
                free memory allows, a power of two up to 256, and 8 on a CPU.
            capacity: Most tokens of prompt and output. None is the target's context on a GPU, or the part of
                it that fits; without GPU kernels it is 1024, because rounds read all pages of each slot.
            max_waiting: Requests that may wait for a slot, per copy of the models.
            max_num_seqs: vLLM's name for ``max_slots``.
            max_model_len: vLLM's name for the capacity.
            **settings: As for `LLM`; but without an algorithm, it is "auto" on a GPU, which chooses before
                each dispatch among plain decoding and trees up to the budget.

        Raises:
            ValueError: A setting is not valid.
            Exception: All errors of `LLM`.
        """
        known = parameters_of(LLM)
        refuse_unknown(AsyncLLM, [name for name in settings if name not in known], ENGINE, LLM)
        check_integer("max_waiting", max_waiting, 1)
        max_slots = either("max_slots", max_slots, "max_num_seqs", max_num_seqs)
        capacity = either("capacity", capacity, "max_model_len", max_model_len)
        if settings.get("algorithm") is None:
            settings["algorithm"] = serving_algorithm()
        xla = settings.get("implementation") == "xla" or gpu_problem() is not None
        slots = (MAX_SLOTS if xla else MOST_SLOTS) if max_slots is None else max_slots
        self.llm = LLM(*models, max_slots=slots, capacity=capacity, **settings)
        self._engines = self.llm.engines
        self._engines.owner, self._engines.longer_slots = "AsyncLLM", False
        meshes, plan = self.llm.target.meshes, self._engines.plan
        plan = plan if xla else server_plan(plan, meshes, max_slots, capacity)
        if max_slots is not None:
            for mesh in meshes:
                check_engine_memory(plan.on(mesh))
        self._engines.fit(None if xla else plan)
        self._compiled_before, self._max_waiting = num_compiled(), max_waiting
        # Running requests by id, and how to abort them.
        self._running: dict[str, tuple[Sequence[Request], Callable[[], object]]] = {}

    async def __aenter__(self) -> "AsyncLLM":
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        await self.close()

    @property
    def slots(self) -> int:
        """Requests that decode at the same time, per copy of the models."""
        return self._engines.plan.size.slots

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request's prompt and output together."""
        return self._engines.plan.size.capacity

    @property
    def num_spec_tokens(self) -> int:
        """Drafted tokens on the longest path that the settings of trees allow; 0 in plain decoding."""
        settings, deepest = self.llm.settings, self._engines.plan.decoder.depth
        return min(deepest if settings.depth is None else settings.depth, deepest, settings.budget - 1)

    @property
    def has_workers(self) -> bool:
        """Whether several processes share the models."""
        return self._engines.workers.there

    @property
    def errored(self) -> bool:
        """Whether the last dispatch failed; a later request makes a new engine."""
        return self._engines.failed

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> CheckedRequest:
        """Checks a request for a later `generate`, and encodes its text, which may take a while.

        Raises:
            Exception: As `generate`, for errors of the request.
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.n > self.slots:
            raise ValueError(
                f"n={sampling_params.n} completions of one prompt are more than the {self.slots} slots that "
                "decode together: raise max_slots, or ask several times with other seeds"
            )
        check_models(self.llm.target, self.llm.draft_head)
        return check_request(
            self.llm.target, prompt, sampling_params, capacity=self._engines.plan.size.capacity
        )

    async def generate(
        self,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        budget: int | None = None,
        **unknown: object,
    ) -> AsyncGenerator[Delta, None]:
        """Completes one prompt; yields after each dispatch.

        Closing the iterator, cancelling the task that reads it, or dropping it frees the slot and pages after
        the current dispatch.

        Args:
            prompt: As for `LLM.generate`; or a result of `check`, with its parameters.
            sampling_params: Sampling parameters and stop conditions; ``n`` is the number of completions.
            request_id: An id for `abort`; None makes a new id, which all deltas of the request have.
            priority: Lower numbers are served first.
            timeout: Seconds from now until the request fails, at least 0; None is no limit.
            cache_salt: Pages are shared only among requests with the same salt.
            budget: Most nodes of its trees, root included, at most the LLM's; 1 is plain decoding, once all
                requests that decode beside it want no more. None is the LLM's.
            **unknown: Refused, as by `LLM.generate`.

        Yields:
            Deltas; the last delta of each completion has the whole completion.

        Raises:
            TypeError: A value has a wrong type.
            ValueError: The request cannot be served, its id is in use, or this process is a worker.
            QueueFull: Too many requests wait for a slot.
            DeadlinePassed: The timeout passed.
            DeviceMemoryError: The device cannot hold the engine.
            EngineFailed: The engine failed, for any request; it has the error's message, and the error as its
                cause.
            RuntimeError: This `AsyncLLM` is closed.
        """
        refuse_keywords(self.generate, unknown)
        self._engines.check_open()
        check_type("request_id", request_id, str | None, "a name or None")
        check_type("cache_salt", cache_salt, str | None, "a text or None")
        check_integer("priority", priority, -(2**31), 2**31)
        if budget is not None:
            check_integer("budget", budget, 1, self.llm.settings.budget)
        if timeout is not None and not check_number("timeout", timeout) >= 0:
            raise ValueError(f"timeout must be at least 0 seconds, not {shown(timeout)}")
        arrival = time.monotonic()
        deadline = None if timeout is None else arrival + timeout
        if isinstance(prompt, CheckedRequest):
            if sampling_params is not None:
                raise ValueError("a request that was checked has its parameters: give no sampling_params")
            checked = prompt
        else:
            checked = await asyncio.to_thread(self.check, prompt, sampling_params)
        name = uuid.uuid4().hex if request_id is None else request_id
        requests = checked.requests(self.llm.settings, self._engines.plan.decoder, request_id=name)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int] | str]()
        for number, request in enumerate(requests):
            request.arrival, request.deadline = arrival, deadline
            request.priority, request.cache_salt = priority, cache_salt
            request.on_update = _notifier(request, number, loop, news)
            request.budget = request.budget if budget is None else budget
        outputs = [Output(request, self.llm.target.tokenizer) for request in requests]

        def end() -> None:
            _send(loop, news, ABORT)

        # Atomic: several event loops may use one id at once.
        if self._running.setdefault(name, entry := (requests, end)) is not entry:
            raise ValueError(f"another request with the id {shown(name)} runs")
        timer = None
        try:
            self._engines.submit(requests, self._max_waiting)
            if deadline is not None and deadline < math.inf:
                # The engine checks deadlines too, but not while it compiles.
                timer = loop.call_later(deadline - time.monotonic(), news.put_nowait, _LATE)
            running = dict(enumerate(outputs))
            sent = [0] * len(outputs)
            while running:
                event = await news.get()
                if event == _LATE:
                    raise next(iter(running.values())).request.deadline_error(time.monotonic())
                if isinstance(event, str):
                    for output in running.values():
                        output.request.cancel()  # at once: the reader of the deltas may be slow
                    for number, output in list(running.items()):
                        running.pop(number)
                        output.end(ABORT)
                        text, ended = output.text[sent[number] :], output.completion()
                        index, last = output.request.index, not running
                        yield Delta(text, [], index, ABORT, ended, request_id=name, finished=last)
                    return
                number, count = event
                if number not in running:
                    continue
                output, known = outputs[number], len(outputs[number].token_ids)
                rounds = output.update_by_round(count)
                text, reason = output.settled_text[sent[number] :], output.finish_reason
                sent[number] += len(text)
                whole, logprobs = None, output.logprobs(known)
                if reason is not None:
                    output.request.cancel()  # engines do not know stop strings
                    whole = running.pop(number).completion()
                tokens, index = output.token_ids[known:], output.request.index
                yield Delta(text, tokens, index, reason, whole, logprobs, rounds, name, not running)
        except Exception as error:
            # Distinguishes engine errors from request errors of any type. A lack of memory keeps its own
            # type.
            lost = any(request.lost and request.error is error for request in requests)
            if lost and not isinstance(error, DeviceMemoryError | EngineClosed):
                raise EngineFailed(str(error) or type(error).__name__) from error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            for request in requests:
                request.cancel()
            self._running.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """Ends a request by its id, if it runs: its last deltas have the finish reason "abort"."""
        if entry := self._running.get(request_id):
            entry[1]()

    async def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self.llm.get_tokenizer()

    async def warm_up(
        self, sampling_params: SamplingParams | None = None, *, background: bool = False
    ) -> None:
        """As `LLM.warm_up`, for any number of requests."""
        await asyncio.to_thread(self.llm.warm_up, None, sampling_params, background=background)
        self._compiled_before = num_compiled()

    @property
    def warm(self) -> bool:
        """Whether there are engines, which compile nothing in the background."""
        return self._engines.warm

    async def reset_prefix_cache(self) -> bool:
        """As `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self.llm.reset_prefix_cache)

    def stats(self) -> EngineStats:
        """Statistics of all copies together; from any thread, without waiting."""
        return self._engines.stats() + EngineStats(compilations=num_compiled() - self._compiled_before)

    def follow(self) -> None:
        """As `LLM.follow`."""
        self.llm.follow()

    async def close(self) -> None:
        """Fails all requests and ends the engine's thread; the models stay loaded."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """As `close`, but blocks; vLLM's name."""
        self.llm.close()


def server_plan(
    plan: EnginePlan, meshes: Sequence[Mesh | None], max_slots: int | None, capacity: int | None
) -> EnginePlan:
    """A server's plan with GPU kernels: its context, slots and pages by the free memory, if they are None.

    With kernels an unused context costs a round nothing, and requests get pages as they grow. So the context
    is the target's, or a half, a quarter, … of it, with which `MAX_SLOTS` slots fit, and pages for one
    request of that length. As many slots as fit have pages for `DEFAULT_CAPACITY` tokens each, and nine
    tenths of the memory that is left are more pages.
    """
    limit = plan.decoder.target.max_position_embeddings

    def sized(slots: int, context: int, more_pages: int = 0) -> EnginePlan:
        pages = max(pages_for(context), slots * pages_for(min(context, DEFAULT_CAPACITY)))
        pages = min(pages + more_pages, slots * pages_for(context))
        return replace(plan, size=replace(plan.size.with_slots(slots), capacity=context, num_pages=pages))

    def first_that_fits(plans: Sequence[EnginePlan]) -> EnginePlan:
        there = (each for each in plans if all(fits(engine_bytes(each.on(mesh)), mesh) for mesh in meshes))
        return next(there, plans[-1])

    def halves(most: int, least: int) -> list[int]:
        parts = (most >> times for times in range(most.bit_length()))
        return [part for part in parts if part >= least] or [most]

    contexts = halves(limit, DEFAULT_CAPACITY) if capacity is None else [capacity]
    context = first_that_fits([sized(max_slots or MAX_SLOTS, each) for each in contexts]).size.capacity
    counts = halves(plan.size.slots, 1) if max_slots is None else [max_slots]
    fitting = first_that_fits([sized(each, context) for each in counts])
    slots, more = fitting.size.slots, []
    for mesh in meshes:
        page = state_bytes(sized(slots, context, 1).on(mesh)) - state_bytes(fitting.on(mesh))
        room = room_beside(engine_bytes(fitting.on(mesh)), mesh)
        more.append(0 if room is None or not page else max(room, 0) * _TENTHS_FOR_PAGES // 10 // page)
    return sized(slots, context, min(more))


def _notifier(
    request: Request, number: int, loop: asyncio.AbstractEventLoop, news: asyncio.Queue[Any]
) -> Callable[[], None]:
    """A request's ``on_update``: sends the number of its tokens to the event loop."""

    def on_update() -> None:
        if not _send(loop, news, (number, request.readable[0])):
            request.cancel()

    return on_update


def _send(loop: asyncio.AbstractEventLoop, news: asyncio.Queue[Any], event: Any) -> bool:
    """Puts an event into a queue of an event loop; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(news.put_nowait, event)
    except RuntimeError:
        return False
    return True
