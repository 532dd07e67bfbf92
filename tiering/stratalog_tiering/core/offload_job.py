"""Turns the entries of sealed ledgers into one segment: entries in, byte parts out. No I/O.

Every entry must arrive, in order and undamaged; every batch must continue the offsets; each ledger must end exactly where its
record says. Checkpoint entries are not copied: the partition's state is replayed from them and the batches that follow, and the
footer holds the state at the segment's end.

The footer says which transactions that overlap the segment were aborted. Those that are open at its end may be decided in the
ledgers after it, which are read as far as that takes. If they are not, the segment cannot be made yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from stratalog_core.batches.batch import check_batch
from stratalog_core.batches.checkpoint import (
    EpochStart,
    OngoingTransaction,
    ProducerEntry,
    decode_checkpoint,
    is_checkpoint,
    part_position,
)
from stratalog_core.errors import Corrupt, Retriable
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.ports import Buffer
from stratalog_metadata.records import Ledger, Topic
from stratalog_tiering.format.block_cipher import SegmentEncryption
from stratalog_tiering.format.manifest import SegmentEntry, SegmentOptions, segment_entry
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.segment import (
    AbortedTransaction,
    SegmentFooter,
    SegmentIdentity,
    SegmentWriter,
    WrittenSegment,
)


class SourceEntry(Protocol):
    """An entry, as a ledger reader returns it."""

    @property
    def entry_id(self) -> int: ...
    @property
    def payload(self) -> memoryview: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRange:
    """The next entries to read: ``first`` to ``last`` of ``ledger``, in chunks of any size."""

    ledger: Ledger
    first: int
    last: int


class Undecided(Retriable):
    """A transaction that began in the segment or before it is still open; ``open_since`` is its first offset."""

    def __init__(self, message: str, open_since: int) -> None:
        super().__init__(message, open_since=open_since)
        self.open_since = open_since


def offloaded_key(topic: Topic, ledgers: Sequence[Ledger], random_id: int) -> str:
    """The key of the segment that is made of ``ledgers``."""
    first = ledgers[0]
    return segment_key(topic.topic_id, first.partition, first.base_offset, ledgers[-1].leader_epoch, random_id)


class OffloadJob:
    """One segment being made: repeat ``next_read``, ``add_entries`` and ``take_parts``, then ``finish``."""

    def __init__(
        self,
        cluster_id: str,
        topic: Topic,
        ledgers: Sequence[Ledger],
        following: Sequence[Ledger] = (),
        *,
        key: str,
        block_bytes: int,
        zstd_level: int | None = None,
        encryption: SegmentEncryption | None = None,
    ) -> None:
        """``key`` is that of the segment's object (`offloaded_key`), ``following`` the sealed ledgers after ``ledgers``."""
        first = ledgers[0]
        self._ledgers = (*ledgers, *following)
        self._segment_ledgers = len(ledgers)
        self._end_offset = ledgers[-1].end_offset
        self._end_state: tuple[list[EpochStart], tuple[ProducerEntry, ...]] | None = None
        self._position = 0
        self._next_entry = 0
        self._checkpoint_parts: list[bytes] = []
        self._state = ReplayState(first.base_offset)
        self._aborted: list[AbortedTransaction] = []
        identity = SegmentIdentity(
            cluster_id=cluster_id, topic_id=topic.topic_id, topic_name=topic.name, partition=first.partition,
            base_offset=first.base_offset, ledger_ids=tuple(ledger.ledger_id for ledger in ledgers),
        )  # fmt: skip
        self._writer = SegmentWriter(identity, block_bytes, zstd_level, encryption)
        self.key = key
        self._written: WrittenSegment | None = None

    @property
    def next_read(self) -> ReadRange | None:
        """The next entries to read; None after the last one that is needed."""
        if self._position == len(self._ledgers) or self._is_decided:
            return None
        ledger = self._ledgers[self._position]
        return ReadRange(ledger=ledger, first=self._next_entry, last=ledger.last_entry)

    def add_entries(self, entries: Iterable[SourceEntry]) -> None:
        """Add entries of ``next_read``, from its first on. Raises ``Corrupt`` that names ledger and entry."""
        for entry in entries:
            if self._is_decided:
                return
            ledger = self._ledgers[self._position]
            if entry.entry_id != self._next_entry:
                raise Corrupt(f"ledger {ledger.ledger_id}: entry {entry.entry_id} arrived; expected {self._next_entry}")
            try:
                self._add(entry.payload)
            except Corrupt as bad:
                raise Corrupt(f"ledger {ledger.ledger_id}, entry {entry.entry_id}: {bad.message}") from bad
            self._next_entry += 1
            if entry.entry_id == ledger.last_entry:
                self._end_ledger(ledger)

    def take_parts(self) -> list[Buffer]:
        """The parts of the segment that have become ready, in order."""
        return self._writer.take_parts()

    def finish(self, created_at_ms: int) -> list[Buffer]:
        """Finish the segment; returns its last parts. Raises ``Undecided`` if a transaction is."""
        assert self.next_read is None, "all entries are added before a segment is finished"
        assert self._end_state is not None
        for ongoing in self._undecided():
            raise Undecided(
                f"producer {ongoing.producer_id} has a transaction open since offset {ongoing.first_offset}: only decided"
                f" transactions are offloaded, and the segment ends at {self._end_offset}",
                ongoing.first_offset,
            )
        self._keep_aborted()
        leader_epochs, producers = self._end_state
        self._written = self._writer.finish(
            created_at_ms=created_at_ms, leader_epochs=leader_epochs,
            aborted_transactions=self._aborted, producers=producers,
        )  # fmt: skip
        return self._writer.take_parts()

    @property
    def written(self) -> WrittenSegment:
        assert self._written is not None, "the segment is finished"
        return self._written

    @property
    def footer(self) -> SegmentFooter:
        return self.written.footer

    def entry(self, storage_class: str = "") -> SegmentEntry:
        """The finished segment's manifest entry."""
        entry = segment_entry(self.key, self.written)
        return msgspec.structs.replace(entry, options=SegmentOptions(storage_class=storage_class))

    def _add(self, payload: memoryview) -> None:
        if is_checkpoint(payload):
            self._add_checkpoint_part(payload)
            return
        header = check_batch(payload)
        if self._end_state is None:
            self._writer.append(payload, header)
        self._state.replay(header, payload)

    def _add_checkpoint_part(self, payload: memoryview) -> None:
        self._checkpoint_parts.append(bytes(payload))
        _, parts = part_position(payload)
        if len(self._checkpoint_parts) == parts:
            checkpoint = decode_checkpoint(self._checkpoint_parts)
            self._checkpoint_parts.clear()
            self._keep_aborted()
            self._state.load(checkpoint)

    def _keep_aborted(self) -> None:
        """Collect the aborted transactions of the replayed state, before a checkpoint replaces it."""
        for one in self._state.transactions.aborted:
            if one.first_offset < self._end_offset:
                self._aborted.append(AbortedTransaction(**one._asdict()))

    @property
    def _is_decided(self) -> bool:
        """Whether all of the segment was added, and no transaction that began before its end is open."""
        if self._end_state is None:
            return False
        return next(iter(self._state.transactions.first_offsets.values()), self._end_offset) >= self._end_offset

    def _undecided(self) -> list[OngoingTransaction]:
        """The open transactions that began before the segment's end."""
        return [one for one in self._state.transactions.snapshot() if one.first_offset < self._end_offset]

    def _end_ledger(self, ledger: Ledger) -> None:
        if self._checkpoint_parts:
            raise Corrupt(f"ledger {ledger.ledger_id} ends within its checkpoint")
        if self._state.next_offset != ledger.end_offset:
            raise Corrupt(
                f"ledger {ledger.ledger_id} holds offsets up to {self._state.next_offset}, its record says {ledger.end_offset}"
            )
        self._position += 1
        self._next_entry = 0
        if self._position == self._segment_ledgers:
            self._end_state = list(self._state.leader_epochs), self._state.producers.snapshot()
