"""The commit of a manifest version, without I/O: the metadata commands, and what each answer to them allows.

::

    propose ─ applied ───────────────────────────────→ COMMITTED
       │ ├─── Conflict ──────────→ re-read ─┬ ours ──→ COMMITTED    (an earlier attempt of this commit was applied)
       │ │                                  └ other ─→ LOST         (delete the objects of this commit and no others)
       │ ├─── OutcomeUnknown ────→ re-read ─┬ ours ──→ COMMITTED
       │ │                                  ├ other version → LOST  (the requirement can never hold again)
       │ │                                  └ unchanged → propose again, at most ``ATTEMPTS_MAX`` times, else UNKNOWN
       │ └─── Unavailable ───────→ propose again, else UNKNOWN
       └───── Fenced ────────────────────────────────→ UNKNOWN      (stop; the next worker's sweep removes the objects)

Proposing again is safe: every proposal requires the pointer's version that the edit started from, so at most one of them is
applied. After UNKNOWN nothing is deleted. ``offload/commit.py`` carries these steps out.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

import msgspec

from stratalog_core.errors import Conflict, OutcomeUnknown, StratalogError, Unavailable
from stratalog_metadata.records import (
    Log,
    ManifestPointer,
    Versioned,
    ledger_key,
    log_key,
    manifest_pointer_key,
    tier_request_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, Requirement, VersionIs
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger

ATTEMPTS_MAX: Final = 5

Guards = tuple[Requirement, ...]
"""What every command of a worker requires: its session is alive and it still holds the partition's lease."""


class Next(Enum):
    """The next step of a commit. The last three are final."""

    PROPOSE = "propose"
    READ_POINTER = "read_pointer"
    COMMITTED = "committed"
    LOST = "lost"
    UNKNOWN = "unknown"


class ManifestCommit:
    """One commit in progress. ``expected_version`` is the version of the pointer record that the command requires."""

    def __init__(self, object_key: str, expected_version: int) -> None:
        self._object_key = object_key
        self._expected_version = expected_version
        self._attempts = 0
        self._refused = False

    def proposed(self, failure: StratalogError | None) -> Next:
        """The next step after a proposal, which was applied (None) or raised ``failure``."""
        self._attempts += 1
        if failure is None:
            return Next.COMMITTED
        if isinstance(failure, Conflict):
            self._refused = True
            return Next.READ_POINTER
        if isinstance(failure, OutcomeUnknown):
            return Next.READ_POINTER
        if isinstance(failure, Unavailable):
            return self._again()
        return Next.UNKNOWN

    def pointer_read(self, found: Versioned | None) -> Next:
        """The next step after a linearizable read of the pointer record."""
        pointer = found.record if found is not None else None
        if isinstance(pointer, ManifestPointer) and pointer.object_key == self._object_key:
            return Next.COMMITTED
        version = found.version if found is not None else ABSENT
        if self._refused or version != self._expected_version:
            return Next.LOST
        return self._again()

    def pointer_not_read(self) -> Next:
        """The next step if the pointer could not be read."""
        return Next.UNKNOWN

    def _again(self) -> Next:
        return Next.PROPOSE if self._attempts < ATTEMPTS_MAX else Next.UNKNOWN


def commit_segment(
    state: PartitionSnapshot, pointer: ManifestPointer, ledgers: Sequence[StoredLedger], guards: Guards
) -> Command:
    """Set the pointer to the next manifest version, if the pointer and ``ledgers`` have not changed since ``state``."""
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
    log = msgspec.structs.replace(state.log, ledgers=kept, log_start_offset=start)
    deletions = (Delete(key=ledger_key(ledger_id)) for ledger_id in sorted(dropped))
    return Command(
        updates=(Put(record=log), *deletions),
        requirements=(*guards, _log_unchanged(state), pointer_unchanged(state), *_ledgers_unchanged(ledgers)),
    )


def move_start(state: PartitionSnapshot, pointer: ManifestPointer, guards: Guards) -> Command:
    """Set the pointer to the manifest version that retention made, and move the log's start to that manifest's start."""
    start = max(state.log.log_start_offset, pointer.start_offset)
    log: Log = msgspec.structs.replace(state.log, log_start_offset=start)
    updates = (Put(record=pointer), *((Put(record=log),) if log != state.log else ()))
    return Command(updates=updates, requirements=(*guards, pointer_unchanged(state), _log_unchanged(state)))


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
