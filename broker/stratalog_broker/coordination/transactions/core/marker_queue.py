"""The markers that decided transactions still need, by the broker that has to write them. Does no I/O.

A transaction is added once its outcome is durable and stays until every partition has its marker. The queue groups markers by
the present owner of their partition, gives out one request per broker at a time, and keeps those that failed, or have no owner,
until ``retry``. It never gives up a marker on its own: the shell removes those of partitions that are deleted, and those of
transactions whose coordinator has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from stratalog_broker.coordination.transactions.core.transaction import MarkedPartition, Transaction

REQUEST_MARKERS_MAX: Final = 1_000
"""Partitions in one request."""
OwnerOf = Callable[[MarkedPartition], int | None]
"""Returns the broker that owns a partition; None if no live broker does."""


class Decision(NamedTuple):
    """One decided transaction of one coordinator; ``coordinator`` numbers the applications of this broker."""

    coordinator: int
    transactional_id: str
    producer_id: int
    producer_epoch: int
    is_commit: bool
    coordinator_epoch: int
    version: int


def decision_of(transaction: Transaction, coordinator: int, coordinator_epoch: int) -> Decision:
    """Return the decision on a prepared transaction."""
    return Decision(
        coordinator, transaction.transactional_id, transaction.producer_id, transaction.producer_epoch,
        transaction.is_commit, coordinator_epoch, transaction.client_version,
    )  # fmt: skip


class Marker(NamedTuple):
    """The marker of a decision for one partition."""

    decision: Decision
    partition: MarkedPartition


class MarkerQueue:
    """See the module's header. Each marker is in exactly one place: waiting for a broker, under way, or held for ``retry``."""

    def __init__(self, owner_of: OwnerOf) -> None:
        self._owner_of = owner_of
        self._outstanding: dict[Decision, set[MarkedPartition]] = {}
        self._waiting: dict[int, dict[Marker, None]] = {}
        self._held: dict[Marker, None] = {}
        self._under_way: dict[int, frozenset[Marker]] = {}

    def __len__(self) -> int:
        """Return the number of markers that are not written yet."""
        return sum(map(len, self._outstanding.values()))

    @property
    def decisions(self) -> int:
        """Number of transactions that wait for markers."""
        return len(self._outstanding)

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    def held(self) -> Iterator[Marker]:
        """Yield the markers that failed or whose partition has no owner."""
        return iter(list(self._held))

    def add(self, decision: Decision, partitions: Iterable[MarkedPartition]) -> None:
        """Queue the markers of a decided transaction, which has at least one partition."""
        remaining = set(partitions)
        assert remaining, "a transaction without partitions is complete"
        if decision in self._outstanding:
            return
        self._outstanding[decision] = remaining
        for partition in sorted(remaining):
            self._queue(Marker(decision, partition))

    def _queue(self, marker: Marker) -> None:
        owner = self._owner_of(marker.partition)
        if owner is None:
            self._held[marker] = None
        else:
            self._waiting.setdefault(owner, {})[marker] = None

    def next_requests(self) -> Iterator[tuple[int, list[Marker]]]:
        """Yield a request for each broker that has markers and none under way; report each with ``answered``."""
        for broker in [broker for broker in self._waiting if broker not in self._under_way]:
            waiting = self._waiting[broker]
            markers = list(waiting)[:REQUEST_MARKERS_MAX]
            for marker in markers:
                del waiting[marker]
            if not waiting:
                del self._waiting[broker]
            markers = [marker for marker in markers if self._is_outstanding(marker)]
            if markers:
                self._under_way[broker] = frozenset(markers)
                yield broker, markers

    def answered(self, broker: int, written: Iterable[Marker]) -> list[Decision]:
        """The request to ``broker`` has ended: hold what was not written. Return the decisions that are complete now."""
        under_way = self._under_way.pop(broker)
        done = set(written) & under_way
        for marker in sorted(under_way - done):
            if self._is_outstanding(marker):
                self._held[marker] = None
        return [decision for marker in sorted(done) if (decision := self._written(marker)) is not None]

    def drop(self, marker: Marker, instead: MarkedPartition | None = None) -> Decision | None:
        """Remove a held marker whose partition is deleted; return its decision if that is complete now.

        ``instead`` gets the marker then: the same partition of another topic, which has the deleted one's name now.
        """
        self._held.pop(marker, None)
        remaining = self._outstanding.get(marker.decision)
        if instead is not None and remaining is not None and instead not in remaining:
            remaining.add(instead)
            self._queue(Marker(marker.decision, instead))
        return self._written(marker)

    def _written(self, marker: Marker) -> Decision | None:
        remaining = self._outstanding.get(marker.decision)
        if remaining is None:
            return None
        remaining.discard(marker.partition)
        if remaining:
            return None
        del self._outstanding[marker.decision]
        return marker.decision

    def retry(self) -> None:
        """Queue the held markers again, for the present owners of their partitions."""
        held, self._held = self._held, {}
        for marker in held:
            if self._is_outstanding(marker):
                self._queue(marker)

    def forget(self, coordinator: int) -> None:
        """Remove all markers of a coordinator that has resigned: its successor writes them."""
        self._outstanding = {each: rest for each, rest in self._outstanding.items() if each.coordinator != coordinator}

    def cancel(self, decision: Decision) -> None:
        """Remove the markers of one decision: another coordinator has taken over."""
        self._outstanding.pop(decision, None)

    def _is_outstanding(self, marker: Marker) -> bool:
        remaining = self._outstanding.get(marker.decision)
        return remaining is not None and marker.partition in remaining

    def validate_state(self) -> None:
        """Assert that every outstanding marker is in exactly one place; O(markers)."""
        places = [*self._held, *(each for waiting in self._waiting.values() for each in waiting)]
        places += [marker for markers in self._under_way.values() for marker in markers]
        assert len(places) == len(set(places))
        assert {Marker(each, name) for each, rest in self._outstanding.items() for name in rest} <= set(places)
