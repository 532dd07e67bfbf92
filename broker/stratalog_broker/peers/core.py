"""Requests to one peer over one connection: queue, order of responses, bounds, reconnection. Does no I/O.

Kafka's servers respond in the order of the requests, so a response belongs to the oldest request without one. A request that
was never written fails with ``Unavailable`` or ``Overloaded``: it certainly did not take effect. One that was written and
whose connection broke, or that took too long, fails with ``OutcomeUnknown``: it may have taken effect. The deadline of one
request ends the connection, because the responses to later requests wait behind it.

After a failed attempt to connect, requests fail at once until the back-off has passed, which doubles with each failure.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from stratalog_core.errors import Corrupt, OutcomeUnknown, Overloaded, StratalogError, Unavailable

REQUESTS_MAX: Final = 1_000
"""Unanswered requests of one connection, written or not."""
BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of unanswered requests of one connection."""
RESPONSE_BYTES_MAX: Final = 16 * 1024 * 1024
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
_LENGTH: Final = struct.Struct(">i")


class _State(Enum):
    IDLE = auto()
    CONNECTING = auto()
    CONNECTED = auto()


@dataclass(frozen=True, slots=True)
class Connect:
    """Open a connection; then call ``connected`` or ``connect_failed``."""


@dataclass(frozen=True, slots=True)
class Send:
    """Write a request frame, length included, to the connection."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Drop:
    """Abort the connection; ``lost`` need not be called for it."""


@dataclass(frozen=True, slots=True)
class Settle:
    """Report a request's outcome: the response frame without its length, or the error."""

    ticket: int
    outcome: bytes | StratalogError


Instruction = Connect | Send | Drop | Settle


class PeerCore:
    """``peer`` names the other broker in errors. Tickets are the caller's names for its requests, each used once."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._state = _State.IDLE
        self._queued: deque[tuple[int, bytes]] = deque()
        self._written: deque[tuple[int, int]] = deque()
        """Tickets and sizes of the requests without a response, oldest first."""
        self._bytes = 0
        self._received = bytearray()
        self._backoff_s = 0.0
        self._closed_until_s = 0.0

    def __len__(self) -> int:
        """Return the number of requests without an outcome."""
        return len(self._queued) + len(self._written)

    def request(self, ticket: int, frame: bytes, now_s: float) -> Sequence[Instruction]:
        """Queue one request, or write it if there is a connection."""
        if len(self) >= REQUESTS_MAX or self._bytes + len(frame) > BYTES_MAX:
            limits = f"{REQUESTS_MAX} requests and {BYTES_MAX} bytes"
            return (Settle(ticket, Overloaded(f"{len(self)} requests to {self._peer} wait; maxima are {limits}: retry later")),)
        if self._state is _State.IDLE and now_s < self._closed_until_s:
            return (Settle(ticket, Unavailable(f"{self._peer} could not be reached: retry later")),)
        self._bytes += len(frame)
        if self._state is _State.CONNECTED:
            return (self._write(ticket, frame),)
        self._queued.append((ticket, frame))
        if self._state is _State.CONNECTING:
            return ()
        self._state = _State.CONNECTING
        return (Connect(),)

    def _write(self, ticket: int, frame: bytes) -> Send:
        self._written.append((ticket, len(frame)))
        return Send(frame)

    def connected(self) -> Sequence[Instruction]:
        """The connection is open: write what is queued."""
        self._state = _State.CONNECTED
        self._backoff_s = 0.0
        queued, self._queued = self._queued, deque()
        return [self._write(ticket, frame) for ticket, frame in queued]

    def connect_failed(self, reason: str, now_s: float) -> Sequence[Instruction]:
        """No connection could be opened: fail what is queued, and back off."""
        self._state = _State.IDLE
        self._backoff_s = min(max(self._backoff_s * 2, BACKOFF_MIN_S), BACKOFF_MAX_S)
        self._closed_until_s = now_s + self._backoff_s
        return self._fail_all(f"{self._peer} could not be reached: {reason}")

    def received(self, data: bytes) -> Sequence[Instruction]:
        """Bytes arrived: settle the requests that they answer."""
        self._received += data
        settled: list[Instruction] = []
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if not self._written or not 0 < size <= RESPONSE_BYTES_MAX:
                broken = f"{self._peer} sent a response of {size} bytes to {len(self._written)} requests"
                return [*settled, Drop(), *self._disconnected(Corrupt(broken).message)]
            if len(self._received) < _LENGTH.size + size:
                break
            frame = bytes(self._received[_LENGTH.size : _LENGTH.size + size])
            del self._received[: _LENGTH.size + size]
            ticket, request_bytes = self._written.popleft()
            self._bytes -= request_bytes
            settled.append(Settle(ticket, frame))
        return settled

    def lost(self, reason: str) -> Sequence[Instruction]:
        """The connection broke."""
        return self._disconnected(reason) if self._state is _State.CONNECTED else ()

    def expired(self, ticket: int) -> Sequence[Instruction]:
        """A request has taken too long."""
        for position, (queued, frame) in enumerate(self._queued):
            if queued == ticket:
                del self._queued[position]
                self._bytes -= len(frame)
                return (Settle(ticket, Unavailable(f"no connection to {self._peer} in time")),)
        if any(written == ticket for written, _ in self._written):
            return [Drop(), *self._disconnected("a response took too long")]
        return ()

    def close(self, reason: str) -> Sequence[Instruction]:
        """End the connection, whatever its state."""
        was_open, self._state = self._state is not _State.IDLE, _State.IDLE
        self._received.clear()
        return [*([Drop()] if was_open else []), *self._fail_all(reason)]

    def _disconnected(self, reason: str) -> list[Instruction]:
        self._state = _State.IDLE
        self._received.clear()
        return self._fail_all(f"the connection to {self._peer} was lost before the response: {reason}")

    def _fail_all(self, reason: str) -> list[Instruction]:
        written, self._written = self._written, deque()
        queued, self._queued = self._queued, deque()
        self._bytes = 0
        return [
            *(Settle(ticket, OutcomeUnknown(reason)) for ticket, _ in written),
            *(Settle(ticket, Unavailable(reason)) for ticket, _ in queued),
        ]

    def validate_state(self) -> None:
        """Assert the bounds and that nothing waits without a connection."""
        assert len(self) <= REQUESTS_MAX
        assert 0 <= self._bytes <= BYTES_MAX
        assert self._state is not _State.IDLE or not len(self)
        assert self._state is _State.CONNECTED or not self._written
