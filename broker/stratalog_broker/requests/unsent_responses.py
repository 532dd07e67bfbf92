"""Responses that clients have not taken, and records that waiting fetches hold: their share of the broker's memory. Sans-IO.

Beyond the share a fetch gets one batch, so that every consumer gets on. That alone bounds nothing, because there are as many
such batches as connections: so while the share is exceeded, the client that has taken nothing for longest is closed. It loses
no record: a consumer connects again and fetches from its own position.
"""

from __future__ import annotations

from typing import Protocol


class SlowClient(Protocol):
    """A connection with unsent responses."""

    @property
    def unsent_bytes(self) -> int: ...

    def all_sent(self) -> None:
        """The client has taken everything; calls ``release``."""
        ...

    def close(self, reason: str) -> None: ...


class _Held:
    __slots__ = ("retained", "unsent")

    def __init__(self, retained: int, unsent: int) -> None:
        self.retained = retained
        self.unsent = unsent


class UnsentResponses:
    """One for the broker."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._held: dict[SlowClient, _Held] = {}
        """Who took something longest ago comes first."""
        self.bytes_held = 0
        self.closed = 0
        """Clients that were closed for the sake of the others."""

    @property
    def room(self) -> int:
        """Bytes that a response may have beside those that are held; at least one, for a fetch's first batch."""
        return max(self._bytes_max - self.bytes_held, 1)

    def hold(self, client: SlowClient, retained: int) -> None:
        """Charge what ``client`` has not taken, ``retained`` bytes in all."""
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
        """``client`` has taken everything, or is gone."""
        held = self._held.pop(client, None)
        if held is not None:
            self.bytes_held -= held.retained

    def look(self) -> None:
        """Release clients that have taken everything, and note who has taken something."""
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
            slowest.close(f"clients have not taken {self.bytes_held} bytes of responses, and this one took none for longest")

    def may_wait(self, size: int) -> bool:
        """Whether a fetch may keep ``size`` bytes of records while it waits for more; ``waited`` gives them back."""
        if not size:
            return True
        if self.bytes_held + size > self._bytes_max:
            return False
        self.bytes_held += size
        return True

    def waited(self, size: int) -> None:
        """A fetch no longer waits with so many bytes."""
        self.bytes_held -= size
