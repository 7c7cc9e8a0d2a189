"""Shared parts of responses to completions and chats: usage, log-probabilities, and events of a stream."""

import contextlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any, ClassVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from sse_starlette import EventSourceResponse

from jetspec_jax.async_llm import Delta
from jetspec_jax.engine.admission import CheckedRequest
from jetspec_jax.engine.detokenizer import detokenizer_of
from jetspec_jax.engine.output import Completion, Logprob
from jetspec_jax.serve.errors import CLIENT_LEFT, ApiError, internal
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.sampling import SamplingFields
from jetspec_jax.serve.service import ClientLeft, GenerationRequest, Service, unless_left

#: The log-probability reported for an impossible token, because JSON has no infinity.
_IMPOSSIBLE = -9999.0
#: The last event of every stream.
DONE = b"data: [DONE]\n\n"


class Writer(ABC):
    """Formats deltas and completions as response objects, whose ids begin with `KIND`."""

    KIND: ClassVar[str]
    CHUNK: ClassVar[str]

    def __init__(
        self,
        request_id: str,
        model: str,
        body: SamplingFields,
        generation: GenerationRequest,
        service: Service,
    ):
        self._head = {"id": f"{self.KIND}-{request_id}", "created": int(time.time()), "model": model}
        self._body, self._generation, self._service = body, generation, service
        self._detokenizer = detokenizer_of(service.llm.llm.target.tokenizer)

    def begin(self) -> Iterable[dict[str, Any]]:
        """The first chunks of a stream."""
        return ()

    @abstractmethod
    def feed(self, choice: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """A chunk of a delta, unless it would be empty."""

    def end(self, completions: dict[int, Completion]) -> Iterable[dict[str, Any]]:
        """A chunk with the usage, if requested."""
        if self._body.includes_usage:
            yield self._chunk([]) | usage_fields(list(completions.values()), self._service)

    @abstractmethod
    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The response with all choices and the usage."""

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._head | {"object": self.CHUNK, "choices": choices}


async def answer(
    service: Service, request: Request, generation: GenerationRequest, writer: Writer, body: SamplingFields
) -> Response:
    """Generates completions, and sends them as one response or as a stream of events.

    A stream begins with the first tokens, so earlier errors become an HTTP status.
    """
    checked = await service.check(generation)
    record = request.state.record
    record["prompt_tokens"] = sum(len(prompt.ids) for prompt in generation.prompts)
    completions: dict[int, Completion] = {}
    deltas = _choices(service, generation, checked, completions, record)
    try:
        if not body.stream:
            async with contextlib.aclosing(deltas):
                await unless_left(request, _exhaust(deltas))
            return JSONResponse(writer.whole([completions[choice] for choice in sorted(completions)]))
        first = await unless_left(request, anext(deltas))
    except ClientLeft:
        await deltas.aclose()
        return Response(status_code=CLIENT_LEFT)
    prompt_tokens = record["prompt_tokens"] if body.counts_in_every_chunk else None
    events = _events(first, deltas, completions, writer, record["request_id"], prompt_tokens)
    return EventSourceResponse(events, sep="\n")


async def _choices(
    service: Service,
    generation: GenerationRequest,
    checked: Sequence[CheckedRequest],
    completions: dict[int, Completion],
    record: dict[str, Any],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Deltas with their choice indices; stores finished completions."""
    async with contextlib.aclosing(service.generate(generation, checked)) as deltas:
        async for number, delta in deltas:
            choice = number * generation.params.n + delta.index
            record["completion_tokens"] = record.get("completion_tokens", 0) + len(delta.token_ids)
            if delta.completion is not None:
                completions[choice] = delta.completion
                record.setdefault("finish_reasons", []).append(delta.finish_reason)
            yield choice, delta


async def _exhaust(deltas: AsyncGenerator[tuple[int, Delta], None]) -> None:
    async for _ in deltas:
        pass


async def _events(
    first: tuple[int, Delta],
    deltas: AsyncGenerator[tuple[int, Delta], None],
    completions: dict[int, Completion],
    writer: Writer,
    request_id: str,
    prompt_tokens: int | None,
) -> AsyncGenerator[bytes, None]:
    """The events of a stream; with ``prompt_tokens`` each chunk has the usage so far."""
    generated = 0

    def chunk_event(chunk: dict[str, Any]) -> bytes:
        return event(chunk if prompt_tokens is None else {"usage": _counts(prompt_tokens, generated)} | chunk)

    async with contextlib.aclosing(deltas):
        try:
            for chunk in writer.begin():
                yield chunk_event(chunk)
            following: tuple[int, Delta] | None = first
            while following is not None:
                choice, delta = following
                generated += len(delta.token_ids)
                for chunk in writer.feed(choice, delta):
                    yield chunk_event(chunk)
                following = await anext(deltas, None)
            for chunk in writer.end(completions):
                yield chunk_event(chunk)
        except ApiError as error:
            yield event(error.body)
        except Exception as error:
            log("request failed", logging.ERROR, error=error, request_id=request_id)
            yield event(internal(error).body)
        yield DONE


def event(value: dict[str, Any]) -> bytes:
    """A value as a server-sent event."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()


def usage_fields(completions: Sequence[Completion], service: Service) -> dict[str, Any]:
    """The ``usage`` of a request's completions, and their ``metrics``: times, and vLLM's of acceptance."""
    known = [completion.metrics for completion in completions if completion.metrics is not None]
    return {
        "usage": _usage(completions),
        "metrics": {
            "time_to_first_token": min((metrics.time_to_first_token or 0 for metrics in known), default=None),
            "queue_time": max((metrics.queue_time or 0 for metrics in known), default=None),
            "speculative_decoding": _acceptance(completions, service),
        },
    }


def _counts(prompt: int, generated: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def _usage(completions: Sequence[Completion]) -> dict[str, Any]:
    prompts = [completion for completion in completions if completion.index == 0]
    prompt = sum(len(completion.prompt_token_ids) for completion in prompts)
    generated = sum(len(c.token_ids) for c in completions)
    accepted = sum(sum(c.accept_lengths) - c.rounds for c in completions)
    drafted = sum(sum(c.tree_depths) for c in completions)
    cached = sum(completion.metrics.prefix_tokens for completion in prompts if completion.metrics is not None)
    return {
        **_counts(prompt, generated),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def _acceptance(completions: Sequence[Completion], service: Service) -> dict[str, Any] | None:
    """The acceptance metrics of vLLM, if the server has them; None for several completions.

    A step is a round with drafted tokens, of which those on the tree's longest path count, so a chain
    has vLLM's figures. As in vLLM, accepted tokens are counted before any cut.
    """
    level = service.settings.per_request_spec_decode_metrics
    if level == "none" or len(completions) > 1:
        return None
    [completion], most = completions, service.llm.num_spec_tokens
    rounds = zip(completion.accept_lengths, completion.tree_depths, strict=True)
    steps = [(length - 1, depth) for length, depth in rounds if depth]
    accepted, drafted = [step[0] for step in steps], [step[1] for step in steps]
    made = {
        "mean_acceptance_length": 1 + sum(accepted) / len(steps) if steps else 1.0,
        "draft_acceptance_rate": sum(accepted) / sum(drafted) if steps else 0.0,
        "acceptance_histogram": [accepted.count(length) for length in range(most + 1)],
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": most,
    }
    if level == "detailed":
        made |= {"per_step_accepted": accepted, "per_step_drafted": drafted}
    return made


def ending(reason: str | None, choice: Delta | Completion) -> dict[str, Any]:
    """OpenAI's ``finish_reason`` of a choice, and vLLM's ``stop_reason``."""
    return {"finish_reason": reason, "stop_reason": choice.stop_reason}


def rounds(delta: Delta) -> list[dict[str, Any]]:
    """The text and number of tokens that each round added, before reasoning or tool calls are removed."""
    return [{"text": piece.text, "tokens": piece.tokens} for piece in delta.rounds]


def value_of(entry: Logprob) -> float:
    """A log-probability without infinity, for JSON."""
    return max(entry.logprob, _IMPOSSIBLE)


def prompt_logprobs(completion: Completion) -> list[dict[str, Any] | None] | None:
    """The log-probabilities of a prompt's tokens, in vLLM's form."""
    if completion.prompt_logprobs is None:
        return None
    return [None if row is None else _described(row) for row in completion.prompt_logprobs]


def _described(row: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token): {"logprob": value_of(entry), "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in row.items()
    }
