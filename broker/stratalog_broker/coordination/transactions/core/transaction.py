"""One transactional id: its producer, its last transaction, and the transitions between its states (KIP-98, KIP-360, KIP-890).

A value is what one record of ``__transaction_state`` holds. Each method returns the next value; it takes effect once its record
is durable. The method names say what happened; which transitions are allowed is decided in ``coordinator.py``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from enum import IntEnum
from typing import Final, NamedTuple
from uuid import UUID

import msgspec

NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
NO_TIME_MS: Final = -1
EPOCH_MAX: Final = 32_767
EPOCH_BUMP_VERSION: Final = 2
"""The ``transaction.version`` since which every transaction has a producer epoch of its own (KIP-890)."""

PartitionName = tuple[str, int]
"""Topic name and partition index; transactions name topics, as Kafka's records do."""
TopicIds = frozenset[tuple[str, UUID]]
"""The ids of topics by name, when their partitions were added. A name that was deleted and created again has several."""
NO_TOPIC_ID: Final = UUID(int=0)


class MarkedPartition(NamedTuple):
    """A partition that needs a marker. ``topic_id`` is ``NO_TOPIC_ID`` if only the topic's name is known."""

    topic: str
    partition: int
    topic_id: UUID = NO_TOPIC_ID


class TransactionState(IntEnum):
    """The states with the numbers of Kafka's records. ``label`` is the name in Kafka's responses."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    """Expired: the record's value is null. A state that is being written, never one that is stored."""
    PREPARE_EPOCH_FENCE = 7
    """Kafka keeps it in memory only, while an abort that fences the producer is being written; here that is one step."""

    @property
    def label(self) -> str:
        return "".join(word.capitalize() for word in self.name.split("_"))


PREPARED: Final = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT})
"""The outcome is decided, and not all partitions have its marker."""


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """See the module's header. ``partitions`` are sorted; they are those that still need a marker once it is prepared."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    timeout_ms: int
    updated_at_ms: int
    last_producer_epoch: int = NO_EPOCH
    """The epoch before the last bump, unless that fenced the producer: a retry of the request that raised it names it."""
    previous_producer_id: int = NO_PRODUCER_ID
    next_producer_id: int = NO_PRODUCER_ID
    """The id to use after this transaction, because the epochs of the present one are exhausted."""
    state: TransactionState = TransactionState.EMPTY
    partitions: tuple[PartitionName, ...] = ()
    started_at_ms: int = NO_TIME_MS
    client_version: int = 0
    """The ``transaction.version`` by which the client takes part."""
    topic_ids: tuple[tuple[str, UUID], ...] = ()
    """Sorted. Internal topics have none, nor have topics of a transaction that an earlier release began."""
    is_restored: bool = False
    """Decided in a state of the past that was restored; see ``restored``. Records do not have it, but the next one ends it."""

    @property
    def is_epoch_exhausted(self) -> bool:
        """Whether no further epoch can be given to the producer; the last one is kept for fencing."""
        return self.producer_epoch >= EPOCH_MAX - 1

    @property
    def is_commit(self) -> bool:
        return self.state in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)

    @property
    def bumps_epochs(self) -> bool:
        """Whether each transaction of this client has an epoch of its own."""
        return self.client_version >= EPOCH_BUMP_VERSION

    def marked_partitions(self) -> Iterator[MarkedPartition]:
        """Yield the partitions that need a marker once the transaction is decided."""
        ids: defaultdict[str, list[UUID]] = defaultdict(list)
        for name, topic_id in self.topic_ids:
            ids[name].append(topic_id)
        for name, index in self.partitions:
            for topic_id in ids.get(name, (NO_TOPIC_ID,)):
                yield MarkedPartition(name, index, topic_id)

    def initialized(self, epoch: int, last_epoch: int, timeout_ms: int, now_ms: int) -> Transaction:
        """The producer called InitProducerId and gets ``epoch``."""
        return self._replace(
            producer_epoch=epoch,
            last_producer_epoch=last_epoch,
            timeout_ms=timeout_ms,
            state=TransactionState.EMPTY,
            partitions=(),
            topic_ids=(),
            started_at_ms=NO_TIME_MS,
            updated_at_ms=now_ms,
        )

    def with_new_producer_id(self, producer_id: int, last_epoch: int, timeout_ms: int, now_ms: int) -> Transaction:
        """The producer called InitProducerId and its id has no further epoch."""
        begun = self.initialized(0, last_epoch, timeout_ms, now_ms)
        return begun._replace(producer_id=producer_id, previous_producer_id=self.producer_id)

    def with_partitions(
        self, added: frozenset[PartitionName], topic_ids: TopicIds, client_version: int, now_ms: int
    ) -> Transaction:
        """Partitions were added; the first ones begin the transaction."""
        is_ongoing = self.state is TransactionState.ONGOING
        return self._replace(
            state=TransactionState.ONGOING,
            partitions=tuple(sorted({*(self.partitions if is_ongoing else ()), *added})),
            topic_ids=tuple(sorted({*(self.topic_ids if is_ongoing else ()), *topic_ids})),
            started_at_ms=self.started_at_ms if is_ongoing else now_ms,
            updated_at_ms=now_ms,
            client_version=client_version,
        )

    def fenced(self) -> Transaction:
        """The producer was fenced: raise the epoch without giving it to any client. An exhausted epoch stays."""
        return self._replace(producer_epoch=min(self.producer_epoch + 1, EPOCH_MAX), last_producer_epoch=NO_EPOCH)

    def prepared(self, *, commit: bool, client_version: int, next_producer_id: int, now_ms: int) -> Transaction:
        """The outcome is decided. Since version 2 this raises the epoch, so that late batches are refused."""
        epoch, last_epoch = self.producer_epoch, self.last_producer_epoch
        if client_version >= EPOCH_BUMP_VERSION:
            epoch, last_epoch = min(epoch + 1, EPOCH_MAX), epoch
        has_begun = self.state is TransactionState.ONGOING
        return self._replace(
            state=TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT,
            producer_epoch=epoch,
            last_producer_epoch=last_epoch,
            next_producer_id=next_producer_id,
            partitions=self.partitions if has_begun else (),
            topic_ids=self.topic_ids if has_begun else (),
            started_at_ms=self.started_at_ms if has_begun else now_ms,
            updated_at_ms=now_ms,
            client_version=client_version,
        )

    def completed(self, now_ms: int) -> Transaction:
        """All partitions have their marker."""
        assert self.state in PREPARED
        done = self._replace(
            state=TransactionState.COMPLETE_COMMIT if self.is_commit else TransactionState.COMPLETE_ABORT,
            partitions=(),
            topic_ids=(),
            updated_at_ms=now_ms,
            next_producer_id=NO_PRODUCER_ID,
            is_restored=False,
        )
        if self.next_producer_id != NO_PRODUCER_ID and self.bumps_epochs:
            done = done._replace(producer_id=self.next_producer_id, producer_epoch=0, previous_producer_id=self.producer_id)
        return done.restored() if self.is_restored else done

    def restored(self) -> Transaction:
        """The id continues from a state of the past: its producer gets another id.

        Partitions may have seen later epochs of the present one. They would refuse an earlier epoch, and take the first batch
        of the same epoch for a duplicate. A decided transaction keeps its epoch until it has its markers: with a later one they
        might end another transaction.
        """
        if self.state in PREPARED:
            return self._replace(is_restored=True)
        return self._replace(producer_epoch=EPOCH_MAX - 1, last_producer_epoch=NO_EPOCH, previous_producer_id=NO_PRODUCER_ID)

    def expired(self, now_ms: int) -> Transaction:
        """The transactional id was not used for so long that it is removed."""
        return self._replace(state=TransactionState.DEAD, partitions=(), topic_ids=(), updated_at_ms=now_ms)

    def _replace(self, **changes: object) -> Transaction:
        return msgspec.structs.replace(self, **changes)
