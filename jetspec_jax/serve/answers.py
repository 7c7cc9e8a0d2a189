"""What responses of both kinds share: usage, log-probabilities, and events of a stream."""

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse

from jetspec_jax.async_llm import Delta
from jetspec_jax.engine.admission import CheckedRequest
from jetspec_jax.engine.logprobs import Logprob
from jetspec_jax.engine.output import Completion
from jetspec_jax.serve.errors import CLIENT_LEFT, ApiError, internal
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.service import Asked, ClientLeft, Service, unless_left

#: Of a token that cannot come: JSON has no infinity.
_IMPOSSIBLE = -9999.0
#: The last event of every stream.
DONE = b"data: [DONE]\n\n"


@runtime_checkable
class Writer(Protocol):
    """Makes a response of deltas."""

    def begin(self) -> Iterable[dict[str, Any]]:
        """Chunks before all others."""
        ...

    def take(self, choice: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """Chunks of a delta."""
        ...

    def end(self, completions: dict[int, Completion]) -> Iterable[dict[str, Any]]:
        """Chunks after all others."""
        ...

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The response as one."""
        ...


async def answer(
    service: Service, request: Request, asked: Asked, writer: Writer, *, stream: bool
) -> Response:
    """Generates what was asked for, and sends it as one, or as a stream of events.

    A stream begins with the first tokens: what goes wrong before is an HTTP status.

    Raises:
        ApiError: It cannot be served.
    """
    checked = await service.check(asked)
    record = request.state.record
    record["prompt_tokens"] = sum(len(prompt.ids) for prompt in asked.prompts)
    completions: dict[int, Completion] = {}
    deltas = _choices(service, asked, checked, completions, record)
    try:
        if not stream:
            async with contextlib.aclosing(deltas):
                await unless_left(request, _exhaust(deltas))
            return JSONResponse(writer.whole([completions[choice] for choice in sorted(completions)]))
        first = await unless_left(request, _first(deltas))
    except ClientLeft:
        await deltas.aclose()
        return Response(status_code=CLIENT_LEFT)
    events = _events(first, deltas, completions, writer, record["request_id"])
    return EventSourceResponse(events, sep="\n")


async def _choices(
    service: Service,
    asked: Asked,
    checked: Sequence[CheckedRequest],
    completions: dict[int, Completion],
    record: dict[str, Any],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas with the numbers of their choices; keeps what has ended."""
    async with contextlib.aclosing(service.follow(asked, checked)) as deltas:
        async for number, delta in deltas:
            choice = number * asked.params.n + delta.index
            record["completion_tokens"] = record.get("completion_tokens", 0) + len(delta.token_ids)
            if delta.completion is not None:
                completions[choice] = delta.completion
                record.setdefault("finish_reasons", []).append(delta.finish_reason)
            yield choice, delta


async def _first(deltas: AsyncGenerator[tuple[int, Delta], None]) -> tuple[int, Delta]:
    return await anext(deltas)


async def _exhaust(deltas: AsyncGenerator[tuple[int, Delta], None]) -> None:
    async for _ in deltas:
        pass


async def _events(
    first: tuple[int, Delta],
    deltas: AsyncGenerator[tuple[int, Delta], None],
    completions: dict[int, Completion],
    writer: Writer,
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(deltas):
        try:
            for chunk in writer.begin():
                yield event(chunk)
            for chunk in writer.take(*first):
                yield event(chunk)
            async for choice, delta in deltas:
                for chunk in writer.take(choice, delta):
                    yield event(chunk)
            for chunk in writer.end(completions):
                yield event(chunk)
        except ApiError as error:
            yield event(error.body)
        except Exception as error:
            log("request failed", logging.ERROR, error=error, request_id=request_id)
            yield event(internal(error).body)
        yield DONE


def event(value: dict[str, Any]) -> bytes:
    """A value as an event of a stream."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def usage(completions: Sequence[Completion], n: int) -> dict[str, Any]:
    """OpenAI's figures of a request's completions, ``n`` of each prompt."""
    prompts = [own for own in completions if own.index == 0]
    prompt, generated = (
        sum(len(own.prompt_token_ids) for own in prompts),
        sum(len(c.token_ids) for c in completions),
    )
    cached = sum(own.metrics.prefix_tokens for own in prompts if own.metrics is not None)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def figures(completions: Sequence[Completion]) -> dict[str, Any]:
    """What drafting brought, and where the time went."""
    known = [own.metrics for own in completions if own.metrics is not None]
    rounds, accepted = sum(own.rounds for own in known), sum(own.accepted_tokens for own in known)
    depth = max((len(own.accepted_by_depth) for own in known), default=0)
    return {
        "time_to_first_token": min((own.time_to_first_token or 0 for own in known), default=None),
        "queue_time": max((own.queue_time or 0 for own in known), default=None),
        "speculative_decoding": {
            "num_rounds": rounds,
            "num_drafts": sum(own.drafts for own in known),
            "num_draft_tokens": sum(own.drafted_tokens for own in known),
            "num_accepted_tokens": accepted,
            "num_accepted_tokens_per_pos": [
                sum(own.accepted_by_depth[place] for own in known if place < len(own.accepted_by_depth))
                for place in range(depth)
            ],
            "mean_acceptance_length": (rounds + accepted) / rounds if rounds else None,
        },
    }


def ending(reason: str | None, own: Delta | Completion) -> dict[str, Any]:
    """OpenAI's ``finish_reason`` of a choice, and vLLM's ``stop_reason``."""
    return {"finish_reason": reason, "stop_reason": own.stop_reason}


def rounds(delta: Delta) -> list[dict[str, Any]]:
    """What each round has added: its text before anything is taken out of it, and how many tokens."""
    return [{"text": own.text, "tokens": own.tokens} for own in delta.rounds]


def value_of(own: Logprob) -> float:
    """A log-probability that JSON can hold."""
    return max(own.logprob, _IMPOSSIBLE)


def prompt_logprobs(completion: Completion) -> list[dict[str, Any] | None] | None:
    """What is told of a prompt's tokens, as vLLM does."""
    if completion.prompt_logprobs is None:
        return None
    return [None if row is None else _described(row) for row in completion.prompt_logprobs]


def _described(row: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token): {"logprob": value_of(own), "rank": own.rank, "decoded_token": own.decoded_token}
        for token, own in row.items()
    }
