"""Middleware of all routes: request ids, access log, API keys, and draining."""

import contextlib
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections import Counter
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jetspec_jax.serve.errors import ApiError, internal
from jetspec_jax.serve.logs import log
from jetspec_jax.serve.service import Service

#: Paths that need no key and are served while the server drains.
OPEN = frozenset({"/health", "/metrics", "/version", "/ping", "/playground", "/", "/v1"})
_HEADER = "X-Request-Id"
_NAME = re.compile(r"[\w.:/+=-]{1,128}")


class Tracking:
    """Gives each request an id, counts and logs it, and handles unexpected errors."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the protocol ASGI defines."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get(_HEADER, "")
        # A proxy may have used the other length and see a second request in the rest (request smuggling).
        doubtful = "Content-Length" in headers and "Transfer-Encoding" in headers
        name = given if _NAME.fullmatch(given) else uuid.uuid4().hex
        record: dict[str, Any] = {"request_id": name}
        scope.setdefault("state", {})["record"] = record
        started, status = time.monotonic(), 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[_HEADER] = name
                if doubtful:
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        self._service.running += 1
        try:
            await self._app(scope, receive, send_named)
        except Exception as error:
            log("request failed", logging.ERROR, error=error, request_id=name)
            if not status:
                await internal(error).response()(scope, receive, send_named)
        finally:
            self._service.running -= 1
            self._note(scope, record, status, time.monotonic() - started)
        return None

    def _note(self, scope: Scope, record: dict[str, Any], status: int, seconds: float) -> None:
        route = scope.get("route")
        self._service.metrics.answered(getattr(route, "path", "other"), status)
        often = scope["path"] in OPEN and status < 400  # scraped every few seconds
        if not (often or self._service.settings.disable_access_log):
            client = scope.get("client")
            log(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                seconds=round(seconds, 4),
                client=client[0] if client else None,
                **record,
            )


class Gate:
    """Checks API keys and the number of requests per key, and refuses requests while the server drains."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        keys = service.settings.api_key
        self._keys = [(number, digest) for number, key in enumerate(keys) for digest in _digests(key)]
        self._running: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As the protocol ASGI defines."""
        if scope["type"] != "http" or scope["path"] in OPEN:
            return await self._app(scope, receive, send)
        try:
            key = self._check(scope)
        except ApiError as error:
            return await error.response()(scope, receive, send)
        self._running[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1
        return None

    def _check(self, scope: Scope) -> int:
        """The index of the request's key; -1 if the server has no keys."""
        key = self._key(scope) if self._keys else -1
        if self._service.draining:
            message = "the server is shutting down and accepts no more requests; try another server"
            headers = {"Retry-After": "1", "Connection": "close"}
            raise ApiError(503, message, code="draining", headers=headers)
        most = self._service.settings.max_requests_per_key
        if most is not None and self._running[key] >= most:
            message = f"this key has {most} requests already; try again when one has ended"
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})
        return key

    def _key(self, scope: Scope) -> int:
        kind, _, given = Headers(scope=scope).get("Authorization", "").encode("latin-1").partition(b" ")
        found = -1
        if kind.lower() == b"bearer":
            digest = hashlib.sha256(given.strip()).digest()
            for number, known in self._keys:
                if hmac.compare_digest(digest, known):
                    found = number
        if found < 0:
            problem = "the key is not one of this server's" if given else "a key is missing"
            message = f'{problem}; send the header "Authorization: Bearer KEY"'
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return found


def _digests(key: str) -> list[bytes]:
    """Digests of the bytes that clients may send for a key: in UTF-8, or in Latin-1 if possible."""
    texts = {key.encode()}
    with contextlib.suppress(UnicodeEncodeError):
        texts.add(key.encode("latin-1"))
    return [hashlib.sha256(text).digest() for text in texts]
