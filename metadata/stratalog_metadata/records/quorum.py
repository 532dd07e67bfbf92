"""The members of the metadata quorum as of the last committed change, for clients and snapshots."""

from __future__ import annotations

from stratalog_metadata.raft.membership import Member
from stratalog_metadata.records.base import RecordBase


class Quorum(RecordBase, frozen=True, kw_only=True, tag="quorum"):
    """Written only by log entries of kind MEMBERS, never by a command."""

    members: tuple[Member, ...]

    def key(self) -> str:
        return QUORUM_KEY

    def find(self, node_id: int, identity: str) -> Member | None:
        """The member with this node id on this disk."""
        wanted = (member for member in self.members if (member.node_id, member.identity) == (node_id, identity))
        return next(wanted, None)


QUORUM_KEY = "quorum/"
