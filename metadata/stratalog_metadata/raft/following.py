"""The follower's side of replication: appends to its log, assembles snapshots, answers the leader.

Always: committed entries are never replaced; what is acknowledged is in the log, and the answer waits until it is durable.
"""

from __future__ import annotations

from dataclasses import dataclass

from stratalog_metadata.raft.configurations import Configurations
from stratalog_metadata.raft.durability import Durability
from stratalog_metadata.raft.membership import Membership
from stratalog_metadata.raft.messages import Append, AppendReply, LeadersMessage, SnapshotChunk, SnapshotReply
from stratalog_metadata.raft.ready import Snapshot
from stratalog_metadata.raft.snapshots import IncomingSnapshot
from stratalog_metadata.raft.tail import LogTail


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """``commit`` is the highest index that is known to be committed and to match this log."""

    reply: AppendReply | SnapshotReply
    commit: int = 0
    snapshot: Snapshot | None = None


class Following:
    """A follower's log, and the snapshot that it receives."""

    __slots__ = ("_configurations", "_durability", "_incoming", "_log", "_node_id", "_snapshot_bytes_max")

    def __init__(
        self, node_id: int, log: LogTail, configurations: Configurations, durability: Durability, snapshot_bytes_max: int
    ) -> None:
        self._node_id = node_id
        self._log = log
        self._configurations = configurations
        self._durability = durability
        self._snapshot_bytes_max = snapshot_bytes_max
        self._incoming = IncomingSnapshot()

    def append(self, append: Append, commit: int) -> Accepted:
        """Append the new entries; ``commit`` is this node's commit index so far."""
        if append.previous_index < self._log.base_index:
            return Accepted(reply=self._matched(append, commit), commit=commit)
        if not self._log.matches(append.previous_index, append.previous_term):
            return Accepted(reply=self._rejected(append), commit=commit)
        conflict = self._log.conflict(append.entries)
        if conflict is not None:
            assert conflict > commit, "a committed entry would be replaced"
            new = [entry for entry in append.entries if entry.index >= conflict]
            self._log.truncate_after(conflict - 1)
            self._log.extend(new)
            self._configurations.truncated_after(conflict - 1)
            self._configurations.appended(new)
            self._durability.replaced_from(conflict)
        last = append.previous_index + len(append.entries)
        # After ``last`` this log may hold another leader's entries, which the commit index does not cover.
        return Accepted(reply=self._matched(append, last), commit=max(commit, min(append.commit, last)))

    def snapshot_chunk(self, chunk: SnapshotChunk, commit: int) -> Accepted:
        """Add a chunk. The complete snapshot replaces the log."""
        if chunk.index <= commit or self._log.matches(chunk.index, chunk.index_term):
            known = max(chunk.index, commit)
            return Accepted(reply=self._matched(chunk, known), commit=known)
        assert chunk.total_bytes <= self._snapshot_bytes_max, "a snapshot beyond the limit"
        whole = self._incoming.add(chunk)
        if whole is None:
            return Accepted(reply=self._wanted(chunk), commit=commit)
        self._log.reset(whole.index, whole.term)
        self._configurations.restored(whole.index, Membership.of(chunk.members) if chunk.members else None)
        self._durability.restored(whole.index)
        return Accepted(reply=self._matched(chunk, whole.index), commit=whole.index, snapshot=whole)

    def refuse(self, message: LeadersMessage, term: int) -> AppendReply:
        """The rejection for a leader of a term before ``term``."""
        return AppendReply(sender=self._node_id, receiver=message.sender, term=term, index=0, rejected=True)

    def _matched(self, message: Append | SnapshotChunk, index: int) -> AppendReply:
        return AppendReply(sender=self._node_id, receiver=message.sender, term=message.term, index=index)

    def _rejected(self, append: Append) -> AppendReply:
        hint_index, hint_term = self._log.last_not_after(append.previous_index, append.previous_term)
        return AppendReply(
            sender=self._node_id,
            receiver=append.sender,
            term=append.term,
            index=append.previous_index,
            rejected=True,
            hint_index=hint_index,
            hint_term=hint_term,
        )

    def _wanted(self, chunk: SnapshotChunk) -> SnapshotReply:
        position = self._incoming.position
        return SnapshotReply(sender=self._node_id, receiver=chunk.sender, term=chunk.term, index=chunk.index, position=position)
