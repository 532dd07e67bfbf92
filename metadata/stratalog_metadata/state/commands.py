"""Commands: typed updates that take effect together, or not at all, if every requirement holds.

``state/machine.py`` applies them. A failed requirement is answered with :class:`~stratalog_core.errors.Conflict`, whose
``detail`` is ``{"key", "expected", "found"}``; then nothing changes. A command that was sent and not answered ends in
``OutcomeUnknown``: read the records again (``guarded_update.py``).
"""

from __future__ import annotations

import msgspec

from stratalog_metadata.records import Record

ABSENT = 0
"""Version of a record that does not exist."""


class VersionIs(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="version_is", tag_field="type"):
    """The record at ``key`` has this version (``ABSENT``: it does not exist)."""

    key: str
    version: int


class EpochIs(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="epoch_is", tag_field="type"):
    """The ``Partition`` at ``key`` still has this owner and leader epoch. A failure answers ``StaleEpoch``."""

    key: str
    owner: int
    leader_epoch: int


class SessionAlive(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="session_alive", tag_field="type"):
    """The session has not expired. A failure answers ``SessionExpired``."""

    session_id: int


Requirement = VersionIs | EpochIs | SessionAlive


class Put(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="put", tag_field="type"):
    """Create or replace a record."""

    record: Record


class Delete(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="delete", tag_field="type"):
    """Remove the record at ``key``, if it exists."""

    key: str


class Allocate(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="allocate", tag_field="type"):
    """Allocate ``count`` ids from a counter; the first of them is in the result's ``allocated``."""

    counter: str
    count: int


class OpenSession(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag="open_session", tag_field="type"
):
    """Open a session; its id is in the result's ``allocated``. For ``grace_ms`` see ``records/session.py``."""

    holder: str
    lease_ms: int
    grace_ms: int = 0


class ExpireSession(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="expire_session", tag_field="type"):
    """End a session and the records that live with it. Nothing happens if it has ended."""

    session_id: int


Update = Put | Delete | Allocate | OpenSession | ExpireSession


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements are checked against the state before the command; updates are applied in order."""

    updates: tuple[Update, ...]
    requirements: tuple[Requirement, ...] = ()


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """``index`` is the version of every record that was written; ``allocated`` has the ids for Allocate and OpenSession in
    order.
    """

    index: int
    allocated: tuple[int, ...] = ()
