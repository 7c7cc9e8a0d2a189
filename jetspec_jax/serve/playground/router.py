"""The routes of the playground: its page, and rounds with their trees as server-sent events."""

import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Generator
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette import EventSourceResponse
from starlette.concurrency import iterate_in_threadpool, run_in_threadpool
from starlette.types import Receive, Scope, Send

from jetspec_jax.checkpoint.chat_template import read_chats
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.prompts import EncodedPrompt, encode_chat, encode_text
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.playground.page import playground_page, policy_of
from jetspec_jax.serve.playground.traces import TooManyTraces, TracedRequest, Traces

#: Requests that are watched at a time: each has stores of its own, and takes turns with all others.
MOST_TRACES = 2
_EXAMPLE = "def read_lines(path):\n"
_log = logging.getLogger("jetspec_jax")


class RoundsRequest(BaseModel):
    """What is asked to be watched: a prompt or a conversation, and how it is sampled."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int = 128
    seed: int | None = None
    budget: Annotated[int, Field(ge=1)] | None = None


def playground_router(
    llm: LLM,
    model: str,
    *,
    capacity: int | None = None,
    keyed: bool = False,
    most_traces: int = MOST_TRACES,
) -> APIRouter:
    """The routes; the page also needs the OpenAI API beside them.

    Args:
        llm: The models that are served.
        model: The name that they are served under.
        capacity: Tokens of prompt and output together, at most; None is the whole context.
        keyed: Whether requests need a key.
        most_traces: Requests that are watched at a time.
    """
    tokenizer = llm.target.tokenizer
    data = {
        "model": model,
        "budget": llm.settings.budget,
        "chat": bool(getattr(tokenizer, "chat_template", None)),
        "keyed": keyed,
        "example": _EXAMPLE,
    }
    page = playground_page(data)
    headers = {
        "Content-Security-Policy": policy_of(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    router, traces = APIRouter(), Traces(llm, most_traces, capacity)

    @router.get("/playground", include_in_schema=False)
    async def show() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    @router.post("/playground/rounds", include_in_schema=False)
    async def rounds(asked: RoundsRequest) -> Response:
        try:
            traced = await run_in_threadpool(_begin, llm, traces, asked)
        except TooManyTraces as error:
            return _refusal(429, "rate_limit_error", error, {"Retry-After": "5"})
        except (TypeError, ValueError) as error:
            return _refusal(400, "invalid_request_error", error)
        except DeviceMemoryError as error:
            return _refusal(503, "server_error", error)
        return _Rounds(traced)

    return router


def _begin(llm: LLM, traces: Traces, asked: RoundsRequest) -> TracedRequest:
    params = SamplingParams(
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        max_tokens=asked.max_tokens,
        seed=asked.seed,
    )
    return traces.begin(_prompt(llm, asked), params, asked.budget)


def _prompt(llm: LLM, asked: RoundsRequest) -> EncodedPrompt:
    if (asked.prompt is None) == (asked.messages is None):
        raise ValueError("a request has either a prompt or messages")
    if asked.prompt is not None:
        return encode_text(llm.target, asked.prompt)
    [chat] = read_chats(asked.messages)
    return encode_chat(llm.target, chat, {})


class _Rounds(EventSourceResponse):
    """Streams the rounds; however the reply ends, before its first event too, the trace ends with it."""

    def __init__(self, traced: TracedRequest):
        super().__init__(_events(traced.events()), headers={"Cache-Control": "no-store"})
        self._traced = traced

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # A round that runs in a thread has ended by now: who is cancelled has waited for it.
            self._traced.close()


async def _events(rounds: Generator[str]) -> AsyncGenerator[dict[str, str]]:
    with contextlib.closing(rounds):
        try:
            async for one in iterate_in_threadpool(rounds):
                yield {"data": one}
        except Exception:
            _log.exception("a request that was watched failed")
            yield {"data": json.dumps({"error": {"message": "decoding failed", "type": "server_error"}})}
        yield {"data": "[DONE]"}


def _refusal(status: int, kind: str, error: Exception, headers: dict[str, str] | None = None) -> JSONResponse:
    told = {"message": str(error), "type": kind, "param": None, "code": None}
    return JSONResponse({"error": told}, status, headers)
