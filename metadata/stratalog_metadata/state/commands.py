"""Commands: typed updates that take effect together, or not at all, if every requirement holds.

``apply`` (in ``state.py``) is pure. A failed requirement answers :class:`~stratalog_core.errors.Conflict` with
``detail`` = ``{"key", "expected", "found"}`` and changes nothing. A command that was sent and not answered ends in
``OutcomeUnknown``: the caller re-reads.
"""

from __future__ import annotations

import msgspec

from stratalog_metadata.records import Record

ABSENT = 0
"""Version of a record that does not exist."""


class VersionIs(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="version_is", tag_field="type"):
    """The record at ``key`` is exactly the one that was read (``ABSENT``: there is none)."""

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
    """Remove the record at ``key``; nothing happens if there is none."""

    key: str


class Allocate(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="allocate", tag_field="type"):
    """Take ``count`` ids from a counter; the result's ``allocated`` gets the first of them."""

    counter: str
    count: int


class OpenSession(
    msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True, tag="open_session", tag_field="type"
):
    """Begin a session; the result's ``allocated`` gets its id. ``grace_ms`` is explained in ``records/session.py``."""

    holder: str
    lease_ms: int
    grace_ms: int = 0


class ExpireSession(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag="expire_session", tag_field="type"):
    """End a session and all that lives with it. Ending one that is gone does nothing."""

    session_id: int


Update = Put | Delete | Allocate | OpenSession | ExpireSession


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Requirements are all checked against the state before the command; updates are applied in order."""

    updates: tuple[Update, ...]
    requirements: tuple[Requirement, ...] = ()


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """``index`` is the version that every written record got; ``allocated`` answers Allocate and OpenSession in order."""

    index: int
    allocated: tuple[int, ...] = ()
