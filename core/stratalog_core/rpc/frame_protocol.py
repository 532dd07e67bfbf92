"""One end of a connection between Stratalog's processes: cuts the byte stream into frames and gathers writes.

Frames are not copied: a frame is a view of the buffer that the socket was read into. The next frames follow in the same
buffer, or in another one (``receive_buffers.py``) when this is full. A large frame gets a buffer of its own. Small frames are
copied, so that a small reply that is kept does not keep the whole buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar, Final, cast

from stratalog_core.connections import framing
from stratalog_core.errors import Corrupt
from stratalog_core.memory.receive_buffers import ReceiveBuffers
from stratalog_core.ports import Buffer

READ_BUFFER_BYTES: Final = 64 * 1024
_GLANCE_BYTES: Final = 8 * 1024
_log = logging.getLogger(__name__)


class FrameProtocol(asyncio.BufferedProtocol):
    """Cuts a byte stream into frames and gathers writes. Subclasses interpret the frames."""

    first_buffer_bytes: ClassVar[int] = READ_BUFFER_BYTES
    read_buffer_bytes: ClassVar[int] = READ_BUFFER_BYTES
    """Buffer size once a frame has filled more than half of the first buffer; not smaller than ``first_buffer_bytes``."""
    copied_bytes_max: ClassVar[int] = READ_BUFFER_BYTES // 2
    """Frames up to this size are copied out; at most half a buffer."""

    def __init__(self, buffers: ReceiveBuffers) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._buffers = buffers
        self._buffer_bytes = self.first_buffer_bytes
        self._view = buffers.take(self._buffer_bytes)
        self._start = 0
        self._end = 0
        self._read_bytes = self._buffer_bytes
        self._is_shared = False
        self._outgoing: list[Buffer] = []
        self._flush_scheduled = False

    def frame_received(self, kind: int, method: int, correlation: int, body: memoryview) -> None:
        """Handle one whole frame. The body stays valid as long as a view of it is kept. Raise ``Corrupt`` to drop the
        connection.
        """
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * 1024 * 1024)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end : self._end + self._read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        try:
            self._cut_frames()
        except Corrupt as bad:
            _log.warning("dropping a connection: %s", bad)
            self.abort()

    def _cut_frames(self) -> None:
        whole = 0
        view = self._view
        while (available := self._end - self._start) >= framing.HEADER_BYTES:
            start = self._start
            whole, kind, method, correlation = framing.unpack_header(view, start)
            if whole > available:
                break
            self._start = start + whole
            body = view[start + framing.HEADER_BYTES : self._start]
            if whole > self.copied_bytes_max:
                self._is_shared = True
            else:
                body = memoryview(bytes(body))
            self.frame_received(kind, method, correlation, body)
            whole = 0
        if whole or self._is_shared or self._start < self._end:
            self._make_room(whole)
        else:
            self._start = self._end = 0

    def _make_room(self, whole: int) -> None:
        """Provide room for the rest of a frame of ``whole`` bytes (0: not known yet), or for the next frame."""
        if self._start == self._end and not self._is_shared:
            self._start = self._end = 0
        room = len(self._view) - self._start
        if self._end == len(self._view) or self._buffer_bytes // 2 < whole <= self.read_buffer_bytes // 2:
            # Put frames of this size together: one read takes several of them, and only the last one is copied.
            self._buffer_bytes = self.read_buffer_bytes
        if whole > self._buffer_bytes // 2:
            # Room for the next frame's header as well: one read returns the rest of this frame and the size of the next.
            if room != whole + _GLANCE_BYTES:
                self._go_on_in(whole + _GLANCE_BYTES)
                self._read_bytes = whole + _GLANCE_BYTES
        elif whole > room or room < self._buffer_bytes // 4:
            was_large = len(self._view) not in (self.first_buffer_bytes, self._buffer_bytes)
            self._go_on_in(self._buffer_bytes)
            # Large frames often follow each other, and bytes read before a frame's size is known have to be copied: read few.
            self._read_bytes = _GLANCE_BYTES if was_large else self._buffer_bytes
        else:
            self._read_bytes = self._buffer_bytes

    def _go_on_in(self, size: int) -> None:
        """Switch to another buffer, and copy the incomplete frame to it."""
        rest = self._view[self._start : self._end] if self._end > self._start else b""
        self._view = memoryview(b"")
        self._view = self._buffers.take(size)
        self._view[: len(rest)] = rest
        self._start, self._end, self._is_shared = 0, len(rest), False

    def write(self, parts: Sequence[Buffer]) -> None:
        """Queue buffers. All buffers queued in one turn of the loop are written in one call."""
        self._outgoing.extend(parts)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(outgoing)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool:
        return False
