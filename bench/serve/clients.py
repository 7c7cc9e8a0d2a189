"""Clients of a server, which time their requests over real sockets."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx
import numpy as np

from bench.load.arrivals import poisson
from bench.serve.sets import Asking, Conversation


@dataclass
class Answer:
    """The answer to a request, as its client sees it; times in seconds after the start.

    Attributes:
        due: The time at which the request was due.
        status: The response's status; 0 without a response.
        first: The time of the first text; None without text.
        last: The time of the last text.
        tokens: Counted by the server, as those of the prompt and those in its prefix cache.
        retry_after: The header Retry-After of a refusal.
        error: The reason for an incomplete answer.
    """

    due: float
    status: int = 0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    retry_after: str | None = None
    error: str | None = None
    done: bool = field(default=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether the answer is complete."""
        return self.done and self.error is None and self.first is not None

    @property
    def first_token(self) -> float:
        """Seconds to the first text."""
        assert self.first is not None, "the answer is not complete"
        return self.first - self.due

    @property
    def end_to_end(self) -> float:
        """Seconds to the last text."""
        assert self.last is not None, "the answer is not complete"
        return self.last - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first; None for a single token."""
        return (self.end_to_end - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None

    def add_event(self, event: bytes, now: float) -> None:
        """Adds an event of the stream."""
        if not event.startswith(b"data:"):
            return  # a comment, which keeps the connection open
        data = event[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        value = json.loads(data)
        if "error" in value:
            self.error = str(value["error"].get("message"))
            return
        for choice in value.get("choices", ()):
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if piece or choice.get("finish_reason"):
                self.text += piece
                self.first = now if self.first is None else self.first
                self.last = now
        if usage := value.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Clients:
    """The clients of a server, on one event loop."""

    def __init__(self, url: str, asking: Asking, *, api_key: str | None = None):
        """Opens no connection yet; the URL has no path."""
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        # A client disconnects after ten minutes without a byte.
        self._asking, self._settings = asking, {"base_url": url, "headers": headers, "timeout": 600.0}
        self._begun = 0.0

    def serve(
        self,
        conversations: Sequence[Conversation],
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        seed: int = 0,
        step: Callable[[], object] = lambda: None,
    ) -> tuple[list[Answer], float]:
        """Runs all conversations, at a fixed concurrency or with random arrivals.

        Args:
            concurrency: The number of concurrent conversations.
            rate: Without ``concurrency``, conversations that start per second, independent of the server.
            seed: The seed of the arrivals.
            step: Called at the end of each conversation.

        Returns:
            The answers to all requests, and the seconds of the run.
        """
        answers: list[Answer] = []
        waiting = list(enumerate(conversations))[::-1]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)

        async def converse(client: httpx.AsyncClient, due: float | None) -> None:
            number, conversation = waiting.pop()
            await self._converse(client, conversation, number, due, answers)
            step()

        async def work(client: httpx.AsyncClient) -> None:
            while waiting:
                await converse(client, None)

        async def arrive(client: httpx.AsyncClient, at: float) -> None:
            await asyncio.sleep(at - self._now)
            await converse(client, at)

        async def run() -> tuple[list[Answer], float]:
            async with httpx.AsyncClient(**self._settings, limits=limits) as client:
                self._begun = time.monotonic()
                if concurrency is None:
                    assert rate is not None, "either a concurrency or a rate"
                    times = poisson(rate, len(conversations), np.random.default_rng(seed))
                    await asyncio.gather(*(arrive(client, at) for at in times))
                else:
                    await asyncio.gather(*(work(client) for _ in range(concurrency)))
                return answers, self._now

        return asyncio.run(run())

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    async def _converse(
        self,
        client: httpx.AsyncClient,
        conversation: Conversation,
        number: int,
        due: float | None,
        answers: list[Answer],
    ) -> None:
        """Runs a conversation until its end or its first incomplete answer."""
        messages: list[str] = []
        for turn, most in zip(conversation.turns, conversation.max_tokens, strict=True):
            messages.append(turn)
            answer = Answer(self._now if due is None else due)
            due = None
            answers.append(answer)
            await self._send(client, self._asking.body(messages, most, number), answer)
            if not answer.whole:
                return
            messages.append(answer.text)

    async def _send(self, client: httpx.AsyncClient, body: dict[str, object], answer: Answer) -> None:
        try:
            async with client.stream("POST", self._asking.path, json=body) as response:
                answer.status = response.status_code
                if response.status_code != 200:
                    answer.retry_after = response.headers.get("Retry-After")
                    answer.error = (await response.aread()).decode(errors="replace")[:400]
                    return
                rest = b""
                async for piece in response.aiter_raw():
                    *events, rest = (rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
                    now = self._now
                    for event in events:
                        answer.add_event(event, now)
            if not answer.done and answer.error is None:
                answer.error = "the stream ended without [DONE]"
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
