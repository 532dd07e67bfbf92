"""Bounds the memory that all connections of one port hold together. Sans-IO.

Unanswered requests count, and large frames as soon as their length is known. Beyond the bound, no connection starts to read
another frame; a frame that has begun is read to its end, because only that frees memory. Unsent replies have a bound of their
own, of the same size: beyond it the client with the most unsent bytes is disconnected and has to ask again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class PortConnection(Protocol):
    """The part of a connection that ``PortMemory`` uses."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that the client has not received yet."""
        ...

    def regulate(self) -> None:
        """Pause or resume reading, as the bounds now require."""
        ...

    def close(self, reason: str) -> None: ...


class PortMemory:
    """One instance per port; ``connections`` are the open ones."""

    def __init__(self, connections: Collection[PortConnection], bytes_max: int) -> None:
        self._connections = connections
        self._bytes_max = bytes_max
        self.bytes_held = 0
        self.is_full = False

    def hold(self, size: int) -> None:
        """Count a request, or a frame that has begun."""
        self.bytes_held += size
        if not self.is_full and self.bytes_held > self._bytes_max:
            self._set_full(True)

    def release(self, size: int) -> None:
        """Stop counting a request that is answered, or whose connection is lost."""
        self.bytes_held -= size
        # Hysteresis: each change is O(connections).
        if self.is_full and self.bytes_held <= self._bytes_max // 4 * 3:
            self._set_full(False)

    def _set_full(self, is_full: bool) -> None:
        self.is_full = is_full
        for connection in list(self._connections):
            connection.regulate()

    def bound_replies(self) -> None:
        """Disconnect clients, the slowest first, until the unsent replies of the others are within the bound."""
        unsent = {connection: connection.unsent_bytes for connection in self._connections}
        total = sum(unsent.values())
        while total > self._bytes_max:
            slowest = max(unsent, key=lambda connection: unsent[connection])
            total -= unsent.pop(slowest)
            slowest.close(f"it has not read {slowest.unsent_bytes} bytes of replies, more than any other connection")
