"""The routes of the playground: the page, and rounds with their trees as a stream of events."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from typing import Any, ClassVar

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from sse_starlette import EventSourceResponse
from starlette.concurrency import iterate_in_threadpool
from starlette.types import Receive, Scope, Send

from jetspec_jax.demo import DEMO
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.prompts import EncodedPrompt, encode_text
from jetspec_jax.engine.request import DeadlinePassed
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.answers import DONE, event
from jetspec_jax.serve.bodies import Body, Listed, read_body
from jetspec_jax.serve.errors import ApiError, internal, of_generation, refused, wrong
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.messages import Message, TemplateFields, encode_messages
from jetspec_jax.serve.parsers import REASONING, special_tokens
from jetspec_jax.serve.playground.page import playground_page, policy_of
from jetspec_jax.serve.playground.traces import TracedRequest, Traces
from jetspec_jax.serve.service import GenerationRequest, Service

#: Most traced requests at a time: each has separate stores, and shares the device with all others.
MOST_TRACES = 2
_EXAMPLE = "def read_lines(path):\n"


class RoundsRequest(Body):
    """A request to trace: a prompt or a conversation, and sampling parameters."""

    prompt: str | None = None
    messages: Listed[Message] | None = None
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    budget: int | None = None

    hints: ClassVar[dict[str, str]] = dict.fromkeys(
        ("model", "stream", "n", "stop"), "it belongs to /v1/completions and /v1/chat/completions"
    )


def playground_routes(service: Service) -> APIRouter:
    """The routes; the page also uses those of OpenAI's API."""
    llm = service.llm.llm
    chats = bool(getattr(llm.target.tokenizer, "chat_template", None))
    data = {
        "model": service.names[0],
        "budget": llm.settings.budget,
        "chat": chats,
        # The demo pair writes Python, also where its template is used.
        "begins_as_chat": chats and service.name != DEMO,
        "keyed": bool(service.settings.api_key),
        "example": _EXAMPLE,
    }
    page = playground_page(data)
    headers = {
        "Content-Security-Policy": policy_of(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router, traces, timeout = APIRouter(), Traces(llm, MOST_TRACES), service.settings.request_timeout
    service.metrics.gauge("num_traces_running", "Requests that are watched.", lambda: traces.running)

    @router.get("/")
    @router.get("/v1")
    async def lead() -> Response:
        return Response(status_code=307, headers={"Location": "playground"})

    @router.get("/playground")
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @router.post("/playground/rounds")
    async def rounds(request: Request) -> Response:
        body = await read_body(request, RoundsRequest, service.settings)
        if spans(llm.target.mesh):
            message = (
                "several processes share this model, and no request can be watched: send it without trees"
            )
            raise ApiError(400, message, code="unsupported")
        prompt, params = await asyncio.to_thread(_read, service, body)
        names, param = RoundsRequest.model_fields, "prompt" if body.messages is None else "messages"
        await service.check(GenerationRequest([prompt], params, names, param, budget=body.budget))
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            return _Rounds(await asyncio.to_thread(traces.begin, prompt, params, body.budget, deadline))
        except DeviceMemoryError as error:
            message = "the device has no room for a request that is watched; send it without trees"
            raise ApiError(503, message, code="out_of_memory") from error

    return router


def _read(service: Service, body: RoundsRequest) -> tuple[EncodedPrompt, SamplingParams]:
    """The prompt and the sampling parameters of a body."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed")
    if (body.prompt is None) == (body.messages is None):
        raise wrong("prompt", "prompt or messages must be given, and not both")
    try:
        params = SamplingParams(**{name: getattr(body, name) for name in names})
    except (TypeError, ValueError) as error:
        raise refused(error, names) from error
    if body.messages is not None:
        prompt = encode_messages(service, body.messages, TemplateFields())
        # As in the text of `/v1/chat/completions`.
        tags = () if (parser := service.settings.reasoning_parser) is None else REASONING[parser].tags
        kept = special_tokens(service.llm.llm.target.tokenizer, tags)
        return replace(prompt, kept_special_tokens=kept), params
    assert body.prompt is not None
    try:
        return encode_text(service.llm.llm.target, body.prompt), params
    except (TypeError, ValueError) as error:
        raise refused(error, (), "prompt") from error


class _Rounds(EventSourceResponse):
    """Streams the rounds; closes the trace however the response ends, even before its first event."""

    def __init__(self, traced: TracedRequest):
        super().__init__(_events(traced.events()), sep="\n")
        self._traced = traced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # Waits for a round that may still run in a thread if the response was cancelled.
            self._traced.close()


async def _events(rounds: Generator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    try:
        async for value in iterate_in_threadpool(rounds):
            yield event(value)
    except DeadlinePassed as error:
        yield event(of_generation(error, (), {}).body)
    except Exception as error:
        log("request failed", logging.ERROR, error=error)
        yield event(internal(error).body)
    yield DONE
