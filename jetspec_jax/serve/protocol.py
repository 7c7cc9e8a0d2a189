"""HTTP as uvicorn speaks it, for clients that are slow or say what is no HTTP."""

import asyncio
import json
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from jetspec_jax.serve.errors import ApiError
from jetspec_jax.serve.settings import ServeSettings


def protocol_for(settings: ServeSettings) -> type[H11Protocol]:
    """The protocol of a server with some settings."""

    class Protocol(H11Protocol):
        """Drops who sends no headers, and who reads nothing of what is sent."""

        _stuck: asyncio.TimerHandle | None = None
        _silent: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Waits for headers so long."""
            super().connection_made(transport)
            self._silent = self.loop.call_later(settings.body_timeout, self.transport.abort)

        def handle_events(self) -> None:
            """Waits as long for what is missing of a later request, from its first bytes on."""
            super().handle_events()
            theirs, ours = self.conn.their_state, self.conn.our_state
            # A body that is read is the app's to wait for; one that has its answer already is nobody's.
            unread = theirs is h11.SEND_BODY and ours is h11.DONE
            if theirs is not h11.IDLE and not unread:
                self._hear()
            elif self._silent is None and (unread or self.conn.trailing_data[0]):
                self._silent = self.loop.call_later(settings.body_timeout, self.transport.abort)

        def pause_writing(self) -> None:
            """Waits so long for the client to read."""
            super().pause_writing()
            self._stuck = self.loop.call_later(settings.send_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            """Goes on."""
            super().resume_writing()
            self._release()

        def connection_lost(self, exc: Exception | None) -> None:
            """Waits for nothing any more."""
            self._release()
            self._hear()
            super().connection_lost(exc)

        def _hear(self) -> None:
            if self._silent is not None:
                self._silent.cancel()
                self._silent = None

        def _release(self) -> None:
            if self._stuck is not None:
                self._stuck.cancel()
                self._stuck = None

        def send_400_response(self, msg: str) -> None:
            """Says what is wrong in the form of all errors, unless an answer has begun, and closes."""
            cycle = cast("RequestResponseCycle | None", self.cycle)
            if cycle is not None:
                # Nothing of this request can be read or answered any more.
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
