"""Idempotent producers of one partition: recognise retries, refuse gaps, fence old epochs. Sans-IO.

Kafka's rules (KIP-98, KIP-360): a producer numbers its records per partition; the broker remembers the last five batches of
each producer id. A batch with the same sequences as one of them is a retry and is answered with that batch's offset; any other
batch must continue the sequence; a higher epoch begins at sequence 0; a lower epoch is fenced. A transaction marker can raise
the epoch. An unknown producer may begin at any sequence, as in Kafka, because retention may have removed its state.

A marker of the coordinator must not be older than the last one: neither its coordinator's epoch nor its producer's. Since
transactions of version 2 (KIP-890) raise the producer's epoch with each marker, one of theirs must even be newer, unless it
repeats the marker that has already ended the transaction.

An owner adds a batch when it assigns the offset, before the quorum confirms it. A checkpoint must hold the state at its own
offset, without the unconfirmed batches. So ``appended`` returns what the batch displaced, the owner keeps it with the
unconfirmed batch, and ``snapshot`` restores it. The number of producers is bounded: the one that has been silent longest is
forgotten, preferably one without an open transaction. Producers that were silent for a number of the owner's periods are
forgotten, too (``producer.id.expiration.ms``). Their silence is counted from the takeover on, because a log keeps no time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from enum import IntEnum
from typing import Final

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.checkpoint import NO_COORDINATOR_EPOCH, ProducerEntry, SequencedBatch
from stratalog_core.partition_state.transactions import read_marker
from stratalog_core.ports import Buffer

BATCHES_REMEMBERED: Final = 5
_SEQUENCE_MASK: Final = 0x7FFF_FFFF


class Verdict(IntEnum):
    APPEND = 0
    DUPLICATE = 1
    OUT_OF_ORDER = 2
    FENCED = 3
    UNKNOWN = 4
    """The producer is unknown; any sequence may be its next."""


APPEND: Final = Verdict.APPEND
"""A global for the hot path: before Python 3.12, looking up an enum member costs many times as much."""


_MAY_APPEND: Final = (APPEND, None)


class MarkerVerdict(IntEnum):
    APPEND = 0
    PRODUCER_FENCED = 1
    COORDINATOR_FENCED = 2


class Producer:
    """One producer's epoch, last batches (oldest first), and the coordinator epoch of its last transaction marker.

    ``period``: the period of its last batch or marker.
    """

    __slots__ = ("batches", "coordinator_epoch", "epoch", "period")

    def __init__(
        self, epoch: int, batches: list[SequencedBatch], coordinator_epoch: int = NO_COORDINATOR_EPOCH, period: int = 0
    ) -> None:
        self.epoch = epoch
        self.batches = batches
        self.coordinator_epoch = coordinator_epoch
        self.period = period


Displaced = SequencedBatch | Producer | None
"""State needed to undo a batch: the batch that it displaced, or the producer before it; None: just remove the batch."""


class ProducerStates:
    """States by producer id, in order of last use. ``in_transaction``: ids that are forgotten only if no other can be."""

    __slots__ = ("_in_transaction", "_period", "_producers", "_producers_max")

    def __init__(self, producers_max: int, in_transaction: Container[int] = ()) -> None:
        self._producers: dict[int, Producer] = {}
        self._producers_max = producers_max
        self._in_transaction = in_transaction
        self._period = 0

    def __len__(self) -> int:
        return len(self._producers)

    def judge(self, header: BatchHeader) -> tuple[Verdict, SequencedBatch | None]:
        """Return the verdict on a batch that has a producer id; for a DUPLICATE, also the batch that it repeats."""
        producer = self._producers.get(header.producer_id)
        if producer is None:
            return Verdict.UNKNOWN, None
        if header.producer_epoch != producer.epoch:
            if header.producer_epoch < producer.epoch:
                return Verdict.FENCED, None
            return (Verdict.APPEND if header.base_sequence == 0 else Verdict.OUT_OF_ORDER), None
        last_sequence = producer.batches[-1].last_sequence if producer.batches else -1
        if header.base_sequence == (last_sequence + 1) & _SEQUENCE_MASK:
            return _MAY_APPEND
        for batch in producer.batches:
            if batch.base_sequence == header.base_sequence and batch.last_sequence == header.last_sequence:
                return Verdict.DUPLICATE, batch
        return Verdict.OUT_OF_ORDER, None

    def judge_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, *, raises_epoch: bool, is_open: bool
    ) -> MarkerVerdict:
        """Return the verdict on a marker. ``raises_epoch``: transaction version 2; ``is_open``: there is one to end."""
        producer = self._producers.get(producer_id)
        if producer is None:
            return MarkerVerdict.APPEND
        is_late = producer_epoch == producer.epoch and raises_epoch and is_open
        if producer_epoch < producer.epoch or is_late:
            return MarkerVerdict.PRODUCER_FENCED
        is_obsolete = coordinator_epoch < producer.coordinator_epoch
        return MarkerVerdict.COORDINATOR_FENCED if is_obsolete else MarkerVerdict.APPEND

    def epoch_of(self, producer_id: int) -> int:
        """Return the producer's epoch; -1 if it is unknown."""
        producer = self._producers.get(producer_id)
        return -1 if producer is None else producer.epoch

    def end_period(self, periods: int) -> None:
        """Begin another period; forget producers that were silent during the last ``periods`` and have no transaction."""
        self._period += 1
        silent_until = self._period - periods
        gone = []
        for producer_id, producer in self._producers.items():
            if producer.period >= silent_until:
                break
            if producer_id not in self._in_transaction:
                gone.append(producer_id)
        for producer_id in gone:
            del self._producers[producer_id]

    def appended(self, header: BatchHeader, base_offset: int, batch: Buffer = b"") -> Displaced:
        """Add a batch with a producer id, or a transaction marker, that got ``base_offset``; call in offset order.

        ``batch`` must be whole if it is a control batch; else it is not read. The base offset in the header is ignored.
        Returns what ``snapshot`` needs while the batch is unconfirmed.
        """
        base_sequence, last_offset_delta = header.base_sequence, header.last_offset_delta
        if base_sequence < 0:
            return self._marked(header, batch)
        displaced: Displaced = None
        producer = self._producers.pop(header.producer_id, None)
        if producer is None or producer.epoch != header.producer_epoch or not producer.batches:
            displaced, producer = producer, Producer(header.producer_epoch, [], _coordinator_epoch(producer))
        self._producers[header.producer_id] = producer
        producer.period = self._period
        last_sequence = (base_sequence + last_offset_delta) & _SEQUENCE_MASK
        sequenced = SequencedBatch(base_sequence, last_sequence, base_offset + last_offset_delta, header.max_timestamp_ms)
        producer.batches.append(sequenced)
        if len(producer.batches) > BATCHES_REMEMBERED:
            displaced = producer.batches.pop(0)
        if len(self._producers) > self._producers_max:
            self._forget_one()
        return displaced

    def _marked(self, header: BatchHeader, batch: Buffer) -> Displaced:
        """Apply the epochs of a marker, which has no sequence; return the producer's state before it."""
        before = self._producers.pop(header.producer_id, None)
        found = read_marker(batch, header).coordinator_epoch if header.is_control else NO_COORDINATOR_EPOCH
        coordinator_epoch = max(found, _coordinator_epoch(before))
        if before is None or before.epoch < header.producer_epoch:
            marked = Producer(header.producer_epoch, [], coordinator_epoch, self._period)
        else:
            marked = Producer(before.epoch, list(before.batches), coordinator_epoch, self._period)
        self._producers[header.producer_id] = marked
        if len(self._producers) > self._producers_max:
            self._forget_one()
        return before

    def _forget_one(self) -> None:
        longest_silent = next(iter(self._producers))
        del self._producers[next((one for one in self._producers if one not in self._in_transaction), longest_silent)]

    def load(self, entries: Sequence[ProducerEntry]) -> None:
        """Replace all states by a checkpoint's, the newest ones within the bounds."""
        self._producers = {
            entry.producer_id: Producer(
                entry.producer_epoch, list(entry.batches[-BATCHES_REMEMBERED:]), entry.coordinator_epoch
            )
            for entry in entries[-self._producers_max :]
        }

    def snapshot(self, unconfirmed: Iterable[tuple[int, Displaced]] = ()) -> tuple[ProducerEntry, ...]:
        """Return the state without the ``unconfirmed`` batches: pairs of producer id and ``Displaced``, latest first."""
        before: dict[int, Producer | None] = {}
        for producer_id, displaced in unconfirmed:
            producer = before[producer_id] if producer_id in before else self._producers.get(producer_id)
            before[producer_id] = None if producer is None else _without_last(producer, displaced)
        states = ((producer_id, before.get(producer_id, latest)) for producer_id, latest in self._producers.items())
        return tuple(
            ProducerEntry(producer_id, one.epoch, tuple(one.batches), one.coordinator_epoch)
            for producer_id, one in states
            if one is not None
        )

    def validate_state(self) -> None:
        """Assert the bounds and the order of batches; O(producers)."""
        assert len(self._producers) <= self._producers_max
        for producer in self._producers.values():
            assert len(producer.batches) <= BATCHES_REMEMBERED
            offsets = [batch.last_offset for batch in producer.batches]
            assert offsets == sorted(offsets), "batches are remembered in offset order"


def _coordinator_epoch(producer: Producer | None) -> int:
    return NO_COORDINATOR_EPOCH if producer is None else producer.coordinator_epoch


def _without_last(producer: Producer, displaced: Displaced) -> Producer | None:
    """Return the producer's state before its last batch or marker; None if that was its first."""
    if isinstance(displaced, Producer):
        return displaced
    batches = producer.batches[:-1]
    if displaced is not None:
        batches.insert(0, displaced)
    return Producer(producer.epoch, batches, producer.coordinator_epoch) if batches else None
