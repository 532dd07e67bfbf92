"""What all connections of one port between our own processes hold together, and who waits or goes at the bound. Sans-IO.

Requests that are not answered count, and large frames from their announcement on. Beyond the bound no connection begins another
frame; one that has begun is read to its end, for only that makes room. Unsent replies have the same bound for themselves: the
client that has taken least of them is dropped, and asks again.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class PortConnection(Protocol):
    """A connection as its port's memory sees it."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of replies that the client has not taken."""
        ...

    def regulate(self) -> None:
        """Read on, or stop reading, as the bounds want it now."""
        ...

    def close(self, reason: str) -> None: ...


class PortMemory:
    """One for each port; ``connections`` are those that are open."""

    def __init__(self, connections: Collection[PortConnection], bytes_max: int) -> None:
        self._connections = connections
        self._bytes_max = bytes_max
        self.bytes_held = 0
        self.is_full = False

    def hold(self, size: int) -> None:
        """Charge a request, or a frame that has begun."""
        self.bytes_held += size
        if not self.is_full and self.bytes_held > self._bytes_max:
            self._set_full(True)

    def release(self, size: int) -> None:
        """It is answered, or gone."""
        self.bytes_held -= size
        # Not at once: every connection is told.
        if self.is_full and self.bytes_held <= self._bytes_max // 4 * 3:
            self._set_full(False)

    def _set_full(self, is_full: bool) -> None:
        self.is_full = is_full
        for connection in list(self._connections):
            connection.regulate()

    def bound_replies(self) -> None:
        """Drop clients until the others' unsent replies are within the bound."""
        unsent = {connection: connection.unsent_bytes for connection in self._connections}
        total = sum(unsent.values())
        while total > self._bytes_max:
            slowest = max(unsent, key=lambda connection: unsent[connection])
            total -= unsent.pop(slowest)
            slowest.close(f"it has not taken {slowest.unsent_bytes} bytes of replies, more than any other")
