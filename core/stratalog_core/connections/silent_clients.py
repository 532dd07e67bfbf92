"""Closes connections whose clients stay silent, stop within a frame, or do not take their replies. Pure.

A half-sent frame holds memory reserved for all of it, and an idle connection holds buffers and a descriptor, so every port
limits both. Kafka limits idle time only (``connections.max.idle.ms``). Time is measured in looks (calls of ``look``), so that a
stall of this process, during which it read nothing, does not count against the clients.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

LOOK_S: Final = 5.0
"""Time between two looks."""
FRAME_LOOKS_MAX: Final = 6
"""A frame may arrive slower than ``FRAME_BYTES_PER_LOOK`` for this many looks in a row (30 s)."""
FRAME_BYTES_PER_LOOK: Final = 64 * 1024
"""About 13 kB/s."""
IDLE_S: Final = 600.0


class Client(Protocol):
    """The part of a connection that ``SilentClients`` uses."""

    @property
    def progress(self) -> object:
        """A value that changes when the client finishes a frame or takes bytes of a reply."""
        ...

    @property
    def partial_bytes(self) -> int:
        """Bytes received of an incomplete frame; 0 while the server has paused reading."""
        ...

    @property
    def is_owed(self) -> bool:
        """Whether the server owes this client a response."""
        ...

    def close(self, reason: str) -> None: ...


class _Seen:
    __slots__ = ("idle_looks", "partial_bytes", "progress", "slow_looks")

    def __init__(self, client: Client) -> None:
        self.progress = client.progress
        self.partial_bytes = client.partial_bytes
        self.idle_looks = 0
        self.slow_looks = 0

    def look(self, client: Client) -> None:
        progress, partial_bytes = client.progress, client.partial_bytes
        if progress != self.progress:
            self.idle_looks = self.slow_looks = 0
        elif partial_bytes:
            is_slow = partial_bytes < self.partial_bytes + FRAME_BYTES_PER_LOOK
            self.slow_looks = self.slow_looks + 1 if is_slow else 0
        elif client.is_owed:
            self.idle_looks = self.slow_looks = 0
        else:
            self.idle_looks += 1
        self.progress, self.partial_bytes = progress, partial_bytes


class SilentClients:
    """Checks a server's connections. Call ``look`` every ``LOOK_S`` seconds."""

    def __init__(self, clients: Collection[Client], idle_s: float = IDLE_S) -> None:
        self._clients = clients
        self._idle_looks_max = max(1, round(idle_s / LOOK_S))
        self._seen: dict[Client, _Seen] = {}

    def look(self) -> None:
        """Close the connections that have exceeded a limit."""
        known, self._seen = self._seen, {}
        for client in list(self._clients):
            seen = self._seen[client] = known.get(client) or _Seen(client)
            seen.look(client)
            if seen.slow_looks >= FRAME_LOOKS_MAX:
                client.close("the client stopped within a frame, or sends it too slowly")
            elif seen.idle_looks >= self._idle_looks_max:
                client.close("the client is idle, or does not read its responses")
