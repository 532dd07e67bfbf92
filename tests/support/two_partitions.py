"""A bucket for tests of commands: one topic with a segment in each of two partitions."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from uuid import UUID

from support.archive_writer import ArchiveWriter

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_tiering.store import open_store

TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=2, replication_factor=1)


def write_two_partitions(directory: Path) -> None:
    """Write a segment of three records to each partition of ``TOPIC``."""
    background = ThreadBackground(1, "store")
    store = open_store(str(directory), background=background, clock=SystemClock(), random=random.Random(3))
    writer = ArchiveWriter(store, TOPIC, SystemClock(), random.Random(5))

    async def write() -> None:
        for partition in range(2):
            records = [Record(offset=step, timestamp_ms=step, key=b"key", value=b"v" * 40) for step in range(3)]
            await writer.append(partition, [bytes(build_batch(records, leader_epoch=0))])

    asyncio.run(write())
    background.close()
