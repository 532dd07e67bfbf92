"""One partition as metadata's view shows it: log, ledgers, manifest pointer, tier request and fork decision.

A snapshot is immutable and carries the version of every record it was made from, so a command can require that none of
them has changed since. It says what is stored, not what to do next (``planning.py``). No I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    Bookie,
    ForkDecision,
    Ledger,
    LedgerState,
    Log,
    ManifestPointer,
    TierRequest,
    Topic,
    fork_decision_key,
    ledger_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
    topic_key,
)
from stratalog_metadata.state.commands import ABSENT

PartitionId = tuple[UUID, int]
"""Topic id and partition index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLedger:
    """A ledger's record and the record's version in metadata."""

    version: int
    ledger: Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionSnapshot:
    """One partition at one moment. ``ledgers`` are those of ``log``, in order. A version of 0 means that there is no record."""

    topic: Topic
    log: Log
    log_version: int
    ledgers: tuple[StoredLedger, ...]
    pointer: ManifestPointer | None
    pointer_version: int
    request: TierRequest | None
    request_version: int
    fork_decision: ForkDecision | None = None
    fork_decision_version: int = 0
    topic_version: int = ABSENT

    @property
    def pending_decision(self) -> ForkDecision | None:
        """The operator's decision on a fork, unless a worker has refused it as impossible."""
        return self.fork_decision if self.fork_decision is not None and not self.fork_decision.refused else None

    @property
    def hot_offset(self) -> int:
        """The first offset with a hot copy, or the cold history's end. A hot copy would contradict what is rewritten."""
        assert self.pointer is not None, "the partition has a cold history"
        return min([self.pointer.end_offset, *(stored.ledger.base_offset for stored in self.ledgers)])

    @property
    def cold_end(self) -> int:
        """The offset at which the next segment begins.

        That is the manifest's end, or the first hot ledger's base offset if retention has removed everything before it.
        """
        if self.pointer is not None:
            end_offset = self.pointer.end_offset
            hot = (stored.ledger.base_offset for stored in self.ledgers if not is_cold(self, stored.ledger))
            first_hot = next(hot, end_offset)
            return first_hot if end_offset < first_hot <= self.log.log_start_offset else end_offset
        return self.log.ledgers[0].base_offset if self.log.ledgers else self.log.log_start_offset


def partition_snapshot(view: MetadataView, topic: Topic, index: int) -> PartitionSnapshot | None:
    """The partition in ``view``, with the topic's configs as they are there; None if it has no log, or its topic is deleted, or
    the view has not yet received one of its ledgers.
    """
    found = view.get(topic_key(topic.name))
    if found is None or not isinstance(found.record, Topic) or found.record.topic_id != topic.topic_id:
        return None
    log = view.get(log_key(topic.topic_id, index))
    if log is None or not isinstance(log.record, Log):
        return None
    ledgers = [stored for ref in log.record.ledgers if (stored := _ledger(view, ref.ledger_id)) is not None]
    if len(ledgers) != len(log.record.ledgers):
        return None
    pointer = view.get(manifest_pointer_key(topic.topic_id, index))
    request = view.get(tier_request_key(topic.topic_id, index))
    decision = view.get(fork_decision_key(topic.topic_id, index))
    return PartitionSnapshot(
        topic=found.record,
        log=log.record,
        log_version=log.version,
        ledgers=tuple(ledgers),
        pointer=pointer.record if pointer is not None and isinstance(pointer.record, ManifestPointer) else None,
        pointer_version=pointer.version if pointer is not None else ABSENT,
        request=request.record if request is not None and isinstance(request.record, TierRequest) else None,
        request_version=request.version if request is not None else ABSENT,
        fork_decision=decision.record if decision is not None and isinstance(decision.record, ForkDecision) else None,
        fork_decision_version=decision.version if decision is not None else ABSENT,
        topic_version=found.version,
    )


def _ledger(view: MetadataView, ledger_id: int) -> StoredLedger | None:
    found = view.get(ledger_key(ledger_id))
    if found is None or not isinstance(found.record, Ledger):
        return None
    return StoredLedger(version=found.version, ledger=found.record)


def low_on_space(view: MetadataView) -> frozenset[str]:
    """The bookies whose space is short."""
    return frozenset(bookie.bookie_id for bookie in view.all(Bookie) if bookie.low_on_space)


def partition_of(record: object) -> PartitionId | None:
    """The partition that a changed record belongs to; None for a record that tiering ignores."""
    if isinstance(record, Log | ManifestPointer | TierRequest | ForkDecision):
        return record.topic_id, record.index
    if isinstance(record, Ledger):
        return record.topic_id, record.partition
    return None


def is_sealed(ledger: Ledger) -> bool:
    """Whether the ledger is closed, so that its last entry is final."""
    return ledger.state is LedgerState.CLOSED


def has_records(ledger: Ledger) -> bool:
    """Whether a sealed ledger has records, and so the partition's state, which an owner writes before them."""
    return is_sealed(ledger) and ledger.end_offset > ledger.base_offset


def is_cold(state: PartitionSnapshot, ledger: Ledger) -> bool:
    """Whether the committed manifest covers the whole sealed ledger, or covered it before retention removed the segment."""
    return state.pointer is not None and is_sealed(ledger) and ledger.end_offset <= state.pointer.end_offset
