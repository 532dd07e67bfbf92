"""The metadata quorum's own members, as of the last committed change: what clients and snapshots know of them."""

from __future__ import annotations

from stratalog_metadata.raft.membership import Member
from stratalog_metadata.records.base import RecordBase


class Quorum(RecordBase, frozen=True, kw_only=True, tag="quorum"):
    """Written by log entries of kind MEMBERS alone, never by a command."""

    members: tuple[Member, ...]

    def key(self) -> str:
        return QUORUM_KEY

    def find(self, node_id: int, identity: str) -> Member | None:
        """The member with this number on this very disk."""
        wanted = (member for member in self.members if (member.node_id, member.identity) == (node_id, identity))
        return next(wanted, None)


QUORUM_KEY = "quorum/"
