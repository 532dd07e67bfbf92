"""One partition as metadata's view shows it, gathered for planning. Pure."""

from __future__ import annotations

from uuid import UUID

from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    ForkDecision,
    Ledger,
    Log,
    ManifestPointer,
    TierRequest,
    Topic,
    fork_decision_key,
    ledger_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
)
from stratalog_metadata.state.commands import ABSENT
from stratalog_tiering.core.planning import PartitionState, StoredLedger

PartitionId = tuple[UUID, int]


def partition_state(view: MetadataView, topic: Topic, index: int) -> PartitionState | None:
    """None while the partition has no log, or the view shows a ledger's reference and not the ledger."""
    log = view.get(log_key(topic.topic_id, index))
    if log is None or not isinstance(log.record, Log):
        return None
    ledgers = [stored for ref in log.record.ledgers if (stored := _ledger(view, ref.ledger_id)) is not None]
    if len(ledgers) != len(log.record.ledgers):
        return None
    pointer = view.get(manifest_pointer_key(topic.topic_id, index))
    request = view.get(tier_request_key(topic.topic_id, index))
    decision = view.get(fork_decision_key(topic.topic_id, index))
    return PartitionState(
        topic=topic,
        log=log.record,
        log_version=log.version,
        ledgers=tuple(ledgers),
        pointer=pointer.record if pointer is not None and isinstance(pointer.record, ManifestPointer) else None,
        pointer_version=pointer.version if pointer is not None else ABSENT,
        request=request.record if request is not None and isinstance(request.record, TierRequest) else None,
        request_version=request.version if request is not None else ABSENT,
        fork_decision=decision.record if decision is not None and isinstance(decision.record, ForkDecision) else None,
        fork_decision_version=decision.version if decision is not None else ABSENT,
    )


def _ledger(view: MetadataView, ledger_id: int) -> StoredLedger | None:
    found = view.get(ledger_key(ledger_id))
    if found is None or not isinstance(found.record, Ledger):
        return None
    return StoredLedger(version=found.version, ledger=found.record)


def partition_of(record: object) -> PartitionId | None:
    """The partition that a record is about, if it is one that tiering looks at."""
    if isinstance(record, Log | ManifestPointer | TierRequest | ForkDecision):
        return record.topic_id, record.index
    if isinstance(record, Ledger):
        return record.topic_id, record.partition
    return None
