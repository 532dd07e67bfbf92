"""A partition drops from memory what an erasure may have removed, once."""

from __future__ import annotations

from typing import Any, cast
from uuid import UUID

from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.memory import follow_pointer
from stratalog_metadata.records import ManifestPointer


class Tail:
    def __init__(self) -> None:
        self.dropped: list[int] = []
        self.erased_version = 0

    def drop_below(self, offset: int) -> None:
        self.dropped.append(offset)


class Log:
    def __init__(self) -> None:
        self.tail = Tail()


def pointer(version: int, end_offset: int, erased_version: int) -> ManifestPointer:
    return ManifestPointer(
        topic_id=UUID(int=1), index=0, manifest_version=version, object_key="k", sha256="", start_offset=0,
        end_offset=end_offset, cold_bytes=1, erased_version=erased_version,
    )  # fmt: skip


def test_cold_records_leave_the_tail_with_each_erasure() -> None:
    log: Any = Log()
    for version, end, erased in ((1, 10, 0), (2, 20, 2), (3, 30, 2), (4, 30, 4)):
        follow_pointer(cast(PartitionLog, log), pointer(version, end, erased))
    assert (log.tail.dropped, log.tail.erased_version) == ([20, 30], 4)
    follow_pointer(None, pointer(5, 30, 5))
