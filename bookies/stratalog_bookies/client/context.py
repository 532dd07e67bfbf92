"""What all writers, readers and recoveries of one client share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stratalog_bookies.client.add_sender import AddSender
from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.config import LedgerClientSettings
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.client.ledger_records import LedgerRecordPuts
from stratalog_core.errors import Overloaded
from stratalog_core.ports import Clock, Random
from stratalog_metadata.client.api import MetadataClient


class Holder(Protocol):
    """Something that holds entries, as a writer does."""

    @property
    def held_bytes(self) -> int: ...


class HeldBytes:
    """The bound on payload bytes that all writers together hold.

    Settling an entry does not report here: that would cost on each answer. The sum is made anew only when the bytes taken since
    the last time reach the bound.
    """

    def __init__(self, bytes_max: int, holders: dict[EntryHolder, None]) -> None:
        self._bytes_max = bytes_max
        self._holders = holders
        self._estimate = 0

    def take(self, payload_bytes: int) -> None:
        """Raises ``Overloaded`` beyond the bound; a single payload is always let in."""
        if self._estimate + payload_bytes > self._bytes_max:
            self._estimate = sum([holder.held_bytes for holder in self._holders])
            if self._estimate and self._estimate + payload_bytes > self._bytes_max:
                raise Overloaded(
                    f"{self._estimate} bytes wait for bookies; held_bytes_max is {self._bytes_max}: try again a little later"
                )
        self._estimate += payload_bytes


class EntryHolder(Holder, Protocol):
    """A holder that the client's tick looks after while it is busy."""

    def on_bookie_failed(self, bookie: str) -> None: ...
    def on_tick(self) -> bool:
        """False when there is nothing more to look after."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientContext:
    """Ports and shared parts. ``busy`` has every writer that holds entries, lacks a bookie, or has a LAC to tell."""

    metadata: MetadataClient
    clock: Clock
    random: Random
    settings: LedgerClientSettings
    directory: BookieDirectory
    requests: BookieRequests
    puts: LedgerRecordPuts
    sender: AddSender
    busy: dict[EntryHolder, None]
    held: HeldBytes
