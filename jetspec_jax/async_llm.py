"""`AsyncLLM`: completions for many callers of an event loop at once, piece by piece."""

import asyncio
import math
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jetspec_jax.arguments import (
    check_integer,
    check_number,
    check_type,
    either,
    parameters_of,
    refuse_unknown,
    shown,
)
from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.settings import serving_algorithm
from jetspec_jax.device.compilations import Compilations
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.processes import is_first
from jetspec_jax.device.thread_config import thread_config
from jetspec_jax.engine.admission import CheckedRequest, check_models, check_request
from jetspec_jax.engine.following import follow
from jetspec_jax.engine.logprobs import Logprob
from jetspec_jax.engine.output import Completion, Output, Round
from jetspec_jax.engine.prompts import EncodedPrompt, Prompt
from jetspec_jax.engine.request import EngineFailed, Request
from jetspec_jax.engine.serving import Group, groups_of, least_busy
from jetspec_jax.engine.size import MAX_SLOTS
from jetspec_jax.engine.standing import plan_standing
from jetspec_jax.engine.stats import EngineStats, Tally
from jetspec_jax.engine.wants import Kind
from jetspec_jax.engine.wire import tell
from jetspec_jax.llm import LLM, kinds_to_compile, refuse_keywords
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.tree import Hints
from jetspec_jax.tree.routing import hints_of_each
from jetspec_jax.vllm_names import ENGINE

#: Requests that may wait for a slot, unless a caller says how many.
MAX_WAITING = 1024
#: Why a completion ended that `AsyncLLM.abort` took out.
ABORT = "abort"
# What a caller hears at its deadline, in the place of news.
_LATE = "late"


@dataclass(frozen=True)
class Delta:
    """What is new of a completion.

    Attributes:
        text: More of its text; empty without a tokenizer.
        token_ids: More of its tokens, whose text may still be to come.
        index: Which of its prompt's ``n`` completions it is.
        finish_reason: None while it goes on; as `Completion` has it, or "abort".
        completion: All of it, once it has ended; after an abort, what came until then.
        logprobs: What is told of the new tokens, as `Completion` has it.
        rounds: What each round added of it.
        request_id: The name that the caller gave the request, or else one that `AsyncLLM` made.
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
        """The delta alone. In vLLM a result has a list of completions; here each delta is a result."""
        return [self]

    @property
    def stop_reason(self) -> int | str | None:
        """As `Completion` has it; None while it goes on."""
        return None if self.completion is None else self.completion.stop_reason


class AsyncLLM:
    """Serves requests that come at any time, with one engine for all of them.

    It may be used from several event loops, also at once. An `LLM` of the same target may be used beside it.

    Of several processes that share the models all make one with the same settings. The first serves requests,
    and all others call `follow`.

    Example::

        async with AsyncLLM(budget=16) as llm:
            async for delta in llm.generate("def copy(self):"):
                print(delta.text, end="")
    """

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
        """Loads the models; the engine is made for the first request.

        Args:
            *models: Target and draft head, as for `LLM`.
            max_slots: Requests that decode at the same time, with each copy of the models. None is as many as
                there is memory for, a power of two up to 256, and 8 on a CPU.
            capacity: Tokens of prompt and output that a slot can hold; None is the usual number.
            max_waiting: Requests that may wait for a slot, with each copy of the models.
            max_num_seqs: vLLM's name for ``max_slots``.
            max_model_len: vLLM's name for the capacity.
            **settings: As for `LLM`; but where no algorithm is named, it is "auto" on a GPU, which chooses
                before each dispatch among plain decoding and trees up to the budget.

        Raises:
            ValueError: A setting is not valid.
            Exception: All else that `LLM` raises.
        """
        known = parameters_of(LLM)
        refuse_unknown(AsyncLLM, [name for name in settings if name not in known], ENGINE, LLM)
        check_integer("max_waiting", max_waiting, 1)
        max_slots = either("max_slots", max_slots, "max_num_seqs", max_num_seqs)
        capacity = either("capacity", capacity, "max_model_len", max_model_len)
        slots = MAX_SLOTS if max_slots is None else max_slots
        self.llm = LLM(*models, max_slots=slots, capacity=capacity, **settings)
        if settings.get("algorithm") is None and self.llm.settings.budget > 1:
            self.llm.settings = replace(self.llm.settings, algorithm=serving_algorithm())
        target: Target = self.llm.target
        head: Head | None = self.llm.draft_head
        plan = plan_standing(
            target,
            head,
            self.llm.settings,
            max_slots=max_slots,
            capacity=capacity,
            implementation=settings.get("implementation"),
        )
        self._capacity, self._slots = plan.size.capacity, plan.size.slots
        self._plan, self._compilations = plan, Compilations()
        self._max_waiting, self._closed = max_waiting, False
        self._groups = groups_of(target, head)
        # Other calls join their engine.
        self._standing = [group.call(plan) for group in self._groups]
        for own in self._standing:
            loop = own.loop
            loop.server, loop.leads, loop.tally = weakref.ref(own), plan.led and is_first(), Tally()
        # The requests of each name, and how to abort them.
        self._named: dict[str, tuple[Sequence[Request], Callable[[], object]]] = {}

    async def __aenter__(self) -> "AsyncLLM":
        """Itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes it."""
        await self.close()

    @property
    def slots(self) -> int:
        """Requests that decode at the same time, with each copy of the models."""
        return self._slots

    @property
    def errored(self) -> bool:
        """Whether the last dispatch failed; a later request makes the engine anew."""
        return any(group.loop.failed for group in self._groups)

    def check(
        self, prompt: Prompt | EncodedPrompt, sampling_params: SamplingParams | None = None
    ) -> CheckedRequest:
        """Checks a request, for a later `generate`; encodes its text, which may take a while.

        Raises:
            Exception: As `generate`, of the request.
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.n > self._slots:
            raise ValueError(
                f"n={sampling_params.n} completions of one prompt are more than the {self._slots} slots that "
                "decode together: raise max_slots, or ask several times with other seeds"
            )
        check_models(self.llm.target, self.llm.draft_head)
        return check_request(self.llm.target, prompt, sampling_params, capacity=self._capacity)

    async def generate(
        self,
        prompt: Prompt | CheckedRequest,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        timeout: float | None = None,
        cache_salt: str | None = None,
        routing: Hints | None = None,
        budget: int | None = None,
        **unknown: object,
    ) -> AsyncGenerator[Delta, None]:
        """Completes one prompt; what is new comes after each dispatch.

        To close the iterator, to cancel the task that reads it, or to drop it frees slot and pages at the end
        of the dispatch that runs.

        Args:
            prompt: As for `LLM.generate`; or what `check` returned, with its parameters.
            sampling_params: How it is sampled; ``n`` of them makes so many completions.
            request_id: A name for `abort`; None makes a new name, which all deltas of the request have.
            priority: Lower numbers are served first.
            timeout: Seconds that it has from now on, at least 0; None is no limit.
            cache_salt: Pages are shared only among requests with the same salt.
            routing: As for `LLM.generate`.
            budget: Most nodes of its trees, root included, at most the LLM's; 1 is plain decoding, as soon as
                all that decode beside it want no more. None is the LLM's.
            **unknown: Refused, as by `LLM.generate`.

        Yields:
            Deltas, the last one of each completion with all of it.

        Raises:
            TypeError: Something is of a wrong type.
            ValueError: The request cannot be served, or another of its name runs; or this process follows.
            QueueFull: Too many wait already.
            DeadlinePassed: It was not served in its time.
            DeviceMemoryError: The device has no room for the engine.
            EngineFailed: Something else is wrong with the engine, not with the request; a RuntimeError with
                its cause.
            RuntimeError: It was closed.
        """
        refuse_keywords(self.generate, unknown)
        self._check_first()
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
        [hints] = hints_of_each(routing, 1, "prompts")
        name = uuid.uuid4().hex if request_id is None else request_id
        requests = checked.requests(self.llm.settings, self._plan.decoder, hints, name)
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int] | str]()
        for number, request in enumerate(requests):
            request.arrival, request.deadline = arrival, deadline
            request.priority, request.cache_salt = priority, cache_salt
            request.told = _teller(request, number, loop, news)
            request.budget = request.budget if budget is None else budget
        outputs = [Output(request, self.llm.target.tokenizer) for request in requests]

        def end() -> None:
            _send(loop, news, ABORT)

        # In one step: several loops may bring one name at once.
        if self._named.setdefault(name, own := (requests, end)) is not own:
            raise ValueError(f"another request of the name {shown(name)} runs")
        timer = None
        [group] = least_busy(self._groups, 1)
        call = group.call(self._plan, requests)
        try:
            self._check_open()  # whoever closes it from now on ends these too
            call.loop.submit(call, self._max_waiting)
            if deadline is not None and deadline < math.inf:
                # The engine looks at deadlines too, but not while another call has it to itself.
                timer = loop.call_later(deadline - time.monotonic(), news.put_nowait, _LATE)
            going_on = dict(enumerate(outputs))
            sent = [0] * len(outputs)
            while going_on:
                heard = await news.get()
                if heard == _LATE:
                    raise next(iter(going_on.values())).request.too_late(time.monotonic())
                if isinstance(heard, str):
                    for output in going_on.values():
                        output.request.cancel()  # at once: whoever reads the deltas may be slow
                    for number, output in list(going_on.items()):
                        going_on.pop(number)
                        output.end(ABORT)
                        text, ended = output.text[sent[number] :], output.completion()
                        index, last = output.request.index, not going_on
                        yield Delta(text, [], index, ABORT, ended, request_id=name, finished=last)
                    return
                number, count = heard
                if number not in going_on:
                    continue
                output, known = outputs[number], len(outputs[number].token_ids)
                rounds = output.update_by_round(count)
                text, reason = output.settled_text[sent[number] :], output.finish_reason
                sent[number] += len(text)
                whole, told = None, output.logprobs(known)
                if reason is not None:
                    output.request.cancel()  # a stop string is nothing that an engine knows of
                    whole = going_on.pop(number).completion()
                tokens, index = output.token_ids[known:], output.request.index
                yield Delta(text, tokens, index, reason, whole, told, rounds, name, not going_on)
        except Exception as error:
            # Told apart from what is wrong with a request, whatever the type. A lack of memory has its own.
            if error is call.error and not isinstance(error, DeviceMemoryError):
                raise EngineFailed(str(error) or type(error).__name__) from error
            raise
        finally:
            if timer is not None:
                timer.cancel()
            for request in requests:
                request.cancel()
            self._named.pop(name, None)

    async def abort(self, request_id: str) -> None:
        """Ends a request by its name, if it runs: its last deltas have the reason "abort"."""
        if named := self._named.get(request_id):
            named[1]()

    async def get_tokenizer(self) -> Any:
        """As `LLM.get_tokenizer`."""
        return self.llm.get_tokenizer()

    async def warm_up(self, sampling_params: SamplingParams | None = None) -> None:
        """Makes the engine and compiles all that the settings allow, with progress on a terminal.

        Afterwards nothing compiles, but for requests that want what was not named here, or very many or long
        bad words.

        Args:
            sampling_params: As those of requests to come, where they want masks, biases, penalties,
                log-probabilities or a form: what they need is compiled too, and what those need that want
                some of it.
        """
        self._check_first()
        params = sampling_params or SamplingParams()
        short, scores = kinds_to_compile(sampling_params), params.prompt_logprobs is not None
        for group in self._groups:
            await asyncio.to_thread(self._compile, group, Kind.of(params).parts, scores, thread_config())
        # What else a request needs, with all the room that it needs there by now.
        prompt = [0] * min(2, self._capacity - 1)
        for own in short:
            requests: list[Request] = []
            try:
                for group in self._groups:
                    checked = self.check(prompt, own)
                    requests += (made := checked.requests(self.llm.settings, self._plan.decoder))
                    self._check_open()
                    group.loop.submit(group.call(self._plan, made))
                while any(request.open for request in requests):
                    await asyncio.sleep(0.01)
            finally:
                for request in requests:
                    request.cancel()
            for request in requests:
                if request.error is not None:
                    raise request.error
        self._compilations.restart()

    def stats(self) -> EngineStats:
        """Figures by now, of all copies together; from any thread, which waits for nobody."""
        own = EngineStats(compilations=self._compilations.count)
        return sum((group.loop.stats(self._plan.size.num_pages) for group in self._groups), own)

    def follow(self) -> None:
        """Does what the first process decides, until that closes; for all others that share the models.

        It blocks, and nothing else may use the models meanwhile. An idle first process may be waited for as
        long as it lives.

        Raises:
            ValueError: This process is the first, or shares its models with no other.
            RuntimeError: An error has ended the work of the first process.
            OutOfStep: That process does something else.
        """
        if not self._plan.led:
            raise ValueError("this process shares its models with no other, and has nobody to follow")
        if is_first():
            raise ValueError("process 0 serves requests, and the other processes follow it")
        [group] = self._groups
        follow(group, self._plan)

    async def close(self) -> None:
        """Ends all requests with an error, and the thread; the models stay loaded."""
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """As `close`, under vLLM's name: blocks."""
        self._closed = True
        for request in [one for requests, _ in tuple(self._named.values()) for one in requests]:
            request.fail(RuntimeError("this AsyncLLM was closed"))
        standing, self._standing = self._standing, []
        for loop in [own.loop for own in standing]:
            loop.settle()
            if self._plan.led and loop.leads:
                loop.leads = False
                tell("end", None)

    def _compile(self, group: Group, kinds: Sequence[Kind], scores: bool, config: tuple[Any, ...]) -> None:
        """Makes the engine, and compiles its programs with JAX's settings of the caller's thread; blocks."""
        self._check_open()
        loop, plan = group.loop, self._plan.on(group.target.mesh)
        loop.run(
            lambda: loop.engine and loop.engine.compile(kinds, scores=scores), plan, group.weights, config
        )

    def _check_open(self) -> None:
        # Without those that follow, which an error has ended, nobody is served any more.
        left = self._plan.led and is_first() and not all(own.loop.leads for own in self._standing)
        if self._closed or left:
            raise RuntimeError("this AsyncLLM is closed")

    def _check_first(self) -> None:
        if self._plan.led and not is_first():
            raise ValueError("requests go to process 0; this process follows it: call follow()")


def _teller(
    request: Request, number: int, loop: asyncio.AbstractEventLoop, news: asyncio.Queue[Any]
) -> Callable[[], None]:
    """What an engine's thread calls: puts the number of its tokens where the loop reads it."""

    def told() -> None:
        if not _send(loop, news, (number, request.readable[0])):
            request.cancel()

    return told


def _send(loop: asyncio.AbstractEventLoop, news: asyncio.Queue[Any], what: Any) -> bool:
    """Puts something into a queue of a loop; false where the loop is closed."""
    try:
        loop.call_soon_threadsafe(news.put_nowait, what)
    except RuntimeError:
        return False
    return True
