"""Offsets that transactions have committed and not decided yet: part of a group coordinator's durable state. Does no I/O.

The records of TxnOffsetCommit are in transactional batches. Their offsets take effect with the commit marker of their producer
and are dropped with its abort marker (KIP-98). An offset that was committed later, with or without a transaction, replaces an
earlier one; a deletion removes both, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey


class PendingOffset(NamedTuple):
    """``order`` rises from record to record of the partition."""

    order: int
    committed: CommittedOffset


class PendingOffsets:
    """By producer id. A producer has at most one transaction, so at most one offset for each name."""

    def __init__(self) -> None:
        self._by_producer: dict[int, dict[OffsetKey, PendingOffset]] = {}
        self._by_group: dict[str, dict[tuple[str, int], set[int]]] = {}
        """Producer ids by group, topic and partition."""
        self._next_order = 0
        self._count = 0

    def __len__(self) -> int:
        """Return the number of pending offsets."""
        return self._count

    def __iter__(self) -> Iterator[tuple[int, OffsetKey, CommittedOffset]]:
        """Yield producer id, key and offset in the order of their records."""
        found = [
            (pending.order, producer_id, key, pending.committed)
            for producer_id, offsets in self._by_producer.items()
            for key, pending in offsets.items()
        ]
        for _, producer_id, key, committed in sorted(found, key=lambda each: each[0]):
            yield producer_id, key, committed

    def names_of(self, group_id: str) -> set[tuple[str, int]]:
        """Return topic and partition of the group's pending offsets."""
        return set(self._by_group.get(group_id, ()))

    def has_group(self, group_id: str) -> bool:
        return group_id in self._by_group

    def add(self, producer_id: int, key: OffsetKey, committed: CommittedOffset) -> None:
        """A transaction committed an offset."""
        self._next_order += 1
        offsets = self._by_producer.setdefault(producer_id, {})
        self._count += key not in offsets
        offsets[key] = PendingOffset(self._next_order, committed)
        self._by_group.setdefault(key.group_id, {}).setdefault((key.topic, key.partition), set()).add(producer_id)

    def replaced(self, key: OffsetKey) -> None:
        """An offset was committed without a transaction, or deleted: all pending ones are older."""
        producers = self._by_group.get(key.group_id, {}).get((key.topic, key.partition), ())
        for producer_id in list(producers):
            self._remove(producer_id, key)

    def ended(self, producer_id: int, *, commit: bool) -> list[tuple[OffsetKey, CommittedOffset]]:
        """The producer's transaction has ended: return the offsets that take effect now."""
        offsets = dict(self._by_producer.get(producer_id, {}))
        for key in offsets:
            self._remove(producer_id, key)
        if not commit:
            return []
        for key, pending in offsets.items():
            self._replaced_by(key, pending.order)
        return [(key, pending.committed) for key, pending in offsets.items()]

    def _replaced_by(self, key: OffsetKey, order: int) -> None:
        """Remove pending offsets of other transactions that are older than one that takes effect."""
        producers = self._by_group.get(key.group_id, {}).get((key.topic, key.partition), ())
        for other in [each for each in producers if self._by_producer[each][key].order < order]:
            self._remove(other, key)

    def _remove(self, producer_id: int, key: OffsetKey) -> None:
        offsets = self._by_producer[producer_id]
        del offsets[key]
        self._count -= 1
        if not offsets:
            del self._by_producer[producer_id]
        of_group = self._by_group[key.group_id]
        producers = of_group[key.topic, key.partition]
        producers.discard(producer_id)
        if not producers:
            del of_group[key.topic, key.partition]
        if not of_group:
            del self._by_group[key.group_id]
