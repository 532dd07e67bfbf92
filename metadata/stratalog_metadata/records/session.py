"""Sessions, and leases that live with them.

A session is kept alive by renewals to the quorum's leader, which judges leases by its monotonic clock and proposes the expiry.
The same command removes every record with the session's ``session_id``, except bookies, which only lose it because ledgers
still name them.
"""

from __future__ import annotations

from stratalog_metadata.records.base import RecordBase


class Session(RecordBase, frozen=True, kw_only=True, tag="session"):
    """``holder`` is the role and name of the process, for operators.

    ``grace_ms``: the session ends that long after the connection of its renewals broke, if none came over another connection.
    0: only the lease counts.
    """

    session_id: int
    holder: str
    lease_ms: int
    grace_ms: int = 0

    def key(self) -> str:
        return session_key(self.session_id)


class Lease(RecordBase, frozen=True, kw_only=True, tag="lease"):
    """The exclusive right to a named piece of work, such as offloading one partition."""

    name: str
    session_id: int

    def key(self) -> str:
        return lease_key(self.name)


def session_key(session_id: int) -> str:
    return f"session/{session_id}"


def lease_key(name: str) -> str:
    return f"lease/{name}"
