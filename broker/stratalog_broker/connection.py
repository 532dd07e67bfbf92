"""One Kafka client connection: cuts frames, keeps answers in order, and bounds what the client can make us hold.

Kafka handles a connection's requests one after the other and answers in order. Here Produce requests start at once, because
clients pipeline them; all others wait for the one before; answers leave in the order of the requests. What is written in
one turn of the loop leaves in one call, which was measured to be worth a factor of three on small requests.

Reading: small frames come through one buffer that all connections share (so that an idle one costs next to nothing), a
frame that is not complete gets a buffer of its exact size, which then belongs to the request. A connection is not
read while it has too many unanswered requests, while its client does not take its answers, or, before a new frame, while
the broker holds too many request bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, cast

from stratalog_broker.context import RequestContext
from stratalog_broker.dispatch import dispatch_raw, find_handler, run_handler
from stratalog_broker.handlers.info import HandlerInfo, Waiting
from stratalog_broker.protocol.frame import LENGTH_BYTES, parse_head
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_core.receive_buffers import announced_memory

if TYPE_CHECKING:
    from stratalog_broker.server import ConnectionRegistry

_log = logging.getLogger(__name__)
SHARED_BUFFER_BYTES: Final = 64 * 1024
_WRITE_HIGH_BYTES: Final = 4 * 1024 * 1024
PRODUCE_KEY: Final = 0


class ClientConnection(asyncio.BufferedProtocol):
    """See the module's header. ``Connection`` of :mod:`stratalog_broker.context` is what handlers see of it."""

    def __init__(self, registry: ConnectionRegistry, listener: str) -> None:
        self.listener = listener
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._frame: memoryview | None = None
        self._frame_filled = 0
        self._order: deque[RequestContext] = deque()
        self._queue: deque[tuple[HandlerInfo, RequestContext, memoryview]] = deque()
        self._running: asyncio.Task[None] | None = None
        self._waiting: Waiting | None = None
        self._waiting_context: RequestContext | None = None
        self._outgoing: list[Buffer] = []
        self._flush_scheduled = False
        self._unsent = 0
        self._is_paused = False
        self._is_stalled = False
        self._is_writing_paused = False
        self.client_host = ""
        self._frames = 0

    # -- reading ---------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_BYTES)
        peer = transport.get_extra_info("peername")
        self.client_host = str(peer[0]) if isinstance(peer, tuple) else ""
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
                    self._received(frame)
            else:
                end = len(self._rest) + nbytes
                self._rest = b""
                self._cut_frames(self._registry.shared_buffer, end)
        except Corrupt as bad:
            self.close(bad.message)
        self._regulate()

    def _cut_frames(self, buffer: memoryview, end: int) -> None:
        """Handle the whole frames at the beginning of ``buffer`` and keep what follows."""
        position = 0
        while end - position >= LENGTH_BYTES:
            size = int.from_bytes(buffer[position : position + LENGTH_BYTES], "big", signed=True)
            if not 0 < size <= self._registry.services.settings.frame_bytes_max:
                raise Corrupt(f"a frame of {size} bytes; frame_bytes_max is {self._registry.services.settings.frame_bytes_max}")
            if not self._registry.charge(size):
                self._is_stalled = True
                self._registry.wait_for_room(self)
                break
            position += LENGTH_BYTES
            if end - position < size:
                frame = announced_memory(size)
                self._frame_filled = end - position
                frame[: self._frame_filled] = buffer[position:end]
                self._frame = frame
                return
            self._received(memoryview(bytearray(buffer[position : position + size])))
            position += size
        self._rest = bytes(buffer[position:end])

    def room_made(self) -> None:
        """The broker holds fewer request bytes again: go on where reading stopped."""
        self._is_stalled = False
        rest, self._rest = self._rest, b""
        try:
            self._cut_frames(memoryview(rest), len(rest))
        except Corrupt as bad:
            self.close(bad.message)
        self._regulate()

    @property
    def progress(self) -> tuple[int, int]:
        """See ``stratalog_core.silent_clients``."""
        return self._frames, self._transport.get_write_buffer_size() if self._transport is not None else 0

    @property
    def partial_bytes(self) -> int:
        """Bytes of a frame that has begun, if it is read."""
        return 0 if self._is_paused else self._frame_filled if self._frame is not None else len(self._rest)

    @property
    def is_owed(self) -> bool:
        """Whether requests are being handled that do not wait for the client to take answers."""
        return bool(self._order) and not self._is_writing_paused

    @property
    def is_idle(self) -> bool:
        return not self._order

    # -- handling --------------------------------------------------------------------------------------------------------

    def _received(self, frame: memoryview) -> None:
        self._frames += 1
        try:
            head = parse_head(frame)
        except Corrupt:
            self._registry.discharge(len(frame))
            raise
        context = RequestContext(
            self._registry.services,
            self,
            api_key=head.api_key,
            api_version=head.api_version,
            correlation_id=head.correlation_id,
            client_id=head.client_id,
            request_bytes=len(frame),
        )
        self._order.append(context)
        info = find_handler(context)
        if info is None:
            return
        body = frame[head.body_start :]
        if info.key == PRODUCE_KEY:
            dispatch_raw(info, context, body)
            return
        self._queue.append((info, context, body))
        if self._running is None and self._waiting is None:
            self._run_queue()

    def _run_queue(self) -> None:
        """Handle queued requests until one has to wait, or the client does not take its answers."""
        while self._queue and self._running is None and self._waiting is None and not self._is_writing_paused:
            info, context, body = self._queue.popleft()
            if info.handle_raw is not None:
                self._waiting = dispatch_raw(info, context, body)
                self._waiting_context = context
            else:
                self._running = self._loop.create_task(run_handler(info, context, body))
                self._running.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and task.exception() is not None:
            _log.error("handling a request failed", exc_info=task.exception())
            self.close("a request could not be handled")
        if self._transport is not None and not self._transport.is_closing():
            self._run_queue()

    def respond(self, context: RequestContext, parts: Sequence[Buffer]) -> None:
        """Queue an answer; it leaves when all before it have left."""
        order = self._order
        while order and order[0].response is not None:
            ready = order.popleft().response or ()
            self._outgoing.extend(ready)
            self._count_unsent(self._unsent + sum(map(len, ready)))
        if self._outgoing and not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        if self._is_paused:
            self._regulate()
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
            self._count_unsent(self._transport.get_write_buffer_size())

    def _count_unsent(self, unsent: int) -> None:
        self._registry.bytes_unsent += unsent - self._unsent
        self._unsent = unsent

    def released(self, request_bytes: int) -> None:
        """A request's bytes are no longer held by anybody."""
        self._registry.discharge(request_bytes)

    # -- bounds ----------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._is_writing_paused = True
        self._regulate()

    def resume_writing(self) -> None:
        self._is_writing_paused = False
        if self._transport is not None:
            self._count_unsent(self._transport.get_write_buffer_size())
        self._run_queue()
        self._regulate()

    def _regulate(self) -> None:
        too_many = len(self._order) >= self._registry.services.settings.connection_requests_max
        wanted = too_many or self._is_writing_paused or self._is_stalled or self._registry.is_draining
        if wanted == self._is_paused or self._transport is None or self._transport.is_closing():
            return
        self._is_paused = wanted
        if wanted:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def drain(self) -> None:
        """Take no more requests."""
        self._regulate()

    # -- the end ---------------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Drop the client, who learns nothing more."""
        if self._transport is not None and not self._transport.is_closing():
            _log.info("closing the connection of %s: %s", self.client_host, reason)
            self._transport.abort()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.closed(self)
        if self._frame is not None:
            self._registry.discharge(len(self._frame))
            self._frame = None
        # What waits has no use any more; anything else that has begun is finished, its answer goes nowhere.
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = self._waiting_context = None
        for _, context, _ in self._queue:
            context.release()
        self._queue.clear()
        self._outgoing.clear()
        self._count_unsent(0)
