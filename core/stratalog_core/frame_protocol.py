"""One end of a connection between our own processes: cuts the byte stream into frames and gathers writes.

Small frames are read through one reused buffer, large ones into a buffer of their exact size that then belongs to the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, cast

from stratalog_core import framing
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer

READ_BUFFER_BYTES: Final = 64 * 1024
_log = logging.getLogger(__name__)


class FrameProtocol(asyncio.BufferedProtocol):
    """Cuts a byte stream into frames and gathers writes; subclasses say what a frame means."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._small = bytearray(READ_BUFFER_BYTES)
        self._small_view = memoryview(self._small)
        self._start = 0
        self._end = 0
        self._large: bytearray | None = None
        self._large_view = memoryview(b"")
        self._large_end = 0
        self._outgoing: list[Buffer] = []
        self._flush_scheduled = False

    def frame_received(self, frame: memoryview) -> None:
        """One whole frame; the view owns its bytes. Raise ``Corrupt`` to drop the connection."""
        raise NotImplementedError

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=4 * 1024 * 1024)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large_view[self._large_end :]
        return self._small_view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._large is not None:
                self._large_updated(nbytes)
            else:
                self._end += nbytes
                self._cut_frames()
        except Corrupt as bad:
            _log.warning("dropping a connection: %s", bad)
            self.abort()

    def _large_updated(self, nbytes: int) -> None:
        self._large_end += nbytes
        if self._large_end == len(self._large_view):
            frame, self._large = self._large_view, None
            self._large_view = memoryview(b"")
            self.frame_received(frame)

    def _cut_frames(self) -> None:
        while (available := self._end - self._start) >= framing.LENGTH_BYTES:
            length_field = int.from_bytes(self._small_view[self._start : self._start + 4], "big")
            whole = framing.frame_bytes(length_field)
            if whole > available:
                if whole > READ_BUFFER_BYTES // 2:
                    self._begin_large(whole, available)
                    return
                break
            frame = memoryview(self._small[self._start : self._start + whole])
            self._start += whole
            self.frame_received(frame)
        self._move_rest_to_front()

    def _begin_large(self, whole: int, available: int) -> None:
        self._large = bytearray(whole)
        self._large_view = memoryview(self._large)
        self._large_view[:available] = self._small_view[self._start : self._end]
        self._large_end = available
        self._start = self._end = 0

    def _move_rest_to_front(self) -> None:
        rest = self._end - self._start
        if rest and self._start:
            self._small[:rest] = self._small[self._start : self._end]
        self._start, self._end = 0, rest

    def write(self, parts: Sequence[Buffer]) -> None:
        """Queue buffers; all that is queued during this turn of the loop leaves in one call."""
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
