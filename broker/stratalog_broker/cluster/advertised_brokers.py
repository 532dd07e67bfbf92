"""The brokers listed in Metadata responses: the live ones, and dead ones for ``DEAD_ADVERTISED_S``.

Otherwise a dead broker would be missing from the first response with its partitions' new leaders. librdkafka (2.16) drops a
broker that is no longer listed, and with it the leaders that it has just learned, and asks again a second later. Listing a dead
broker a little longer is harmless: it leads no partition, so no client needs to reach it.

If no broker is live, because this one listens and is not registered yet or has lost its session, it lists itself: it answers,
so it can be reached. After a response without brokers librdkafka does not ask again, and a CreateTopics call waits for its
controller until it times out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Broker
from stratalog_metadata.state.changes import Change

DEAD_ADVERTISED_S: Final = 10.0
"""Several times the duration of a failover and of clients' metadata retries, which are a second apart."""
RECENTLY_DEAD_MAX: Final = 100


class AdvertisedBrokers:
    """Follows the view from construction until ``close``."""

    def __init__(self, view: MetadataView, clock: Clock) -> None:
        self._view = view
        self._clock = clock
        self._itself: list[Broker] = []
        self._recently_dead: dict[int, tuple[float, Broker]] = {}
        """By id: until when the broker is listed (monotonic seconds) and its last record; the earliest death first."""
        self._unsubscribe = view.subscribe(self._on_changes)

    def answering(self, itself: Broker) -> None:
        """Set the record of the broker that answers: it is listed while no broker is live."""
        self._itself = [itself]

    def live(self) -> list[Broker]:
        """Return the live brokers, sorted by id; if there are none, the broker that answers."""
        return sorted(self._view.all(Broker), key=lambda broker: broker.broker_id) or self._itself

    def with_recently_dead(self, live: list[Broker]) -> list[Broker]:
        """Return ``live`` and recently dead brokers, sorted by id; only the live one if an id or address is in use again."""
        if not self._recently_dead:
            return live
        now = self._clock.monotonic()
        self._recently_dead = {broker_id: gone for broker_id, gone in self._recently_dead.items() if gone[0] > now}
        ids = {broker.broker_id for broker in live}
        dead = [broker for _, broker in self._recently_dead.values() if broker.broker_id not in ids]
        by_address = {(broker.host, broker.port): broker for broker in dead}
        by_address |= {(broker.host, broker.port): broker for broker in live}
        return sorted({*by_address.values(), *live}, key=lambda broker: broker.broker_id)

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.after is not None and isinstance(change.after.record, Broker):
                self._recently_dead.pop(change.after.record.broker_id, None)
            elif change.after is None and change.before is not None and isinstance(change.before.record, Broker):
                self._died(change.before.record)

    def _died(self, broker: Broker) -> None:
        if len(self._recently_dead) == RECENTLY_DEAD_MAX:
            del self._recently_dead[next(iter(self._recently_dead))]
        self._recently_dead[broker.broker_id] = self._clock.monotonic() + DEAD_ADVERTISED_S, broker

    def close(self) -> None:
        """Stop following the view."""
        self._unsubscribe()
