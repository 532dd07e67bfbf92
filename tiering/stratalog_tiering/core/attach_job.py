"""Turns a partition's batches from elsewhere into segments: batches in, byte parts out. No I/O.

Every batch must be whole and match its CRC, and must continue the offsets and the leader epochs. Segments end where no
transaction is open, and say which were aborted. The state of producers is not kept: their ids are from another cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stratalog_core.batches.batch import BatchHeader, check_batch
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.partition_state.replay_state import ABORTED_MAX, ReplayState
from stratalog_core.ports import Buffer
from stratalog_metadata.records import Topic
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.block_cipher import SegmentEncryption
from stratalog_tiering.format.manifest import SegmentEntry, SegmentOptions, segment_entry
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.segment import AbortedTransaction, SegmentIdentity, SegmentWriter, WrittenSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentSizes:
    """The target size of a block and the maximum of a segment of several batches, in bytes."""

    block_bytes: int
    segment_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeSegment:
    """The manifest entry of a finished segment, and the hashes of its Merkle leaves."""

    entry: SegmentEntry
    leaves: bytes


class AttachJob:
    """The segments of one partition, one after the other.

    For each: ``begin``, then ``add`` and ``take_parts`` until ``is_complete`` or the batches end, then ``finish``.
    """

    def __init__(
        self, cluster_id: str, topic: Topic, partition: int, base_offset: int, policy: TierPolicy, sizes: SegmentSizes
    ) -> None:
        self._cluster_id = cluster_id
        self._topic = topic
        self._partition = partition
        self._policy = policy
        self._sizes = sizes
        self._state = ReplayState(base_offset)
        self._base_offset = base_offset
        """Where the segment begins that is being made."""
        self._bytes = 0
        self._oldest_ms = self._newest_ms = 0
        self._key = ""
        self._writer: SegmentWriter | None = None
        self.is_complete = False
        """Whether the next batch belongs to another segment."""

    @property
    def next_offset(self) -> int:
        """The offset that the next batch must begin at."""
        return self._state.next_offset

    @property
    def last_epoch(self) -> int:
        """The leader epoch of the last batch; 0 if there is none."""
        epochs = self._state.leader_epochs
        return epochs[-1].epoch if epochs else 0

    def next_key(self, random_id: int) -> str:
        """A key for the next segment."""
        return segment_key(self._topic.topic_id, self._partition, self.next_offset, self.last_epoch, random_id)

    def begin(self, key: str, encryption: SegmentEncryption | None = None) -> None:
        """Begin a segment, whose object will be at ``key``."""
        self._base_offset = self.next_offset
        identity = SegmentIdentity(
            cluster_id=self._cluster_id, topic_id=self._topic.topic_id, topic_name=self._topic.name, partition=self._partition,
            base_offset=self.next_offset, ledger_ids=(),
        )  # fmt: skip
        self._writer = SegmentWriter(identity, self._sizes.block_bytes, self._policy.zstd_level, encryption)
        self._key, self._bytes, self.is_complete = key, 0, False

    def add(self, batches: Sequence[Buffer]) -> int:
        """Add batches until the segment is complete; returns how many were added. Raises ``Corrupt``, ``Invalid``."""
        for count, batch in enumerate(batches):
            header = check_batch(batch)
            self.is_complete = self._ends_before(header, len(batch))
            if self.is_complete:
                return count
            self._add(batch, header)
        return len(batches)

    def take_parts(self) -> list[Buffer]:
        """The parts of the segment that have become ready, in order."""
        return self._open.take_parts()

    def finish(self, created_at_ms: int) -> tuple[MadeSegment, list[Buffer]]:
        """Finish the segment; returns it and its last parts. Raises ``Invalid`` if a transaction is open."""
        state = self._state
        transactions = state.transactions.since(self._base_offset)
        if state.transactions.aborted_from > self._base_offset:
            raise Invalid(
                f"partition {self._partition} has more than {ABORTED_MAX} aborted transactions from offset {self._base_offset}"
                f" to {state.next_offset}: choose a smaller stratalog.tier.segment.bytes"
            )
        for ongoing in transactions.open:
            raise Invalid(
                f"partition {self._partition} ends at offset {state.next_offset} within a transaction of producer"
                f" {ongoing.producer_id}, open since offset {ongoing.first_offset}: let it end, then attach again"
            )
        aborted = [AbortedTransaction(**one._asdict()) for one in transactions.aborted]
        written = self._open.finish(
            created_at_ms=created_at_ms, leader_epochs=state.leader_epochs, aborted_transactions=aborted
        )
        return MadeSegment(entry=self._entry(written), leaves=written.leaves), self._open.take_parts()

    @property
    def _open(self) -> SegmentWriter:
        assert self._writer is not None, "a segment is begun"
        return self._writer

    def _ends_before(self, header: BatchHeader, batch_bytes: int) -> bool:
        """Whether the segment would exceed its size, or span more time than retention wants; never in a transaction."""
        if not self._bytes or self._state.transactions.first_offsets:
            return False
        span_ms = self._policy.segment_span_ms
        oldest, newest = min(self._oldest_ms, header.base_timestamp_ms), max(self._newest_ms, header.max_timestamp_ms)
        return self._bytes + batch_bytes > self._sizes.segment_bytes or (span_ms is not None and newest - oldest > span_ms)

    def _add(self, batch: Buffer, header: BatchHeader) -> None:
        expected = self.next_offset
        if header.base_offset > expected:
            raise Invalid(
                f"partition {self._partition} has no records at offsets {expected}..{header.base_offset - 1}: a compacted or"
                " incomplete history cannot be attached"
            )
        if header.record_count != header.last_offset_delta + 1:
            raise Invalid(
                f"partition {self._partition}: the batch at offset {header.base_offset} has {header.record_count} records for"
                f" {header.last_offset_delta + 1} offsets: a compacted history cannot be attached"
            )
        if header.leader_epoch < self.last_epoch:
            raise Corrupt(
                f"partition {self._partition}: the batch at offset {header.base_offset} has leader epoch {header.leader_epoch},"
                f" an earlier one has {self.last_epoch}"
            )
        self._open.append(batch, header)
        self._state.replay(header, batch)
        self._oldest_ms = min(self._oldest_ms, header.base_timestamp_ms) if self._bytes else header.base_timestamp_ms
        self._newest_ms = max(self._newest_ms, header.max_timestamp_ms) if self._bytes else header.max_timestamp_ms
        self._bytes += len(batch)

    def _entry(self, written: WrittenSegment) -> SegmentEntry:
        entry = segment_entry(self._key, written)
        return msgspec.structs.replace(entry, options=SegmentOptions(storage_class=self._policy.storage_class))
