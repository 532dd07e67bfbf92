"""What Raft nodes say to each other, and the entries that they agree on.

All are msgpack arrays that begin with a tag; tags and the order of fields are permanent. ``term`` is always the
sender's, but in a pre-vote and its granting, where it is the term that the candidate would begin.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from stratalog_metadata.raft.membership import Member


class EntryKind(IntEnum):
    """NO_OP begins a leader's term; COMMAND is the state machine's; MEMBERS is a configuration of the quorum."""

    NO_OP = 0
    COMMAND = 1
    MEMBERS = 2


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One position of the replicated log: ``index`` and ``term`` together identify its content for ever."""

    index: int
    term: int
    kind: EntryKind
    payload: bytes = b""


class MessageBase(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag_field="type"):
    sender: int
    receiver: int
    term: int


class VoteRequest(MessageBase, frozen=True, kw_only=True, tag="vote"):
    """``pre``: only asks whether a vote would be granted. ``transfer``: the leader itself wants the election."""

    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


class VoteReply(MessageBase, frozen=True, kw_only=True, tag="vote_reply"):
    granted: bool
    pre: bool = False


class Append(MessageBase, frozen=True, kw_only=True, tag="append"):
    """Entries that follow (``previous_index``, ``previous_term``); ``commit`` is the leader's commit index."""

    previous_index: int
    previous_term: int
    commit: int
    entries: tuple[Entry, ...] = ()


class AppendReply(MessageBase, frozen=True, kw_only=True, tag="append_reply"):
    """Durable up to ``index``; or, ``rejected``, there is no match at ``index`` but perhaps at the hint."""

    index: int
    rejected: bool = False
    hint_index: int = 0
    hint_term: int = 0


class Heartbeat(MessageBase, frozen=True, kw_only=True, tag="heartbeat"):
    """``commit`` is never beyond what the disk with this ``identity`` is known to hold; ``round`` confirms leadership.

    A disk that has replaced it under its number, and gets the message late, must not take it for itself.
    """

    commit: int
    round: int
    identity: str = ""


class HeartbeatReply(MessageBase, frozen=True, kw_only=True, tag="heartbeat_reply"):
    round: int


class SnapshotChunk(MessageBase, frozen=True, kw_only=True, tag="snapshot"):
    """A piece of the snapshot at (``index``, ``index_term``); ``checksum`` is the CRC32C of the whole.

    ``members`` is the configuration that was in force there.
    """

    index: int
    index_term: int
    total_bytes: int
    checksum: int
    position: int
    content: bytes
    members: tuple[Member, ...] = ()


class SnapshotReply(MessageBase, frozen=True, kw_only=True, tag="snapshot_reply"):
    """The next wanted position of the snapshot at ``index``."""

    index: int
    position: int


class TimeoutNow(MessageBase, frozen=True, kw_only=True, tag="timeout_now"):
    """The leader hands over: the receiver, whose log is complete, campaigns at once."""


Message = (
    VoteRequest | VoteReply | Append | AppendReply | Heartbeat | HeartbeatReply | SnapshotChunk | SnapshotReply | TimeoutNow
)
LeadersMessage = Append | Heartbeat | SnapshotChunk
"""What only the leader of a term sends."""
Reply = VoteReply | AppendReply | HeartbeatReply | SnapshotReply
"""What counts towards a quorum, or moves what a leader knows of its follower: from members only."""
