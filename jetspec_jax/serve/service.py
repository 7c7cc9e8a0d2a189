"""The state and methods that all text routes share: checks, generation and metrics."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request

from jetspec_jax.arguments import shown
from jetspec_jax.async_llm import AsyncLLM, Delta
from jetspec_jax.engine.admission import CheckedRequest, context_overflow
from jetspec_jax.engine.prompts import EncodedPrompt, naming
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.engine_figures import EngineFigures
from jetspec_jax.serve.errors import ApiError, of_generation, refused, wrong
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.metrics import CompletionTimer, Metrics
from jetspec_jax.serve.settings import ServeSettings
from jetspec_jax.serve.trials import GrammarTrials

Result = TypeVar("Result")


class ClientLeft(Exception):
    """The client has disconnected."""


@dataclass(frozen=True)
class GenerationRequest:
    """The engine's part of one HTTP request.

    For errors it has the names of the HTTP request's parameters, that of the prompts, those by which it calls
    `SamplingParams`' (``renamed``), and the grammars in the grammar of ``params`` (``parts``). For
    ``prompt_only`` the engine generates one token, which is dropped; ``params`` must not ask for its
    log-probabilities.
    """

    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    names: Collection[str]
    param: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    priority: int = 0
    cache_salt: str | None = None
    budget: int | None = None
    prompt_only: bool = False
    parts: Mapping[str, StructuredOutputsParams] = field(default_factory=dict)


class Service:
    """A served model."""

    def __init__(self, llm: AsyncLLM, settings: ServeSettings, name: str):
        self.llm, self.settings, self.name = llm, settings, name
        #: All names of the model.
        self.names: Sequence[str] = settings.served_model_name or (name,)
        #: In seconds since 1970.
        self.created = int(time.time())
        self.draining, self.running = False, 0
        self.metrics = Metrics(self.names[0])
        self.metrics.registry.register(EngineFigures(llm, self.names[0]))
        self.trials = GrammarTrials(llm.llm.target, settings.max_grammar_seconds)
        self._warnings: dict[str, object] = {}

    def warn_once(self, message: str) -> None:
        """Logs a warning once per server; thread-safe."""
        mark = object()
        if self._warnings.setdefault(message, mark) is mark:  # atomic: several threads may call
            log(message, logging.WARNING)

    def check_model(self, name: str | None) -> str:
        """The requested name of the model, or its first name."""
        if name is not None and name not in self.names:
            known = " or ".join(map(repr, self.names))
            message = f"the model {shown(name)} is not served here; use {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    async def check(self, generation: GenerationRequest) -> list[CheckedRequest]:
        """Checks a request before it is passed to the engine; returns one checked request per prompt."""
        count, most = len(generation.prompts) * generation.params.n, self.settings.max_completions
        if count > most:
            prompts = len(generation.prompts)
            times = f"{prompts} prompts times n={generation.params.n}"
            raise wrong("n", f"{times} are {count} completions; at most {most}")
        if generation.params.n > self.llm.slots:
            message = (
                f"n={generation.params.n} completions of one prompt are more than the {self.llm.slots} that "
                "decode together here: ask several times with other seeds, or start the server with a larger "
                "--max-num-seqs"
            )
            raise wrong("n", message)
        budget, most = generation.budget, self.llm.llm.settings.budget
        if budget is not None and not 1 <= budget <= most:
            trees = "1, which is plain decoding" if most == 1 else f"at least 1 and at most {most}"
            raise wrong("budget", f"budget={shown(budget)}: trees of this server can have budgets of {trees}")
        if generation.params.structured_outputs is not None:
            with _refusing(generation):
                for name, part in generation.parts.items():
                    await self.trials.check(part, name)
                await self.trials.check(generation.params.structured_outputs)
        return await asyncio.to_thread(self._check, generation)

    def _check(self, generation: GenerationRequest) -> list[CheckedRequest]:
        checked = []
        for number, prompt in enumerate(generation.prompts):
            self._check_length(generation, len(prompt.ids))
            with (
                _refusing(generation),
                naming(f"{generation.param}[{number}]" if len(generation.prompts) > 1 else ""),
            ):
                checked.append(self.llm.check(prompt, generation.params))
        return checked

    def _check_length(self, generation: GenerationRequest, count: int) -> None:
        most = self.settings.max_prompt_tokens
        if most is not None and count > most:
            message = f"the prompt is too long: {count} tokens, and this server takes at most {most}"
            problem = generation.param, message
        else:
            names = {**generation.renamed, "prompt": generation.param}
            problem = context_overflow(count, self.llm.max_model_len, generation.params, names)
        if problem is not None:
            raise ApiError(400, problem[1], param=problem[0], code="context_length_exceeded")

    async def generate(
        self, generation: GenerationRequest, checked: Sequence[CheckedRequest]
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Generates for all prompts; yields deltas with the indices of their prompts."""
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        if len(checked) == 1:
            async with contextlib.aclosing(self._generate(generation, checked[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return

        async def read(number: int) -> None:
            try:
                async with contextlib.aclosing(self._generate(generation, checked[number])) as deltas:
                    async for delta in deltas:
                        queue.put_nowait((number, delta))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(read(number)) for number in range(len(checked))]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(
        self, generation: GenerationRequest, checked: CheckedRequest
    ) -> AsyncGenerator[Delta, None]:
        timer = CompletionTimer(self.metrics, len(checked.prompt.ids))
        deltas = self.llm.generate(
            checked,
            priority=generation.priority,
            cache_salt=generation.cache_salt,
            budget=generation.budget,
            timeout=self.settings.request_timeout,
        )
        async with contextlib.aclosing(deltas):
            try:
                async for delta in deltas:
                    timer.record(delta)
                    yield _without_output(delta) if generation.prompt_only else delta
            except Exception as error:
                if self.draining and isinstance(error, RuntimeError):
                    message = "the server shut down before the answer was complete; try another server"
                    raise ApiError(503, message, code="draining", headers={"Retry-After": "1"}) from error
                raise of_generation(error, generation.names, generation.renamed) from error


def _without_output(delta: Delta) -> Delta:
    """A delta without generated tokens; its completion keeps the prompt's log-probabilities."""
    nothing: dict[str, Any] = {"token_ids": [], "accept_lengths": [], "tree_sizes": [], "tree_depths": []}
    whole = delta.completion and replace(
        delta.completion, text="", finish_reason="length", stop_reason=None, **nothing
    )
    reason = whole and whole.finish_reason
    return replace(delta, text="", token_ids=[], rounds=[], finish_reason=reason, completion=whole)


@contextlib.contextmanager
def _refusing(generation: GenerationRequest) -> Iterator[None]:
    """Converts errors of checks into `ApiError`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise refused(error, generation.names, generation.param, generation.renamed) from error
    except ImportError as error:
        raise ApiError(400, f"this server has no grammars: {error}", code="unsupported") from error


async def unless_left(request: Request, work: Awaitable[Result]) -> Result:
    """The result of ``work``, which is cancelled if the client disconnects."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
