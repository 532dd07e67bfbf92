"""Turns the entries of sealed ledgers into one segment. Sans-IO: entries in, byte parts out.

Every entry must come, in order and sound; every batch must continue the offsets; each ledger must end exactly where
its record says. Checkpoint entries are not copied: they tell leader epochs and producers, which, with the headers of the
batches that follow, give what a new owner must know at the segment's end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from stratalog_core.batches.batch import NO_PRODUCER_ID, BatchHeader, check_batch
from stratalog_core.batches.checkpoint import (
    EpochStart,
    ProducerEntry,
    SequencedBatch,
    decode_checkpoint,
    is_checkpoint,
    part_position,
)
from stratalog_core.errors import Corrupt
from stratalog_core.ports import Buffer
from stratalog_metadata.records import Ledger, Topic
from stratalog_tiering.format.entry import segment_entry
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.segment import SegmentFooter, SegmentIdentity, SegmentWriter

EPOCHS_MAX: Final = 10_000
_BATCHES_REMEMBERED: Final = 5


class SourceEntry(Protocol):
    """An entry as a ledger reader gives it."""

    @property
    def entry_id(self) -> int: ...
    @property
    def payload(self) -> memoryview: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRange:
    """What to read next: entries ``first`` to ``last`` of ``ledger``, as many at once as is convenient."""

    ledger: Ledger
    first: int
    last: int


class OffloadJob:
    """One segment in the making: ask ``next_read``, give ``add_entries``, fetch ``take_parts``; at the end, ``finish``."""

    def __init__(self, topic: Topic, ledgers: Sequence[Ledger], *, random_id: int, block_bytes: int) -> None:
        first = ledgers[0]
        self._ledgers = tuple(ledgers)
        self._position = 0
        self._next_entry = 0
        self._checkpoint_parts: list[bytes] = []
        self._state = _OwnerState()
        identity = SegmentIdentity(
            topic_id=topic.topic_id, topic_name=topic.name, partition=first.partition, base_offset=first.base_offset,
            ledger_ids=tuple(ledger.ledger_id for ledger in ledgers),
        )  # fmt: skip
        self._writer = SegmentWriter(identity, block_bytes)
        self.key = segment_key(topic.topic_id, first.partition, first.base_offset, ledgers[-1].leader_epoch, random_id)
        self._footer: SegmentFooter | None = None
        self._tail: Buffer = b""

    @property
    def next_read(self) -> ReadRange | None:
        """The next entries that are wanted, or None when all were given."""
        if self._position == len(self._ledgers):
            return None
        ledger = self._ledgers[self._position]
        return ReadRange(ledger=ledger, first=self._next_entry, last=ledger.last_entry)

    def add_entries(self, entries: Iterable[SourceEntry]) -> None:
        """Entries of ``next_read``, from its first on. Raises ``Corrupt`` that names ledger and entry."""
        for entry in entries:
            ledger = self._ledgers[self._position]
            if entry.entry_id != self._next_entry:
                raise Corrupt(f"ledger {ledger.ledger_id}: entry {entry.entry_id} came where {self._next_entry} was expected")
            try:
                self._add(entry.payload)
            except Corrupt as bad:
                raise Corrupt(f"ledger {ledger.ledger_id}, entry {entry.entry_id}: {bad.message}") from bad
            self._next_entry += 1
            if entry.entry_id == ledger.last_entry:
                self._end_ledger(ledger)

    def take_parts(self) -> list[Buffer]:
        """Bytes of the segment that are ready, in order."""
        return self._writer.take_parts()

    def finish(self, created_at_ms: int) -> list[Buffer]:
        """The segment's last bytes."""
        assert self.next_read is None, "all entries are given before a segment is finished"
        epochs = self._state.epochs_below(self._writer.next_offset)
        self._footer = self._writer.finish(
            created_at_ms=created_at_ms, leader_epochs=epochs, producers=self._state.producers()
        )  # fmt: skip
        parts = self._writer.take_parts()
        self._tail = parts[-1]
        return parts

    @property
    def footer(self) -> SegmentFooter:
        assert self._footer is not None, "the segment is finished"
        return self._footer

    def entry(self) -> SegmentEntry:
        """The finished segment's line in the manifest."""
        return segment_entry(self.key, self.footer, self._tail, self._writer.leader_epochs)

    def _add(self, payload: memoryview) -> None:
        if is_checkpoint(payload):
            self._add_checkpoint_part(payload)
            return
        header = check_batch(payload)
        self._writer.append(payload, header)
        self._state.appended(header)

    def _add_checkpoint_part(self, payload: memoryview) -> None:
        self._checkpoint_parts.append(bytes(payload))
        _, parts = part_position(payload)
        if len(self._checkpoint_parts) == parts:
            checkpoint = decode_checkpoint(self._checkpoint_parts)
            self._checkpoint_parts.clear()
            self._state.load(checkpoint.leader_epochs, checkpoint.producers)

    def _end_ledger(self, ledger: Ledger) -> None:
        if self._checkpoint_parts:
            raise Corrupt(f"ledger {ledger.ledger_id} ends within its checkpoint")
        if self._writer.next_offset != ledger.end_offset:
            raise Corrupt(
                f"ledger {ledger.ledger_id} holds offsets up to {self._writer.next_offset}, its record says {ledger.end_offset}"
            )
        self._position += 1
        self._next_entry = 0


class _OwnerState:
    """What a partition's owner knows at an offset, replayed from a checkpoint and the batch headers after it."""

    def __init__(self) -> None:
        self._epochs: dict[int, int] = {}
        self._producers: dict[int, ProducerEntry] = {}

    def load(self, epochs: Iterable[EpochStart], producers: Iterable[ProducerEntry]) -> None:
        for start in epochs:
            self._epochs.setdefault(start.epoch, start.start_offset)
        self._producers = {entry.producer_id: entry for entry in producers}

    def appended(self, header: BatchHeader) -> None:
        self._epochs.setdefault(header.leader_epoch, header.base_offset)
        if header.producer_id != NO_PRODUCER_ID:
            self._producer_appended(header)

    def _producer_appended(self, header: BatchHeader) -> None:
        # Re-inserted, so that the order is that of last use, as in the owner's own snapshots.
        known = self._producers.pop(header.producer_id, None)
        batches = known.batches if known is not None and known.producer_epoch == header.producer_epoch else ()
        batch = SequencedBatch(header.base_sequence, header.last_sequence, header.last_offset, header.max_timestamp_ms)
        latest = (*batches, batch)[-_BATCHES_REMEMBERED:]
        self._producers[header.producer_id] = ProducerEntry(header.producer_id, header.producer_epoch, latest)

    def epochs_below(self, end_offset: int) -> tuple[EpochStart, ...]:
        """Epochs that began below ``end_offset``, oldest first, the newest ``EPOCHS_MAX`` of them."""
        starts = sorted(item for item in self._epochs.items() if item[1] < end_offset)
        return tuple(EpochStart(epoch, start) for epoch, start in starts[-EPOCHS_MAX:])

    def producers(self) -> tuple[ProducerEntry, ...]:
        return tuple(self._producers.values())
