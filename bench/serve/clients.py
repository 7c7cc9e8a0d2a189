"""Clients of a server: each request's way over a real socket, timed as its client sees it."""

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
    """One request, as its client saw it; times in seconds after the beginning.

    Attributes:
        due: When it was to be sent.
        status: Of the response; 0 where none came.
        first: When the first text came; None is never.
        last: When the last did.
        tokens: Of the answer, as the server counts them.
        prompt_tokens: Likewise of the prompt.
        cached_tokens: Those that the server had already.
        events: Of the stream.
        text: The answer.
        retry_after: What a refusal says of when to come again.
        error: Why there is no whole answer.
    """

    due: float
    status: int = 0
    first: float | None = None
    last: float | None = None
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    events: int = 0
    text: str = ""
    retry_after: str | None = None
    error: str | None = None
    done: bool = field(default=False, repr=False)

    @property
    def whole(self) -> bool:
        """Whether it was answered to its end."""
        return self.done and self.error is None and self.first is not None

    @property
    def first_token(self) -> float:
        """Seconds to the first text."""
        assert self.first is not None, "only of whole answers"
        return self.first - self.due

    @property
    def end_to_end(self) -> float:
        """Seconds to the last."""
        assert self.last is not None, "only of whole answers"
        return self.last - self.due

    @property
    def per_token(self) -> float | None:
        """Seconds a token after the first; None of a single one."""
        return (self.end_to_end - self.first_token) / (self.tokens - 1) if self.tokens > 1 else None

    def take(self, event: bytes, now: float) -> None:
        """Takes an event of the stream."""
        if not event.startswith(b"data:"):
            return  # a comment, which keeps the connection open
        data = event[5:].strip()
        self.events += 1
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
    """All clients of a server, on one event loop."""

    def __init__(self, url: str, asking: Asking, *, api_key: str | None = None, timeout: float = 600.0):
        """Connects when something is asked.

        Args:
            url: Of the server, without a path.
            asking: How requests are written.
            api_key: One that the server takes.
            timeout: Seconds without a byte after which a client gives up.
        """
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._asking, self._settings = asking, {"base_url": url, "headers": headers, "timeout": timeout}
        self._begun = 0.0

    def serve(
        self,
        line: Sequence[Conversation],
        *,
        concurrency: int | None = None,
        rate: float | None = None,
        seed: int = 0,
        step: Callable[[], object] = lambda: None,
    ) -> tuple[list[Answer], float]:
        """Has all conversations, so many at a time, or as they come.

        Args:
            line: The conversations.
            concurrency: So many go on at any time.
            rate: So many begin each second, whatever the server does; used where ``concurrency`` is None.
            seed: Of the arrivals.
            step: Called when one has ended.

        Returns:
            An answer for each request that was sent, and the seconds that all took.
        """
        return asyncio.run(self._serve(line, concurrency, rate, seed, step))

    async def _serve(
        self,
        line: Sequence[Conversation],
        concurrency: int | None,
        rate: float | None,
        seed: int,
        step: Callable[[], object],
    ) -> tuple[list[Answer], float]:
        answers: list[Answer] = []
        left = list(enumerate(line))[::-1]
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        async with httpx.AsyncClient(**self._settings, limits=limits) as client:
            self._begun = time.monotonic()

            async def work() -> None:
                while left:
                    number, own = left.pop()
                    await self._have(client, own, number, None, answers)
                    step()

            async def come(at: float) -> None:
                await asyncio.sleep(at - self._now)
                number, own = left.pop()
                await self._have(client, own, number, at, answers)
                step()

            if concurrency is None:
                assert rate is not None, "requests come at a rate, or so many at a time"
                times = poisson(rate, len(line), np.random.default_rng(seed))
                await asyncio.gather(*map(come, times))
            else:
                await asyncio.gather(*(work() for _ in range(concurrency)))
            return answers, self._now

    @property
    def _now(self) -> float:
        return time.monotonic() - self._begun

    async def _have(
        self,
        client: httpx.AsyncClient,
        own: Conversation,
        number: int,
        due: float | None,
        answers: list[Answer],
    ) -> None:
        """Has a conversation; one that is refused ends."""
        said: list[str] = []
        for turn, most in zip(own.turns, own.max_tokens, strict=True):
            said.append(turn)
            answer = Answer(self._now if due is None else due)
            due = None
            answers.append(answer)
            await self._ask(client, self._asking.body(said, most, number), answer)
            if not answer.whole:
                return
            said.append(answer.text)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, object], answer: Answer) -> None:
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
                        answer.take(event, now)
            if not answer.done and answer.error is None:
                answer.error = "the stream ended without [DONE]"
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
