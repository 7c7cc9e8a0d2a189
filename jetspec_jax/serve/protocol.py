"""uvicorn's HTTP protocol with timeouts for slow clients, and JSON errors for invalid HTTP."""

import asyncio
import json
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from jetspec_jax.serve.errors import ApiError
from jetspec_jax.serve.settings import ServeSettings


def protocol_for(settings: ServeSettings) -> type[H11Protocol]:
    """The protocol class for a server's settings."""

    class Protocol(H11Protocol):
        """Closes connections that send no headers, or do not read the response."""

        _timers: dict[str, asyncio.TimerHandle]

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._timers = {}
            self._start("read", settings.body_timeout)

        def handle_events(self) -> None:
            """Starts the timeout again at the first bytes of a later request; stops it after headers."""
            super().handle_events()
            theirs, ours = self.conn.their_state, self.conn.our_state
            # The app has a timeout for bodies, except for the rest of a body after its response.
            unread = theirs is h11.SEND_BODY and ours is h11.DONE
            if theirs is not h11.IDLE and not unread:
                self._stop("read")
            elif "read" not in self._timers and (unread or self.conn.trailing_data[0]):
                self._start("read", settings.body_timeout)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._start("write", settings.send_timeout)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._stop("write")

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop("write")
            self._stop("read")
            super().connection_lost(exc)

        def _start(self, name: str, seconds: float) -> None:
            self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

        def _stop(self, name: str) -> None:
            if (timer := self._timers.pop(name, None)) is not None:
                timer.cancel()

        def send_400_response(self, msg: str) -> None:
            """Sends an error in the API's form, unless a response has begun, and closes the connection."""
            cycle = cast("RequestResponseCycle | None", self.cycle)
            if cycle is not None:
                # The request cannot be read or answered any more.
                cycle.disconnected = True
                cycle.message_event.set()
            if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.transport.close()
                return
            body = json.dumps(ApiError(400, msg, code="invalid_http").body).encode()
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(cast(bytes, self.conn.send(event)))
            self.transport.close()

    return Protocol
