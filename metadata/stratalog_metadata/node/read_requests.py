"""Answers reads, scans and snapshots from the replica's records. Long answers are sent in pieces.

Clients that begin at about the same time, as after a restart of all brokers, get the same snapshot. If each got its own, the
older ones would be dropped before their clients had all pieces, and each would cost the event loop the encoding of all records.

Always: every answer is bounded in size and names the index that it is of. The caller decides whether a read is linearizable.
"""

from __future__ import annotations

from typing import Final

from stratalog_metadata.node.recent_changes import RecentChanges
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import (
    ReadAnswer,
    ReadRequest,
    ScanAnswer,
    ScanRequest,
    SnapshotAnswer,
    SnapshotRequest,
)
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.replica import Replica

SCAN_RECORDS_MAX: Final = 10_000
SNAPSHOT_PIECE_BYTES: Final = 4 * 1024 * 1024
SNAPSHOTS_KEPT: Final = 2


class Answers:
    def __init__(self, replica: Replica, recent: RecentChanges) -> None:
        self._replica = replica
        self._recent = recent
        self._snapshots: dict[int, bytes] = {}

    def read(self, wanted: ReadRequest) -> bytes:
        records = self._replica.records
        return messages.encode(ReadAnswer(index=self._replica.index, records=[records.get(key) for key in wanted.keys]))

    def scan(self, wanted: ScanRequest) -> bytes:
        found = self._replica.records.scan(wanted.prefix)
        if wanted.after:
            found = [stored for stored in found if stored.record.key() > wanted.after]
        page = found[:SCAN_RECORDS_MAX]
        last_key = page[-1].record.key() if len(page) < len(found) else ""
        return messages.encode(ScanAnswer(index=self._replica.index, records=page, last_key=last_key))

    def snapshot(self, wanted: SnapshotRequest) -> bytes:
        index = wanted.index or self._begin_snapshot()
        content = self._snapshots.get(index)
        if content is None:
            return messages.encode(SnapshotAnswer(index=0))
        piece = content[wanted.position : wanted.position + SNAPSHOT_PIECE_BYTES]
        return messages.encode(SnapshotAnswer(index=index, total_bytes=len(content), content=piece))

    def _begin_snapshot(self) -> int:
        """Index of the snapshot for a client that begins: the newest one, if the client can follow the changes after it."""
        newest = max(self._snapshots, default=0)
        return newest if newest and self._recent.is_recent(newest) else self._make_snapshot()

    def _make_snapshot(self) -> int:
        image = self._replica.image()
        if image.index not in self._snapshots:
            self._snapshots[image.index] = snapshot.encode(image)
        while len(self._snapshots) > SNAPSHOTS_KEPT:
            del self._snapshots[min(self._snapshots)]
        return image.index
