"""One Kafka client connection: splits frames, sends responses in order, and bounds the memory that the client occupies.

Kafka handles a connection's requests one at a time and responds in order. Here Produce requests start immediately, because
clients pipeline them; every other request waits until the response of the previous one is passed to the transport and charged.
So one connection adds at most one response to the memory that is not charged yet. Responses are sent in request order. All
responses written in one event loop iteration are sent in one call, measured to be three times as fast on small requests.

Reading: small frames are read through one buffer that all connections share, so an idle connection costs almost nothing.
An incomplete frame gets a buffer of its exact size, which then belongs to the request. A connection is not read while it
has too many unanswered requests, while its client does not read responses, or, between two frames, while the requests of
all connections fill their share of the broker's memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from stratalog_broker.configs.memory import DECODED_BYTES_MAX, DECODED_FACTOR, REQUEST_BYTES
from stratalog_broker.network.dispatch import dispatch_raw, run_handler
from stratalog_broker.network.registry import ConnectionRegistry
from stratalog_broker.protocol.frame import LENGTH_BYTES, parse_head
from stratalog_broker.requests.context import UNKNOWN_SOFTWARE, RequestContext
from stratalog_broker.requests.handler_info import HandlerInfo, Waiting
from stratalog_broker.requests.principal import Principal
from stratalog_core.errors import Corrupt
from stratalog_core.memory.receive_buffers import announced_memory
from stratalog_core.memory.retained import retained_bytes
from stratalog_core.ports import Buffer

_log = logging.getLogger(__name__)
_WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024
_UNCOUNTED_BYTES: Final = 4096
"""Unsent bytes of one connection that are not charged: about the cost of an idle connection."""
PRODUCE_KEY: Final = 0


class ClientConnection(asyncio.BufferedProtocol):
    """See the module header. Handlers see it as the ``Connection`` of :mod:`stratalog_broker.requests.context`."""

    def __init__(self, registry: ConnectionRegistry, listener: str) -> None:
        self.listener = listener
        self._registry = registry
        self._admission = registry.admission
        self.principal: Principal | None = None
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._frame: memoryview | None = None
        self._frame_filled = 0
        self._order: deque[RequestContext] = deque()
        self._queue: deque[tuple[HandlerInfo, RequestContext, memoryview]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._ends_with_client = False
        self._waiting: Waiting | None = None
        self._waiting_context: RequestContext | None = None
        self._outgoing: list[Buffer] = []
        self._unflushed: RequestContext | None = None
        """The last request that is answered, Produce excepted, until its response is passed to the transport."""
        self._flush_scheduled = False
        self._retained = 0
        self._is_paused = False
        self._is_stalled = False
        self._muted: asyncio.TimerHandle | None = None
        self._is_writing_paused = False
        self.client_host = ""
        self.client_port = 0
        self.client_software = UNKNOWN_SOFTWARE
        self._frames = 0

    # -- reading ---------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        peer = transport.get_extra_info("peername")
        self.client_host, self.client_port = (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else ("", 0)
        self.principal = self._admission.principal_of(self.listener, self.client_host)
        if not self._registry.opened(self):
            self._transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._frame is not None:
            return self._frame[self._frame_filled :]
        shared = self._registry.shared_buffer
        rest = len(self._rest)
        shared[:rest] = self._rest
        return shared[rest:]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._frame is not None:
                self._frame_filled += nbytes
                if self._frame_filled == len(self._frame):
                    frame, self._frame = self._frame, None
                    self._registry.arrived(len(frame) + REQUEST_BYTES)
                    self._received(frame)
            else:
                end = len(self._rest) + nbytes
                self._rest = b""
                self._cut_frames(self._registry.shared_buffer, end)
        except Corrupt as bad:
            self.close(bad.message)
        self.regulate()

    def _cut_frames(self, buffer: memoryview, end: int) -> None:
        """Handle the complete frames at the start of ``buffer`` and keep the remaining bytes."""
        position = 0
        while end - position >= LENGTH_BYTES:
            size = int.from_bytes(buffer[position : position + LENGTH_BYTES], "big", signed=True)
            if not 0 < size <= self._registry.frame_bytes_max:
                raise Corrupt(f"a frame has {size} bytes; maximum is {self._registry.frame_bytes_max} (frame_bytes_max)")
            if not self._registry.charge(size + REQUEST_BYTES):
                self._is_stalled = True
                self._registry.wait_for_room(self)
                break
            position += LENGTH_BYTES
            if end - position < size:
                frame = announced_memory(size)
                self._frame_filled = end - position
                frame[: self._frame_filled] = buffer[position:end]
                self._frame = frame
                self._registry.arriving(size + REQUEST_BYTES)
                return
            self._received(memoryview(bytearray(buffer[position : position + size])))
            position += size
        self._rest = bytes(buffer[position:end])

    def room_made(self) -> None:
        """Resume at the frame where reading stopped; called when the broker holds fewer request bytes."""
        self._is_stalled = False
        rest, self._rest = self._rest, b""
        try:
            self._cut_frames(memoryview(rest), len(rest))
        except Corrupt as bad:
            self.close(bad.message)
        self.regulate()

    @property
    def progress(self) -> tuple[int, int]:
        """Frames received and bytes unsent; see ``stratalog_core.connections.silent_clients``."""
        return self._frames, self.unsent_bytes

    @property
    def partial_bytes(self) -> int:
        """Bytes received of an incomplete frame; 0 while reading is paused."""
        return 0 if self._is_paused else self._frame_filled if self._frame is not None else len(self._rest)

    @property
    def is_owed(self) -> bool:
        """Whether the client waits for a response: requests are unanswered and writing is not paused."""
        return bool(self._order) and not self._is_writing_paused

    @property
    def is_idle(self) -> bool:
        return not self._order

    # -- handling --------------------------------------------------------------------------------------------------------

    def _received(self, frame: memoryview) -> None:
        self._frames += 1
        if self._retained and not self.unsent_bytes:
            self.all_sent()
        try:
            head = parse_head(frame)
        except Corrupt:
            self._registry.discharge(len(frame) + REQUEST_BYTES)
            raise
        decoded_bytes = 0
        if head.api_key != PRODUCE_KEY:
            decoded_bytes = min(len(frame) * DECODED_FACTOR, DECODED_BYTES_MAX)
            self._registry.charge_more(decoded_bytes)
        context = RequestContext(
            self,
            api_key=head.api_key,
            api_version=head.api_version,
            correlation_id=head.correlation_id,
            client_id=head.client_id,
            request_bytes=len(frame) + REQUEST_BYTES + decoded_bytes,
            arrived_at_s=self._registry.clock.monotonic(),
        )
        self._order.append(context)
        info = self._admission.admit(context)
        if info is None:
            return
        if context.throttle_ms:
            self._mute(context.throttle_ms / 1000)
        body = frame[head.body_start :]
        if info.key == PRODUCE_KEY:
            dispatch_raw(info, context, body)
            return
        self._queue.append((info, context, body))
        if self._running is None and self._waiting is None:
            self._run_queue()

    def _run_queue(self) -> None:
        """Handle queued requests until one has to wait, is answered, or the client stops reading responses."""
        while (
            self._queue
            and self._running is None
            and self._waiting is None
            and self._unflushed is None
            and not self._is_writing_paused
        ):
            info, context, body = self._queue.popleft()
            if info.handle_raw is not None:
                self._waiting = dispatch_raw(info, context, body)
                self._waiting_context = context
            else:
                self._ends_with_client = info.ends_with_client
                self._running = self._loop.create_task(run_handler(info, context, body))
                self._running.add_done_callback(partial(self._finished, context))

    def _finished(self, context: RequestContext, task: asyncio.Task[None]) -> None:
        self._running = None
        if task.cancelled() or task.exception() is not None:
            context.release()
        if not task.cancelled() and task.exception() is not None:
            _log.error("handling a request failed", exc_info=task.exception())
            self.close("a request could not be handled")
        if self._transport is not None and not self._transport.is_closing():
            self._run_queue()

    def respond(self, context: RequestContext, parts: Sequence[Buffer]) -> None:
        """Queue a response; it is sent after the responses of all earlier requests."""
        registry = self._registry
        registry.requests.seconds[context.api_key].observe(registry.clock.monotonic() - context.arrived_at_s)
        order = self._order
        if parts and context.api_key != PRODUCE_KEY:
            self._unflushed = context
        while order and order[0].response is not None:
            self._outgoing.extend(order.popleft().response or ())
        if self._outgoing and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        if self._is_paused:
            self.regulate()
            if self._registry.is_draining and not order:
                self._registry.became_idle()
        if context is self._waiting_context and self._waiting is not None:
            self._waiting = self._waiting_context = None
            self._run_queue()

    def _flush(self) -> None:
        self._flush_scheduled = False
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outgoing)
            if self.unsent_bytes > _UNCOUNTED_BYTES:
                # uvloop sends at the end of this iteration; bytes left after that wait for the client.
                self._loop.call_soon(self._count_unsent, outgoing)
            if self._unflushed is not None and self._unflushed not in self._order:
                self._unflushed = None
                if self._queue:
                    self._loop.call_soon(self._run_queue)

    def _count_unsent(self, outgoing: Sequence[Buffer]) -> None:
        """Charge the whole write while the socket holds part of it: the transport may keep any of its views until then."""
        if self.unsent_bytes:
            self._retained += retained_bytes(outgoing)
            self._registry.responses.hold(self, self._retained)
        elif self._retained:
            self.all_sent()

    def all_sent(self) -> None:
        """Release the charge for unsent responses: the client has read everything, or is gone."""
        self._retained = 0
        self._registry.responses.release(self)

    @property
    def unsent_bytes(self) -> int:
        """Bytes of responses that the client has not read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def charge(self, more_bytes: int) -> bool:
        """Charge more bytes for a request that is held; False if there is no room for them."""
        return self._registry.charge(more_bytes)

    def released(self, request_bytes: int) -> None:
        """Discharge a request's bytes; nothing holds them any longer."""
        self._registry.discharge(request_bytes)

    # -- bounds ----------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        self.regulate()

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        if self._retained and not self.unsent_bytes:
            self.all_sent()
        self._run_queue()
        self.regulate()

    def regulate(self) -> None:
        """Pause or resume reading according to the bounds."""
        registry = self._registry
        too_many = len(self._order) >= registry.connection_requests_max
        # A partly received frame is already charged; only completing it frees memory.
        has_no_room = self._is_stalled or (registry.is_full and self._frame is None)
        wanted = too_many or self._is_writing_paused or has_no_room or registry.is_draining or self._muted is not None
        if wanted == self._is_paused or self._transport is None or self._transport.is_closing():
            return
        self._is_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _mute(self, for_s: float) -> None:
        """Stop reading for ``for_s`` because the client is over its quota. Requests already received are handled."""
        if self._muted is not None:
            self._muted.cancel()
        self._muted = self._loop.call_later(for_s, self._unmute)

    def _unmute(self) -> None:
        self._muted = None
        self.regulate()

    def drain(self) -> None:
        """Stop accepting requests."""
        self.regulate()

    # -- closing ---------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Abort the connection; unsent responses are lost."""
        if self._transport is None:
            return
        if not self._transport.is_closing():
            _log.info("closing the connection of %s: %s", self.client_host, reason)
        # One that is closing still waits for its client to read.
        self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.closed(self)
        if self._muted is not None:
            self._muted.cancel()
        if self._frame is not None:
            self._registry.discharge(len(self._frame) + REQUEST_BYTES)
            self._registry.arrived(len(self._frame) + REQUEST_BYTES)
            self._frame = None
        # Cancel requests that wait or only read. Let others finish, for they may change something, and discard their responses.
        if self._running is not None and self._ends_with_client:
            self._running.cancel()
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = self._waiting_context = None
        for _, context, _ in self._queue:
            context.release()
        self._queue.clear()
        self._outgoing.clear()
        self.all_sent()
