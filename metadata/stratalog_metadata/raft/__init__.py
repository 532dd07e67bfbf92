"""Consensus by Raft, without I/O. ``storage`` has the durable log, ``node`` the shell that carries out what the core
orders.
"""

from __future__ import annotations

from stratalog_metadata.raft.core import Raft
from stratalog_metadata.raft.elections import Role
from stratalog_metadata.raft.membership import Member, Membership
from stratalog_metadata.raft.messages import Entry, EntryKind, Message
from stratalog_metadata.raft.ready import HardState, ReadReady, Ready, Snapshot
from stratalog_metadata.raft.settings import RaftSettings
from stratalog_metadata.raft.tail import LogTail

__all__ = [
    "Entry", "EntryKind", "HardState", "LogTail", "Member", "Membership", "Message", "Raft", "RaftSettings", "ReadReady",
    "Ready", "Role", "Snapshot",
]  # fmt: skip
