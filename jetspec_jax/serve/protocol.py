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

        _write_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Starts the timeout for the headers."""
            super().connection_made(transport)
            self._read_timer = self.loop.call_later(settings.body_timeout, self.transport.abort)

        def handle_events(self) -> None:
            """Starts the timeout again at the first bytes of a later request; stops it after headers."""
            super().handle_events()
            theirs, ours = self.conn.their_state, self.conn.our_state
            # The app has a timeout for bodies, except for the rest of a body after its response.
            unread = theirs is h11.SEND_BODY and ours is h11.DONE
            if theirs is not h11.IDLE and not unread:
                self._cancel_read_timer()
            elif self._read_timer is None and (unread or self.conn.trailing_data[0]):
                self._read_timer = self.loop.call_later(settings.body_timeout, self.transport.abort)

        def pause_writing(self) -> None:
            """Starts the timeout for the client to read."""
            super().pause_writing()
            self._write_timer = self.loop.call_later(settings.send_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            """Stops the timeout for the client to read."""
            super().resume_writing()
            self._cancel_write_timer()

        def connection_lost(self, exc: Exception | None) -> None:
            """Stops all timeouts."""
            self._cancel_write_timer()
            self._cancel_read_timer()
            super().connection_lost(exc)

        def _cancel_read_timer(self) -> None:
            if self._read_timer is not None:
                self._read_timer.cancel()
                self._read_timer = None

        def _cancel_write_timer(self) -> None:
            if self._write_timer is not None:
                self._write_timer.cancel()
                self._write_timer = None

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
