"""Keeps the tail cache and the entry indexes of all partitions within their shares of the broker's memory."""

from __future__ import annotations

from collections.abc import Collection

from stratalog_bookies.client import LedgerClient
from stratalog_broker.configs.memory import MemoryShares
from stratalog_broker.partitions.index_cache import IndexCache
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.tail_cache import TailCache
from stratalog_metadata.records import Log, ManifestPointer


class PartitionMemory:
    """One instance per broker."""

    def __init__(self, ledgers: LedgerClient, shares: MemoryShares) -> None:
        self._shares = shares
        self._partitions_and_open_bytes = 0
        self.tails = TailCache(shares.tail)
        self.indexes = IndexCache(ledgers, shares.indexes)

    @property
    def bytes_held(self) -> int:
        return self.tails.bytes_held + self.indexes.bytes_held + self._partitions_and_open_bytes

    def bound(self, partitions: Collection[PartitionLog]) -> None:
        """Bound the caches to what open indexes and partitions leave them. O(partitions): call every few seconds.

        The index of an open ledger cannot be evicted; that of a sealed one can. So when open indexes exceed half of the share,
        the ledgers with the largest indexes are rolled.
        """
        tail_bytes_max = self._shares.tail_beside(len(partitions))
        self.tails.bytes_max = tail_bytes_max
        self.tails.shrink()
        open_bytes = sum(map(_open_index_bytes, partitions))
        if open_bytes > self._shares.indexes // 2:
            wanted = open_bytes - self._shares.indexes // 4
            for partition in sorted(partitions, key=_open_index_bytes, reverse=True):
                if wanted <= 0:
                    break
                wanted -= _open_index_bytes(partition)
                partition.roll()
        self.indexes.resize(max(self._shares.indexes - open_bytes, 0))
        self._partitions_and_open_bytes = self._shares.tail - tail_bytes_max + open_bytes


def _open_index_bytes(partition: PartitionLog) -> int:
    ledger = partition.core.open
    return ledger.index.memory_bytes if ledger is not None else 0


def follow_log(log: PartitionLog | None, record: Log | None) -> None:
    """Move the partition's start, and drop from memory what a compaction may change: the records without a hot copy.

    Needed at the end of a takeover, too: retention may have moved the start since the takeover read the record.
    """
    if log is None or record is None:
        return
    log.core.move_start(record.log_start_offset)
    if log.configs.is_compacted:
        log.tail.drop_below(record.ledgers[0].base_offset if record.ledgers else log.core.next_offset)


def follow_pointer(log: PartitionLog | None, record: ManifestPointer) -> None:
    """Drop from memory the cold records of a partition of which some were erased, and what was read of them."""
    if log is not None and record.erased_version != log.tail.erased_version:
        log.tail.erased_version = record.erased_version
        log.tail.drop_below(record.end_offset)
