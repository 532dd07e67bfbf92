"""The metadata command that detaches a topic from its cluster and leaves its history in the bucket. Does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from stratalog_core.errors import Conflict
from stratalog_metadata.records import (
    ManifestPointer,
    Topic,
    fork_decision_key,
    ledger_key,
    log_key,
    manifest_pointer_key,
    partition_key,
    restored_topic_key,
    tier_request_key,
    tier_status_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Requirement, VersionIs
from stratalog_tiering.core.commands import ledgers_unchanged, pointer_unchanged
from stratalog_tiering.core.partition import PartitionSnapshot, is_cold, is_sealed

_RECORDS_OF_A_PARTITION = (
    partition_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
    tier_status_key,
    fork_decision_key,
)


def detach_topic(topic: Topic, partitions: Sequence[PartitionSnapshot]) -> Command:
    """Remove the topic from metadata, if nothing was written since ``partitions``, one snapshot for each.

    Raises ``Conflict`` if a record is not in the bucket yet, or the bucket does not tell the next offset.
    """
    keys = [topic.key()]
    requirements: list[Requirement] = [
        VersionIs(key=topic.key(), version=partitions[0].topic_version),
        # The bucket may have the marker of an earlier deletion, which hides the topic from its readers.
        VersionIs(key=restored_topic_key(topic.topic_id), version=ABSENT),
    ]
    for state in partitions:
        _require_cold(state)
        keys += [make_key(topic.topic_id, state.log.index) for make_key in _RECORDS_OF_A_PARTITION]
        keys += [ledger_key(stored.ledger.ledger_id) for stored in state.ledgers]
        requirements += [*ledgers_unchanged(state), pointer_unchanged(state)]
    return Command(updates=tuple(Delete(key=key) for key in keys), requirements=tuple(requirements))


def committed_pointers(partitions: Sequence[PartitionSnapshot]) -> list[ManifestPointer]:
    """The pointers of the partitions that have history in the bucket."""
    return [state.pointer for state in partitions if state.pointer is not None]


def _require_cold(state: PartitionSnapshot) -> None:
    name = f"{state.topic.name}-{state.log.index}"
    if state.pointer is not None and state.pointer.content:
        raise Conflict(f"manifest version {state.pointer.manifest_version} of {name} is not in the bucket yet")
    for ledger in (stored.ledger for stored in state.ledgers):
        is_empty = is_sealed(ledger) and ledger.end_offset == ledger.base_offset
        if not is_empty and not is_cold(state, ledger):
            raise Conflict(f"ledger {ledger.ledger_id} of {name} is not in the bucket yet")
    cold_end = state.pointer.end_offset if state.pointer is not None else 0
    end = max([state.log.log_start_offset, *(stored.ledger.end_offset for stored in state.ledgers)])
    if end > cold_end:
        raise Conflict(
            f"{name} goes on at offset {end}, but its history in the bucket ends at {cold_end}, because the records between"
            " have expired: offsets would be assigned twice when it comes back. Write a record and detach again"
        )
