"""Messages between Raft nodes, and log entries.

All are msgpack arrays that begin with a tag. Tags and the order of fields are permanent. ``term`` is the sender's term, except
in a pre-vote request and its granted reply, where it is the term that the candidate would begin.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from stratalog_metadata.raft.membership import Member


class EntryKind(IntEnum):
    """NO_OP begins a leader's term; COMMAND is for the state machine; MEMBERS holds a configuration of the quorum."""

    NO_OP = 0
    COMMAND = 1
    MEMBERS = 2


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One position of the replicated log: ``index`` and ``term`` together identify its content permanently."""

    index: int
    term: int
    kind: EntryKind
    payload: bytes = b""


class MessageBase(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="type"):
    sender: int
    receiver: int
    term: int


class VoteRequest(MessageBase, frozen=True, kw_only=True, tag="vote"):
    """A candidate's request. ``pre``: only ask whether the vote would be granted. ``transfer``: the leader itself wants the
    election.
    """

    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


class VoteReply(MessageBase, frozen=True, kw_only=True, tag="vote_reply"):
    granted: bool
    pre: bool = False


class Append(MessageBase, frozen=True, kw_only=True, tag="append"):
    """AppendEntries: entries after (``previous_index``, ``previous_term``); ``commit`` is the leader's commit index."""

    previous_index: int
    previous_term: int
    commit: int
    entries: tuple[Entry, ...] = ()


class AppendReply(MessageBase, frozen=True, kw_only=True, tag="append_reply"):
    """The log is durable up to ``index``; or, if ``rejected``, it does not match at ``index`` but may match at the hint."""

    index: int
    rejected: bool = False
    hint_index: int = 0
    hint_term: int = 0


class Heartbeat(MessageBase, frozen=True, kw_only=True, tag="heartbeat"):
    """``commit`` is never greater than what the disk with this ``identity`` is known to store; ``round`` confirms leadership.

    A disk that replaced it under the same node id may receive the message late and must ignore it.
    """

    commit: int
    round: int
    identity: str = ""


class HeartbeatReply(MessageBase, frozen=True, kw_only=True, tag="heartbeat_reply"):
    round: int


class SnapshotChunk(MessageBase, frozen=True, kw_only=True, tag="snapshot"):
    """A chunk of the snapshot at (``index``, ``index_term``); ``checksum`` is the CRC32C of the whole snapshot.

    ``members`` is the configuration in force at that index.
    """

    index: int
    index_term: int
    total_bytes: int
    checksum: int
    position: int
    content: bytes
    members: tuple[Member, ...] = ()


class SnapshotReply(MessageBase, frozen=True, kw_only=True, tag="snapshot_reply"):
    """``position`` is the next byte that the follower needs of the snapshot at ``index``."""

    index: int
    position: int


class TimeoutNow(MessageBase, frozen=True, kw_only=True, tag="timeout_now"):
    """Leadership transfer: the receiver, whose log is complete, starts an election at once."""


Message = (
    VoteRequest | VoteReply | Append | AppendReply | Heartbeat | HeartbeatReply | SnapshotChunk | SnapshotReply | TimeoutNow
)
LeadersMessage = Append | Heartbeat | SnapshotChunk
"""Messages that only the leader of a term sends."""
Reply = VoteReply | AppendReply | HeartbeatReply | SnapshotReply
"""Replies that count towards a quorum or change a follower's progress; accepted from members only."""
