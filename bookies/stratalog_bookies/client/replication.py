"""The parts that all writers and recoveries of one client share to replicate entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stratalog_bookies.client.add_sender import AddSender
from stratalog_bookies.client.config import LedgerClientSettings
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_core.errors import Overloaded
from stratalog_core.ports import Random


class Holder(Protocol):
    """Something that holds entries, such as a writer."""

    @property
    def held_bytes(self) -> int: ...


class HeldBytes:
    """Bounds the payload bytes that all writers hold together.

    Settling an entry is not reported here: that would cost on every answer. The sum is computed again only when the bytes taken
    since the last time reach the bound.
    """

    def __init__(self, bytes_max: int, holders: dict[EntryHolder, None]) -> None:
        self._bytes_max = bytes_max
        self._holders = holders
        self._estimate = 0

    def take(self, payload_bytes: int) -> None:
        """Raises ``Overloaded`` above the bound; a single payload is always accepted."""
        if self._estimate + payload_bytes > self._bytes_max:
            self._estimate = sum([holder.held_bytes for holder in self._holders])
            if self._estimate and self._estimate + payload_bytes > self._bytes_max:
                raise Overloaded(
                    f"{self._estimate} bytes are waiting for bookies; maximum is {self._bytes_max} (held_bytes_max): retry"
                )
        self._estimate += payload_bytes


class EntryHolder(Holder, Protocol):
    """A holder that the client's tick calls while it is busy."""

    def on_bookie_failed(self, bookie: str) -> None: ...
    def on_tick(self) -> bool:
        """One tick. Returns False if the holder is idle and needs no more ticks."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Replication:
    """The parts that replicating entries needs.

    ``busy`` has every writer that holds entries, lacks a bookie, or has a LAC to send.
    """

    settings: LedgerClientSettings
    directory: BookieDirectory
    sender: AddSender
    busy: dict[EntryHolder, None]
    random: Random
