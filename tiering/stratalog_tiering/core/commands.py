"""The metadata commands of tiering, pure: what is changed together, and what must still hold when it is."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stratalog_metadata.records import Log, ManifestPointer, ledger_key, log_key, manifest_pointer_key, tier_request_key
from stratalog_metadata.state.commands import Command, Delete, Put, Requirement, VersionIs
from stratalog_tiering.core.planning import PartitionState, StoredLedger

Guards = tuple[Requirement, ...]


def commit_segment(state: PartitionState, pointer: ManifestPointer, ledgers: Sequence[StoredLedger], guards: Guards) -> Command:
    """The manifest's next version, if pointer and ledgers are still those that the work began with."""
    return Command(
        updates=(Put(record=pointer),), requirements=(*guards, pointer_unchanged(state), *_ledgers_unchanged(ledgers))
    )


def drop_ledgers(
    state: PartitionState, ledgers: Sequence[StoredLedger], guards: Guards, log_start_offset: int | None = None
) -> Command:
    """Ledgers leave log and metadata, if log, manifest and ledgers are still those that allowed it.

    With ``log_start_offset`` the log begins there from now on.
    """
    dropped = {stored.ledger.ledger_id for stored in ledgers}
    kept = tuple(ref for ref in state.log.ledgers if ref.ledger_id not in dropped)
    start = max(state.log.log_start_offset, log_start_offset or 0)
    log = msgspec.structs.replace(state.log, ledgers=kept, log_start_offset=start)
    deletions = (Delete(key=ledger_key(ledger_id)) for ledger_id in sorted(dropped))
    return Command(
        updates=(Put(record=log), *deletions),
        requirements=(*guards, _log_unchanged(state), pointer_unchanged(state), *_ledgers_unchanged(ledgers)),
    )


def move_start(state: PartitionState, pointer: ManifestPointer, guards: Guards) -> Command:
    """The manifest's next version after retention, and with it the first offset that can be read."""
    start = max(state.log.log_start_offset, pointer.start_offset)
    log: Log = msgspec.structs.replace(state.log, log_start_offset=start)
    updates = (Put(record=pointer), *((Put(record=log),) if log != state.log else ()))
    return Command(updates=updates, requirements=(*guards, pointer_unchanged(state), _log_unchanged(state)))


def fulfil_request(state: PartitionState, guards: Guards) -> Command:
    """The request is done; a newer one written meanwhile stays."""
    key = tier_request_key(state.log.topic_id, state.log.index)
    return Command(updates=(Delete(key=key),), requirements=(*guards, VersionIs(key=key, version=state.request_version)))


def ledgers_unchanged(state: PartitionState) -> Guards:
    """The log and all its ledgers are still those that were looked at."""
    return (_log_unchanged(state), *_ledgers_unchanged(state.ledgers))


def pointer_unchanged(state: PartitionState) -> VersionIs:
    """The committed manifest is still the one that was looked at."""
    return VersionIs(key=manifest_pointer_key(state.log.topic_id, state.log.index), version=state.pointer_version)


def _log_unchanged(state: PartitionState) -> VersionIs:
    return VersionIs(key=log_key(state.log.topic_id, state.log.index), version=state.log_version)


def _ledgers_unchanged(ledgers: Sequence[StoredLedger]) -> tuple[VersionIs, ...]:
    return tuple(VersionIs(key=ledger_key(stored.ledger.ledger_id), version=stored.version) for stored in ledgers)
