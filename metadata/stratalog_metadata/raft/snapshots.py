"""Snapshots in transfer: split into chunks by the leader, assembled and checked by the follower."""

from __future__ import annotations

import crc32c

from stratalog_metadata.raft.membership import Membership
from stratalog_metadata.raft.messages import SnapshotChunk
from stratalog_metadata.raft.ready import Snapshot


class OutgoingSnapshot:
    """A snapshot that the leader sends to followers; its CRC is computed once."""

    __slots__ = ("checksum", "membership", "snapshot")

    def __init__(self, snapshot: Snapshot, membership: Membership) -> None:
        self.snapshot = snapshot
        self.membership = membership
        self.checksum = crc32c.crc32c(snapshot.content)

    def chunk(self, sender: int, receiver: int, term: int, position: int, chunk_bytes: int) -> SnapshotChunk:
        return SnapshotChunk(
            sender=sender,
            receiver=receiver,
            term=term,
            index=self.snapshot.index,
            index_term=self.snapshot.term,
            total_bytes=len(self.snapshot.content),
            checksum=self.checksum,
            position=position,
            content=self.snapshot.content[position : position + chunk_bytes],
            members=self.membership.members,
        )


class IncomingSnapshot:
    """Collects chunks in order. A chunk of another snapshot starts again; a gap or repetition is answered with the wanted
    position.
    """

    __slots__ = ("_content", "_identity")

    def __init__(self) -> None:
        self._identity = (0, 0, 0, 0)
        self._content = bytearray()

    @property
    def position(self) -> int:
        return len(self._content)

    def add(self, chunk: SnapshotChunk) -> Snapshot | None:
        """The whole snapshot, once it is complete and its checksum matches."""
        identity = (chunk.index, chunk.index_term, chunk.total_bytes, chunk.checksum)
        if identity != self._identity:
            self._identity = identity
            self._content.clear()
        if chunk.position == len(self._content):
            self._content += chunk.content
        if len(self._content) < chunk.total_bytes:
            return None
        content = bytes(self._content)
        self.forget()
        if crc32c.crc32c(content) != chunk.checksum:
            return None
        return Snapshot(index=chunk.index, term=chunk.index_term, content=content)

    def forget(self) -> None:
        self._identity = (0, 0, 0, 0)
        self._content = bytearray()
