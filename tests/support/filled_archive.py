"""Fills a bucket with topics whose records tell their own place."""

from __future__ import annotations

from random import Random
from uuid import UUID, uuid4

from support.archive_writer import ArchiveWriter

from stratalog_core.batches.batch import assign_offset
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock
from stratalog_metadata.records import Topic
from stratalog_tiering.store import ObjectStore

RECORDS: int = 10
"""Records of one segment."""


def value_at(topic: str, partition: int, offset: int) -> bytes:
    return f"{topic}-{partition}-{offset}".encode()


def segment_batch(topic: str, partition: int, base_offset: int, leader_epoch: int = 0) -> bytes:
    """Return a batch of ``RECORDS`` records; the timestamp of each is 1000 plus its offset."""
    records = [
        Record(
            offset=number,
            timestamp_ms=1000 + base_offset + number,
            key=None,
            value=value_at(topic, partition, base_offset + number),
        )
        for number in range(RECORDS)
    ]
    batch = build_batch(records)
    assign_offset(memoryview(batch), base_offset, leader_epoch)
    return bytes(batch)


class FilledTopic:
    """A topic in a bucket that grows segment by segment."""

    def __init__(self, store: ObjectStore, name: str, partitions: int = 1, topic_id: UUID | None = None) -> None:
        self.topic = Topic(name=name, topic_id=topic_id or uuid4(), partition_count=partitions, replication_factor=1)
        self._writer = ArchiveWriter(store, self.topic, SystemClock(), Random())
        self._ends = [0] * partitions

    async def append(self, partition: int, segments: int = 1, leader_epoch: int = 0) -> None:
        for _ in range(segments):
            base_offset = self._ends[partition]
            await self._writer.append(partition, [segment_batch(self.topic.name, partition, base_offset, leader_epoch)])
            self._ends[partition] += RECORDS


async def fill(store: ObjectStore, name: str, partitions: int = 1, segments: int = 1) -> FilledTopic:
    """Write a new topic with ``segments`` in each partition."""
    filled = FilledTopic(store, name, partitions)
    for partition in range(partitions):
        await filled.append(partition, segments)
    return filled
