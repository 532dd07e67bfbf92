"""The metadata commands of tiering, without I/O: what changes together, and what must still hold when it does.

Every command that sets a manifest pointer requires the pointer's version that the edit started from, so it takes effect at most
once however often it is proposed. The commands assert what must always hold: cold history never goes back to an earlier version
and never loses its end, and no ledger is dropped that holds the only copy of a record. ``offload/commit.py`` proposes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stratalog_metadata.records import (
    Log,
    ManifestPointer,
    ledger_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
)
from stratalog_metadata.state.commands import Command, Delete, Put, Requirement, VersionIs
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, is_cold, is_sealed

Guards = tuple[Requirement, ...]
"""Requirements of every command of a worker: its session is alive and it still holds the partition's lease."""


def commit_segment(
    state: PartitionSnapshot, pointer: ManifestPointer, ledgers: Sequence[StoredLedger], guards: Guards
) -> Command:
    """Set the pointer to the next manifest version, if the pointer and ``ledgers`` have not changed since ``state``."""
    _assert_successor(state, pointer)
    assert not ledgers or pointer.end_offset == ledgers[-1].ledger.end_offset, "the manifest ends where its last ledger ends"
    return Command(
        updates=(Put(record=pointer),), requirements=(*guards, pointer_unchanged(state), *_ledgers_unchanged(ledgers))
    )


def drop_ledgers(
    state: PartitionSnapshot, ledgers: Sequence[StoredLedger], guards: Guards, log_start_offset: int | None = None
) -> Command:
    """Remove ``ledgers`` from the log and from metadata, if log, pointer and ledgers have not changed since ``state``.

    ``log_start_offset`` moves the log's start forward in the same command; it never moves back.
    """
    dropped = {stored.ledger.ledger_id for stored in ledgers}
    kept = tuple(ref for ref in state.log.ledgers if ref.ledger_id not in dropped)
    start = max(state.log.log_start_offset, log_start_offset or 0)
    _assert_droppable(state, ledgers, start)
    log = msgspec.structs.replace(state.log, ledgers=kept, log_start_offset=start)
    deletions = (Delete(key=ledger_key(ledger_id)) for ledger_id in sorted(dropped))
    return Command(
        updates=(Put(record=log), *deletions),
        requirements=(*guards, _log_unchanged(state), pointer_unchanged(state), *_ledgers_unchanged(ledgers)),
    )


def move_start(state: PartitionSnapshot, pointer: ManifestPointer, guards: Guards) -> Command:
    """Set the pointer to the manifest version that retention made, and move the log's start to that manifest's start."""
    _assert_successor(state, pointer)
    start = max(state.log.log_start_offset, pointer.start_offset)
    log: Log = msgspec.structs.replace(state.log, log_start_offset=start)
    updates = (Put(record=pointer), *((Put(record=log),) if log != state.log else ()))
    return Command(updates=updates, requirements=(*guards, pointer_unchanged(state), _log_unchanged(state)))


def _assert_successor(state: PartitionSnapshot, pointer: ManifestPointer) -> None:
    """Cold history only grows at its end and shrinks at its start, one version after the other."""
    before = state.pointer
    if before is not None:
        assert pointer.manifest_version > before.manifest_version, f"version {pointer.manifest_version} is not a new one"
        assert pointer.start_offset >= before.start_offset, f"history would start again at offset {pointer.start_offset}"
        assert pointer.end_offset >= before.end_offset, f"history would end at offset {pointer.end_offset} again"


def _assert_droppable(state: PartitionSnapshot, ledgers: Sequence[StoredLedger], log_start_offset: int) -> None:
    """A ledger leaves metadata only if it is sealed and is empty, or below the log's start, or cold.

    It is not cold as long as the manifest that says so is in metadata alone.
    """
    is_pending = state.pointer is not None and bool(state.pointer.content)
    for ledger in (stored.ledger for stored in ledgers):
        is_empty = ledger.end_offset == ledger.base_offset
        assert is_sealed(ledger), f"ledger {ledger.ledger_id} is not sealed"
        is_safe = is_cold(state, ledger) and not is_pending
        assert is_empty or is_safe or ledger.end_offset <= log_start_offset, (
            f"ledger {ledger.ledger_id} holds records that exist nowhere else"
        )


def fulfil_request(state: PartitionSnapshot, guards: Guards) -> Command:
    """Delete the tier request of ``state``; a newer request stays."""
    key = tier_request_key(state.log.topic_id, state.log.index)
    return Command(updates=(Delete(key=key),), requirements=(*guards, VersionIs(key=key, version=state.request_version)))


def ledgers_unchanged(state: PartitionSnapshot) -> Guards:
    """Requires that the log and all of its ledgers are those of ``state``."""
    return (_log_unchanged(state), *_ledgers_unchanged(state.ledgers))


def pointer_unchanged(state: PartitionSnapshot) -> VersionIs:
    """Requires that the committed manifest is that of ``state``."""
    return VersionIs(key=manifest_pointer_key(state.log.topic_id, state.log.index), version=state.pointer_version)


def _log_unchanged(state: PartitionSnapshot) -> VersionIs:
    return VersionIs(key=log_key(state.log.topic_id, state.log.index), version=state.log_version)


def _ledgers_unchanged(ledgers: Sequence[StoredLedger]) -> tuple[VersionIs, ...]:
    return tuple(VersionIs(key=ledger_key(stored.ledger.ledger_id), version=stored.version) for stored in ledgers)
