"""Addresses and health of bookies: the metadata view, joined with what this client has seen."""

from __future__ import annotations

from collections.abc import Sequence

from stratalog_bookies.client.core.bookie_health import BookieHealth
from stratalog_bookies.client.core.placement import Candidate
from stratalog_core.ports import Channel, Clock, Transport
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Bookie, bookie_key
from stratalog_metadata.state.changes import Change


class BookieDirectory:
    """Resolves bookie ids. A bookie that registers at another address is reached there from the next request on."""

    def __init__(
        self,
        view: MetadataView,
        transport: Transport,
        clock: Clock,
        health: BookieHealth,
        read_health: BookieHealth,
        last_resort: frozenset[str] = frozenset(),
    ) -> None:
        """``last_resort`` are bookies to read from only when all others have failed."""
        self._view = view
        self._transport = transport
        self._clock = clock
        self.health = health
        self.read_health = read_health
        self._last_resort = last_resort
        self._channels: dict[str, Channel] = {}
        self._load: dict[str, int] = {}
        self._down: set[str] | None = None
        self._unsubscribe = view.subscribe(self._on_changes)

    def channel(self, bookie: str) -> Channel | None:
        """The channel to ``bookie``; None if it is not registered."""
        channel = self._channels.get(bookie)
        if channel is None:
            record = self._view.find(Bookie, bookie_key(bookie))
            if record is None:
                return None
            channel = self._channels[bookie] = self._transport.channel(record.address)
        return channel

    def candidates(self, ledger_id: int | None = None) -> list[Candidate]:
        """All registered bookies. Live ones have a session and have not just failed.

        A bookie whose disk for ``ledger_id`` has failed or is full is listed as read-only.
        """
        now = self._clock.monotonic()
        return [
            Candidate(
                bookie_id=each.bookie_id,
                rack=each.rack,
                host=each.failure_host,
                live=each.session_id != 0 and not self.health.is_avoided(each.bookie_id, now),
                read_only=each.read_only if ledger_id is None else not each.takes(ledger_id),
                draining=each.draining,
                load=self._load.get(each.bookie_id, 0),
            )
            for each in self._view.all(Bookie)
        ]

    def registered(self) -> list[str]:
        return [each.bookie_id for each in self._view.all(Bookie)]

    def avoided(self) -> set[str]:
        """Bookies to ask last: those that recently failed or were slow, and those without a session."""
        if self._down is None:
            self._down = {each.bookie_id for each in self._view.all(Bookie) if each.session_id == 0} | self._last_resort
        now = self._clock.monotonic()
        return self._down | self.health.avoided(now) | self.read_health.avoided(now)

    def failed(self, bookie: str) -> None:
        self.health.failed(bookie, self._clock.monotonic())

    def read_failed(self, bookie: str) -> None:
        """``bookie`` was slow or failed to answer a read. Reads avoid it for a while; writes do not."""
        self.read_health.failed(bookie, self._clock.monotonic())

    def count_ledger(self, bookies: Sequence[str], change: int) -> None:
        """One more (or less) open ledger writes to ``bookies``; placement balances by this."""
        for bookie in bookies:
            self._load[bookie] = self._load.get(bookie, 0) + change

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.key.startswith("bookie/"):
                self._channels.pop(change.key.removeprefix("bookie/"), None)
                self._down = None

    def close(self) -> None:
        self._unsubscribe()
