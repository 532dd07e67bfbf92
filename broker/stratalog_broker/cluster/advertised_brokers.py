"""Brokers as Metadata responses name them: those that live, and for some seconds those that did.

A broker that dies is gone from the answer that tells who leads its partitions now. librdkafka (2.16) drops the broker that is
named no more together with what it held for it, the leaders that it has just learned, too, and asks again a second later. Named
for a while longer, the dead broker leads nothing, and nobody needs to talk to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Broker
from stratalog_metadata.state.changes import Change

AFTERLIFE_S: Final = 10.0
"""A failover, and the rounds in which clients ask for leaders (a second apart), several times over."""
DEPARTED_MAX: Final = 100


class NamedBrokers:
    """Follows the view from when it is made."""

    def __init__(self, view: MetadataView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._departed: dict[int, tuple[float, Broker]] = {}
        """Until when, and how it was named; the one that went first at the beginning."""
        self._unsubscribe = view.subscribe(self._on_changes)

    def living(self) -> list[Broker]:
        """By id."""
        return sorted(self._view.all(Broker), key=lambda broker: broker.broker_id)

    def and_departed(self, living: list[Broker]) -> list[Broker]:
        """Those, and who departed lately, by id; no id twice, and nobody at the address of who lives or departed later."""
        if not self._departed:
            return living
        now = self._clock.monotonic()
        self._departed = {broker_id: gone for broker_id, gone in self._departed.items() if gone[0] > now}
        by_address = {(broker.host, broker.port): broker for _, broker in self._departed.values()}
        by_address |= {(broker.host, broker.port): broker for broker in living}
        return sorted({*by_address.values(), *living}, key=lambda broker: broker.broker_id)

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.after is not None and isinstance(change.after.record, Broker):
                self._departed.pop(change.after.record.broker_id, None)
            elif change.after is None and change.before is not None and isinstance(change.before.record, Broker):
                self._departs(change.before.record)

    def _departs(self, broker: Broker) -> None:
        if len(self._departed) == DEPARTED_MAX:
            del self._departed[next(iter(self._departed))]
        self._departed[broker.broker_id] = self._clock.monotonic() + AFTERLIFE_S, broker

    def close(self) -> None:
        """Follow the view no longer."""
        self._unsubscribe()
