"""Connections of the server: those that send no complete request, or do not read the answer, are closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 10.0
"""Time in which a client must send a complete request head, from the connection or its first byte on."""

ANSWER_SECONDS = 60.0
"""Time after which a client that reads nothing of its answer is disconnected."""


class LimitedProtocol(H11Protocol):
    """HTTP protocol of uvicorn with limits on the time for a request and for reading its answer.

    The time of uvicorn applies only to connections that have been answered and send nothing more. Without these limits,
    a client that connects and sends nothing, or half a request, keeps a connection for as long as it likes.
    """

    request_seconds = REQUEST_SECONDS
    answer_seconds = ANSWER_SECONDS
    _request_timer: asyncio.TimerHandle | None = None
    _answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time for the first request."""
        super().connection_made(transport)
        self._request_timer = self._after(self.request_seconds)

    def data_received(self, data: bytes) -> None:
        """Stop the time if a request is complete, and start it at the first byte of the next one."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_request_timer()
        elif self._request_timer is None:  # further bytes do not extend it
            self._request_timer = self._after(self.request_seconds)

    def on_response_complete(self) -> None:
        """Stop the time of requests that arrived together with the previous one."""
        super().on_response_complete()
        self._stop_request_timer()

    def pause_writing(self) -> None:
        """Start the time in which the client must read a part of the answer."""
        super().pause_writing()
        if self._answer_timer is None:
            self._answer_timer = self._after(self.answer_seconds)

    def resume_writing(self) -> None:
        """Stop the time for reading: the client has read a part."""
        super().resume_writing()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all times."""
        self._stop_request_timer()
        if self._answer_timer is not None:
            self._answer_timer.cancel()
        super().connection_lost(exc)

    def _after(self, seconds: float) -> asyncio.TimerHandle:
        # Not `close`, which waits until the client has read everything.
        abort: Callable[[], None] = self.transport.abort
        return self.loop.call_later(seconds, abort)

    def _stop_request_timer(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None
