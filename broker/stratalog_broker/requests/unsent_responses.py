"""The memory share of responses that clients have not read and of records that parked fetches hold. Does no I/O.

When the share is used up, a fetch still gets one batch, so that every consumer makes progress. Because there can be one such
batch per connection, that alone is no bound: while the share is exceeded, the client that has read nothing for longest is
disconnected. It loses no record: a consumer reconnects and fetches from its own position.
"""

from __future__ import annotations

from typing import Protocol


class SlowClient(Protocol):
    """A connection with unsent responses."""

    @property
    def unsent_bytes(self) -> int: ...

    def all_sent(self) -> None:
        """Call ``release``; the client has read everything."""
        ...

    def close(self, reason: str) -> None: ...


class _Held:
    __slots__ = ("retained", "unsent")

    def __init__(self, retained: int, unsent: int) -> None:
        self.retained = retained
        self.unsent = unsent


class UnsentResponses:
    """Unsent responses by client. There is one instance per broker."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[SlowClient, _Held] = {}
        """Ordered by when the client last read something, longest ago first."""
        self.bytes_held = 0
        self.closed = 0
        """Clients disconnected because the share was exceeded."""

    @property
    def room(self) -> int:
        """Bytes left for another response; at least one, so that a fetch returns its first batch."""
        return max(self._bytes_max - self.bytes_held, 1)

    def hold(self, client: SlowClient, retained: int) -> None:
        """Set the charge for responses that ``client`` has not read to ``retained`` bytes in total."""
        held = self._held.get(client)
        if held is None:
            self._held[client] = _Held(retained, client.unsent_bytes)
            self.bytes_held += retained
        else:
            self.bytes_held += retained - held.retained
            held.retained, held.unsent = retained, client.unsent_bytes
        if self.bytes_held > self._bytes_max:
            self.look()
            self._close_slowest(client)

    def release(self, client: SlowClient) -> None:
        """Remove the charge of ``client``: it has read everything, or is gone."""
        held = self._held.pop(client, None)
        if held is not None:
            self.bytes_held -= held.retained

    def look(self) -> None:
        """Release clients that have read everything, and move those that have read something to the end."""
        for client, held in list(self._held.items()):
            unsent = client.unsent_bytes
            if not unsent:
                client.all_sent()
            elif unsent < held.unsent:
                held.unsent = unsent
                self._held[client] = self._held.pop(client)

    def _close_slowest(self, newest: SlowClient) -> None:
        while self.bytes_held > self._bytes_max:
            slowest = next((client for client in self._held if client is not newest), None)
            if slowest is None:
                return
            self.closed += 1
            self.release(slowest)
            slowest.close(
                f"clients have not read {self.bytes_held} bytes of responses, and this one has read none for the longest time"
            )

    def may_wait(self, size: int) -> bool:
        """Charge ``size`` bytes that a fetch keeps while parked; return False if they do not fit. ``waited`` returns them."""
        if not size:
            return True
        if self.bytes_held + size > self._bytes_max:
            return False
        self.bytes_held += size
        return True

    def waited(self, size: int) -> None:
        """Remove the charge of ``size`` bytes; the fetch is no longer parked."""
        self.bytes_held -= size
