"""What all requests for text share: their checks, their way through the engine, and what is counted."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request

from jetspec_jax.arguments import shown
from jetspec_jax.async_llm import AsyncLLM, Delta
from jetspec_jax.engine.admission import CheckedRequest
from jetspec_jax.engine.prompts import EncodedPrompt, naming
from jetspec_jax.engine.size import default_capacity
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.errors import ApiError, of_generation, refused
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.metrics import Metrics
from jetspec_jax.serve.settings import ServeSettings
from jetspec_jax.serve.trials import GrammarTrials

Result = TypeVar("Result")


class ClientLeft(Exception):
    """Nobody waits for the answer any more."""


@dataclass(frozen=True)
class Asked:
    """What one HTTP request wants of the engine.

    Attributes:
        prompts: Its prompts.
        params: How all of them are sampled.
        names: Parameters of the request, which errors may name.
        param: The one that holds the prompts.
        renamed: What the request calls parameters of `SamplingParams` that it has under other names.
        priority: As for `AsyncLLM.generate`, as is the next.
        cache_salt: Pages are shared only among requests with the same.
        budget: Most nodes of its trees; None is the engine's.
        prompt_only: Whether the answer has no generated tokens. The one that the engine generates all the
            same is dropped; ``params`` ask for no log-probabilities of it.
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


@dataclass(eq=False)
class Service:
    """One model that is served.

    Attributes:
        llm: The engine.
        settings: What the server was told.
        name: Of the model.
        metrics: What is counted.
        capacity: Tokens of prompt and output together, at most.
        created: When it was loaded, in seconds since 1970.
        draining: Whether the server ends, and takes no requests.
        running: HTTP requests that are being answered.
        trials: Where grammars are compiled first.
    """

    llm: AsyncLLM
    settings: ServeSettings
    name: str
    metrics: Metrics
    capacity: int
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    running: int = 0
    trials: GrammarTrials = field(init=False)
    _warnings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Starts nothing."""
        self.trials = GrammarTrials(self.llm.llm.target, self.settings.max_grammar_seconds)

    @property
    def names(self) -> Sequence[str]:
        """All names of the model."""
        return self.settings.served_model_name or (self.name,)

    def warn_once(self, message: str) -> None:
        """Logs a warning, unless this server has logged it before; from any thread."""
        mark = object()
        if self._warnings.setdefault(message, mark) is mark:  # atomic: several threads may call
            log(message, logging.WARNING)

    def check_model(self, name: str | None) -> str:
        """The name under which the model was asked for.

        Raises:
            ApiError: It is another model's.
        """
        if name is not None and name not in self.names:
            known = " or ".join(map(repr, self.names))
            message = f"the model {shown(name)} is not served here; say {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name or self.names[0]

    async def check(self, asked: Asked) -> list[CheckedRequest]:
        """Checks all that can be before the engine hears of it: each prompt with its parameters.

        Raises:
            ApiError: What is wrong.
        """
        count, most = len(asked.prompts) * asked.params.n, self.settings.max_completions
        if count > most:
            prompts = len(asked.prompts)
            message = f"{prompts} prompts times n={asked.params.n} are {count} completions; at most {most}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if asked.params.n > self.llm.slots:
            message = (
                f"n={asked.params.n} completions of one prompt are more than the {self.llm.slots} that "
                "decode together here: ask several times with other seeds, or start the server with a larger "
                "--max-num-seqs"
            )
            raise ApiError(400, message, param="n", code="invalid_value")
        self.check_budget(asked.budget)
        if asked.params.structured_outputs is not None:
            with _refusing(asked):
                await self.trials.check(asked.params.structured_outputs)
        return await asyncio.to_thread(self._check, asked)

    def check_budget(self, budget: int | None) -> None:
        """Checks the budget of a request.

        Raises:
            ApiError: There are no such trees here.
        """
        most = self.llm.llm.settings.budget
        if budget is not None and not 1 <= budget <= most:
            trees = "1, which is plain decoding" if most == 1 else f"at least 1 and at most {most}"
            message = f"budget={shown(budget)}: trees of this server can have budgets of {trees}"
            raise ApiError(400, message, param="budget", code="invalid_value")

    def _check(self, asked: Asked) -> list[CheckedRequest]:
        checked = []
        for number, prompt in enumerate(asked.prompts):
            self._check_length(asked, len(prompt.ids))
            with _refusing(asked), naming(f"{asked.param}[{number}]" if len(asked.prompts) > 1 else ""):
                checked.append(self.llm.check(prompt, asked.params))
        return checked

    def _check_length(self, asked: Asked, count: int) -> None:
        most, room, asks = self.settings.max_prompt_tokens, self.capacity - count, asked.params.max_tokens
        param = asked.param
        if most is not None and count > most:
            message = f"{param} has {count} tokens; this server takes at most {most}"
        elif room < 1:
            message = f"{param} has {count} tokens, and the context is {self.capacity}, output included"
        elif asks is not None and asks > room:
            param = asked.renamed.get("max_tokens", "max_tokens")
            message = (
                f"{count} prompt tokens and {param}={asks} lie beyond the context of {self.capacity}; "
                f"{param} could be at most {room}"
            )
        else:
            return
        raise ApiError(400, message, param=param, code="context_length_exceeded")

    async def follow(
        self, asked: Asked, checked: Sequence[CheckedRequest]
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """What is new of the completions of all prompts, each with the number of its prompt.

        Raises:
            ApiError: A prompt could not be served.
        """
        queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
        if len(checked) == 1:
            async with contextlib.aclosing(self._follow(asked, checked[0])) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return

        async def read(number: int) -> None:
            try:
                async with contextlib.aclosing(self._follow(asked, checked[number])) as deltas:
                    async for delta in deltas:
                        queue.put_nowait((number, delta))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(read(number)) for number in range(len(checked))]
        try:
            left = len(tasks)
            while left:
                heard = await queue.get()
                if isinstance(heard, Exception):
                    raise heard
                if heard is None:
                    left -= 1
                else:
                    yield heard
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, asked: Asked, checked: CheckedRequest) -> AsyncGenerator[Delta, None]:
        following = self.metrics.following()
        deltas = self.llm.generate(
            checked,
            priority=asked.priority,
            cache_salt=asked.cache_salt,
            budget=asked.budget,
            timeout=self.settings.request_timeout,
        )
        begun = False
        async with contextlib.aclosing(deltas):
            try:
                async for delta in deltas:
                    if not begun:
                        self.metrics.prompt(len(checked.prompt.ids))
                        begun = True
                    following.saw(delta)
                    yield _without_output(delta) if asked.prompt_only else delta
            except RuntimeError as error:
                if self.draining:
                    message = "the server has ended before the answer was complete; another one may give it"
                    raise ApiError(503, message, code="draining", headers={"Retry-After": "1"}) from error
                raise of_generation(error, asked.names, asked.renamed) from error
            except Exception as error:
                raise of_generation(error, asked.names, asked.renamed) from error


def _without_output(delta: Delta) -> Delta:
    """A delta as of a request for no tokens; its completion keeps what is told of the prompt."""
    if delta.completion is None:
        return replace(delta, text="", token_ids=[], rounds=[])
    whole = replace(delta.completion, text="", token_ids=[], finish_reason="length", stop_reason=None)
    return replace(
        delta, text="", token_ids=[], rounds=[], finish_reason=whole.finish_reason, completion=whole
    )


@contextlib.contextmanager
def _refusing(asked: Asked) -> Iterator[None]:
    """Tells a client what a check complains about."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise refused(error, asked.names, asked.param, asked.renamed) from error
    except ImportError as error:
        raise ApiError(400, f"this server has no grammars: {error}", code="unsupported") from error


async def unless_left(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is cancelled when the client leaves.

    Raises:
        ClientLeft: It has left.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for own in (task, gone):
            own.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def capacity_of(llm: AsyncLLM, capacity: int | None) -> int:
    """Tokens of prompt and output together that the engine takes, at most."""
    config = llm.llm.target.config
    return min(config.max_position_embeddings, capacity or default_capacity(config, 0))
