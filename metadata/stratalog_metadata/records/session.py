"""Sessions and what lives and dies with them.

A session is kept alive by renewals to the quorum's leader, which judges leases on its monotonic clock and proposes the
expiry. Expiry removes, in the same command, every record whose ``session_id`` is the session's, but for bookies, which
only lose it: their ledgers still name them.
"""

from __future__ import annotations

from stratalog_metadata.records.base import RecordBase


class Session(RecordBase, frozen=True, kw_only=True, tag="session"):
    """``holder`` is for people: role and name of the process.

    ``grace_ms``: when the connection of its renewals has broken, and none came over another for so long, the session ends
    before its lease does. 0: only the lease counts.
    """

    session_id: int
    holder: str
    lease_ms: int
    grace_ms: int = 0

    def key(self) -> str:
        return session_key(self.session_id)


class Lease(RecordBase, frozen=True, kw_only=True, tag="lease"):
    """Exclusive right to do a named piece of work, as offloading one partition."""

    name: str
    session_id: int

    def key(self) -> str:
        return lease_key(self.name)


def session_key(session_id: int) -> str:
    return f"session/{session_id}"


def lease_key(name: str) -> str:
    return f"lease/{name}"
