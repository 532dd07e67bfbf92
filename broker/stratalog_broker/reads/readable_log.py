"""Partitions as reads see them: an owned one (``PartitionLog``), or cold history that another broker owns.

A broker can serve the cold history of any partition (KIP-392). A snapshot of the metadata view says which offsets are only in
the object store. All of them are below the high watermark, and their transactions are decided, so nothing of the owner's state
is needed. Two histories of one partition are equal, so that concurrent fetches share their reads.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_core.partition_state.transactions import AbortedTransaction
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    Ledger,
    LedgerState,
    Log,
    ManifestPointer,
    TopicPartition,
    ledger_key,
    log_key,
    manifest_pointer_key,
)


class ReadableCore(Protocol):
    """Offsets of a partition, and the aborted transactions that are in memory."""

    @property
    def log_start_offset(self) -> int: ...

    @property
    def high_watermark(self) -> int: ...

    @property
    def first_unstable_offset(self) -> int | None: ...

    @property
    def last_stable_offset(self) -> int: ...

    @property
    def aborted_from(self) -> int: ...

    def has_no_aborted_from(self, offset: int) -> bool: ...

    def aborted_between(self, start_offset: int, end_offset: int) -> list[AbortedTransaction]: ...


class ReadableTail(Protocol):
    """The part of a partition that is in memory."""

    @property
    def start_offset(self) -> int: ...

    @property
    def erased_version(self) -> int: ...


class ReadableLog(Hashable, Protocol):
    """A partition whose batches can be read."""

    @property
    def topic_partition(self) -> TopicPartition: ...

    @property
    def core(self) -> ReadableCore: ...

    @property
    def tail(self) -> ReadableTail: ...

    def unsealed(self, ledger_id: int) -> tuple[Ledger, LedgerIndex] | None: ...


_NEVER: Final = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdOffsets:
    """``end_offset``: end of what is only in the object store. ``high_watermark``: as far as sealed ledgers show it."""

    log_start_offset: int
    end_offset: int
    high_watermark: int
    aborted_from: int = _NEVER

    @property
    def last_stable_offset(self) -> int:
        return self.end_offset

    @property
    def first_unstable_offset(self) -> int | None:
        """Transactions beyond the cold history may be open."""
        return self.end_offset

    def has_no_aborted_from(self, offset: int) -> bool:
        return False

    def aborted_between(self, start_offset: int, end_offset: int) -> list[AbortedTransaction]:
        return []


@dataclass(frozen=True, slots=True)
class _NoTail:
    start_offset: int = _NEVER
    erased_version: int = 0


_NO_TAIL: Final = _NoTail()


@dataclass(frozen=True, slots=True)
class ColdHistory:
    """The offsets of one partition that are only in the object store, for a broker that does not own the partition."""

    topic_partition: TopicPartition
    core: ColdOffsets = field(compare=False)
    tail: _NoTail = field(default=_NO_TAIL, compare=False)

    def unsealed(self, ledger_id: int) -> tuple[Ledger, LedgerIndex] | None:
        return None


def cold_history(view: MetadataView, topic_partition: TopicPartition) -> ColdHistory | None:
    """Return the offsets that are only in the object store; None if there are none."""
    identity = topic_partition.topic_id, topic_partition.partition
    pointer = view.find(ManifestPointer, manifest_pointer_key(*identity))
    log = view.find(Log, log_key(*identity))
    if pointer is None or log is None:
        return None
    start_offset = max(log.log_start_offset, pointer.start_offset)
    end_offset = min(pointer.end_offset, log.ledgers[0].base_offset) if log.ledgers else pointer.end_offset
    if start_offset >= end_offset:
        return None
    return ColdHistory(
        topic_partition,
        ColdOffsets(
            log_start_offset=start_offset, end_offset=end_offset, high_watermark=max(end_offset, _sealed_end(view, log))
        ),
    )


def _sealed_end(view: MetadataView, log: Log) -> int:
    """Return the end of the last sealed ledger; 0 if there is none on bookies."""
    if not log.ledgers:
        return 0
    newest = log.ledgers[-1]
    ledger = view.find(Ledger, ledger_key(newest.ledger_id))
    return ledger.end_offset if ledger is not None and ledger.state is LedgerState.CLOSED else newest.base_offset
