"""Which connections a server gives up: clients that stay silent, that stop within a frame, or that do not take their answers.

A half-sent frame holds memory that is reserved for all of it, and an idle connection holds buffers and a descriptor, for as
long as its client likes: so each has a limit, whichever the port. Kafka's is ``connections.max.idle.ms``; of frames it asks
nothing. Pure: time is the number of looks, so that a stall of this process, during which nobody was read, counts little.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Protocol

LOOK_S: Final = 5.0
"""Time between two looks."""
FRAME_LOOKS_MAX: Final = 6
"""A frame may come slower than this for so many looks in a row (30 s)."""
FRAME_BYTES_PER_LOOK: Final = 64 * 1024
"""About 13 kB/s."""
IDLE_S: Final = 600.0


class Client(Protocol):
    """A connection as its server sees it."""

    @property
    def progress(self) -> object:
        """Equal to what it was only if the client has neither finished a frame nor taken anything since."""
        ...

    @property
    def partial_bytes(self) -> int:
        """Bytes that have come of a frame that is not whole; 0 while it is the server that does not read."""
        ...

    @property
    def is_owed(self) -> bool:
        """Whether it is the server's turn: it works on an answer."""
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
    """Looks at a server's connections; ``look`` is to be called every ``LOOK_S`` seconds."""

    def __init__(self, clients: Collection[Client], idle_s: float = IDLE_S) -> None:
        self._clients = clients
        self._idle_looks_max = max(1, round(idle_s / LOOK_S))
        self._seen: dict[Client, _Seen] = {}

    def look(self) -> None:
        """Close whoever has used up its patience."""
        known, self._seen = self._seen, {}
        for client in list(self._clients):
            seen = self._seen[client] = known.get(client) or _Seen(client)
            seen.look(client)
            if seen.slow_looks >= FRAME_LOOKS_MAX:
                client.close("the client stopped within a frame, or sends it too slowly")
            elif seen.idle_looks >= self._idle_looks_max:
                client.close("the client is silent, or does not take its answers")
