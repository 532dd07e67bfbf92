"""A scrub names damage in a bucket of a real S3 server as it does in a directory."""

from __future__ import annotations

import random
from uuid import UUID, uuid4

import pytest
from conftest import S3Server
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import Repair, RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.object_keys import deletion_marker_key
from stratalog_tiering.store import open_store

pytestmark = pytest.mark.s3
TOPIC = Topic(name="flights", topic_id=UUID(int=7), partition_count=1, replication_factor=1)


async def test_missing_and_altered_segments_are_named(minio_server: S3Server) -> None:
    clock, background = SystemClock(), ThreadBackground(4, "store")
    url = minio_server.make_bucket(f"test-{uuid4().hex[:12]}")
    store = open_store(url, background=background, clock=clock, random=random.Random(7))
    writer = ArchiveWriter(store, TOPIC, clock, random.Random(5))
    keys: list[str] = []
    for offset in range(3):
        batch = build_batch([Record(offset=offset, timestamp_ms=offset, key=b"key", value=b"v" * 40)], leader_epoch=0)
        _, entry = await writer.append(0, [bytes(batch)])
        keys.append(entry.key)

    async def scrub() -> list[tuple[Damage, str]]:
        made = BucketScrub(store, background, before_ms=0)
        inventory = await made.inventory()
        reports = [await made.partition(topic, 0) for topic in inventory.topics]
        return [(found.kind, found.key) for report in reports for found in report.findings]

    assert await scrub() == []
    content = bytearray(await store.get(keys[2]))
    content[70] ^= 1
    await store.put(keys[2], [bytes(content)], if_absent=False)
    await store.delete([keys[0]])
    assert await scrub() == [(Damage.SEGMENT_MISSING, keys[0]), (Damage.SEGMENT_DATA, keys[2])]
    await store.put(deletion_marker_key(TOPIC.topic_id), [b"{}"])
    assert await scrub() == [], "the objects of a deleted topic are deleted as intended"
    await store.close()
    background.close()


async def test_damage_in_one_bucket_is_repaired_from_another(minio_server: S3Server) -> None:
    """A large segment is copied in several parts, over the damaged object and to a key that was deleted."""
    clock, background = SystemClock(), ThreadBackground(4, "store")
    urls = [minio_server.make_bucket(f"test-{uuid4().hex[:12]}") for _ in range(2)]
    first, second = (open_store(url, background=background, clock=clock, random=random.Random(7)) for url in urls)
    keys: list[str] = []
    for store in (first, second):
        writer = ArchiveWriter(store, TOPIC, StoppedClock(), random.Random(5))
        keys = []
        for number, size in enumerate((40, 9 * 1024 * 1024)):
            records = [Record(offset=number, timestamp_ms=number, key=b"key", value=bytes(size))]
            _, entry = await writer.append(0, [bytes(build_batch(records, leader_epoch=0))])
            keys.append(entry.key)
    content = bytearray(await first.get(keys[1]))
    content[7_000_000] ^= 1
    await first.put(keys[1], [bytes(content)], if_absent=False)
    await first.delete([keys[0]])

    async def unlimited(_: int) -> None:
        pass

    scrub = BucketScrub(first, background, before_ms=0)
    limits = CopyLimits(background=background, clock=clock, take=unlimited, part_bytes=5 * 1024 * 1024)
    (topic,) = (await scrub.inventory()).topics
    _, repairs = await Repairer(scrub, first, RepairSources(copy=second), limits).partition(topic, 0)
    assert [*repairs.items()] == [
        ((Damage.SEGMENT_MISSING, keys[0]), Repair(source=RepairedFrom.COPY)),
        ((Damage.SEGMENT_DATA, keys[1]), Repair(source=RepairedFrom.COPY)),
    ]
    for key in keys:
        assert await first.get(key) == await second.get(key)
    assert (await scrub.partition(topic, 0)).findings == ()
    for store in (first, second):
        await store.close()
    background.close()


class StoppedClock(SystemClock):
    """Two buckets that are written with it hold the same objects."""

    def wall_ms(self) -> int:
        return 1_000_000
