"""A ledger client that only reads, without the timers of writers: for background work inside a bookie."""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_bookies.client.bookie_requests import BookieRequests
from stratalog_bookies.client.config import LedgerClientSettings
from stratalog_bookies.client.core.bookie_health import BookieHealth
from stratalog_bookies.client.directory import BookieDirectory
from stratalog_bookies.client.ledger_reads import LedgerReads
from stratalog_core.ports import Clock, Random, Transport
from stratalog_metadata.client.api import MetadataClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadClient:
    """Addresses of bookies, requests to them, and reads of ledgers."""

    directory: BookieDirectory
    requests: BookieRequests
    reads: LedgerReads


def open_read_client(
    metadata: MetadataClient, transport: Transport, clock: Clock, random: Random, *, last_resort: frozenset[str] = frozenset()
) -> ReadClient:
    """A read client with default time-outs; ``last_resort`` are bookies to read from only when all others have failed."""
    settings = LedgerClientSettings()
    avoid_s, avoid_s_max = settings.bookie_avoid_ms / 1000, settings.bookie_avoid_ms_max / 1000
    health, read_health = BookieHealth(avoid_s, avoid_s_max), BookieHealth(avoid_s, avoid_s_max)
    directory = BookieDirectory(metadata.view, transport, clock, health, read_health, last_resort)
    requests = BookieRequests(directory, settings.request_timeout_ms / 1000)
    reads = LedgerReads(
        requests, directory, random, hedge_s=settings.hedge_delay_ms / 1000, deadline_s=settings.read_deadline_ms / 1000
    )  # fmt: skip
    return ReadClient(directory=directory, requests=requests, reads=reads)
