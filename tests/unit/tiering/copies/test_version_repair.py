"""Damaged version objects are repaired. An altered header, as of a later release, is told from one by another copy."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.tiering.conftest import FaultyStore

from stratalog_core.errors import Refused
from stratalog_core.system import SystemClock
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.bucket_scrub import BucketScrub, FoundTopic
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import Repair, RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core.damage import Damage, Finding
from stratalog_tiering.format.manifest import decode_manifest, encode_manifest
from stratalog_tiering.format.object_keys import is_version_object, version_key
from stratalog_tiering.store import ObjectStore, open_store

Cluster = Any  # the TestCluster of conftest.py, which cannot be imported
Batches = Callable[..., list[bytes]]
DAY_MS = 86_400_000
VERSION, FLAGS = 9, 11
"""Positions in the header of a manifest."""


async def unlimited(_: int) -> None:
    pass


async def repairer_of(cluster: Cluster, sources: RepairSources) -> tuple[Repairer, FoundTopic]:
    scrub = BucketScrub(cluster.store, cluster.background, before_ms=0)
    limits = CopyLimits(background=cluster.background, clock=SystemClock(), take=unlimited)
    (topic,) = (await scrub.inventory()).topics
    return Repairer(scrub, cluster.store, sources, limits), topic


async def repaired(cluster: Cluster, sources: RepairSources) -> list[Repair]:
    repairer, topic = await repairer_of(cluster, sources)
    _, repairs = await repairer.partition(topic, 0)
    return [*repairs.values()]


@pytest.fixture
async def pointer(cluster: Cluster, make_batches: Batches) -> ManifestPointer:
    """Of a version object that is in the store."""
    await cluster.add_ledger(make_batches(0, [3]), 0)
    worker = await cluster.start_worker()
    await cluster.until(lambda: (made := cluster.pointer()) is not None and not made.content)
    await worker.close()
    found: ManifestPointer = cluster.pointer()
    assert is_version_object(found.object_key)
    return found


def second_copy(directory: Path, to: Path, cluster: Cluster) -> ObjectStore:
    shutil.copytree(directory, to)
    return open_store(str(to), background=cluster.background, clock=SystemClock(), random=random.Random(4))


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("position", [VERSION, FLAGS])
@pytest.mark.parametrize("has_metadata", [False, True])
async def test_an_altered_header_is_repaired(
    cluster: Cluster, pointer: ManifestPointer, store_directory: Path, tmp_path: Path, position: int, has_metadata: bool
) -> None:
    copy = second_copy(store_directory, tmp_path / "second", cluster)
    stored = store_directory / pointer.object_key
    committed = stored.read_bytes()
    flip(stored, position)
    pointers = {(pointer.topic_id, 0): pointer} if has_metadata else {}
    sources = RepairSources(copy=copy, pointers=pointers, has_metadata=has_metadata)
    assert await repaired(cluster, sources) == [Repair(source=RepairedFrom.COPY)]
    assert stored.read_bytes() == committed


async def test_a_version_that_no_copy_has_in_a_known_format_stays(
    cluster: Cluster, pointer: ManifestPointer, store_directory: Path, tmp_path: Path
) -> None:
    """A later release may have written it."""
    stored = store_directory / pointer.object_key
    flip(stored, FLAGS)
    before = stored.read_bytes()
    copy = second_copy(store_directory, tmp_path / "second", cluster)
    (made,) = await repaired(cluster, RepairSources(copy=copy))
    assert made.source is None
    assert "the marker in the second copy is damaged, too" in made.problem
    assert stored.read_bytes() == before


async def test_a_second_copy_that_refuses_to_answer_is_not_taken_for_one_without_the_version(
    cluster: Cluster, pointer: ManifestPointer, store_directory: Path, tmp_path: Path
) -> None:
    copy = FaultyStore(second_copy(store_directory, tmp_path / "second", cluster))
    stored = store_directory / pointer.object_key
    committed = stored.read_bytes()
    flip(stored, VERSION)
    sources = RepairSources(copy=copy, pointers={(pointer.topic_id, 0): pointer}, has_metadata=True)
    copy.before = lambda name, key: Refused("expired") if name == "get" else None
    assert await repaired(cluster, sources) == [Repair(source=None, problem="expired")]
    copy.before = lambda name, key: None
    assert await repaired(cluster, sources) == [Repair(source=RepairedFrom.COPY)]
    assert stored.read_bytes() == committed


async def test_a_version_that_was_damaged_before_it_was_read_back_is_written_again_from_metadata(
    cluster: Cluster, pointer: ManifestPointer, make_batches: Batches, store_directory: Path
) -> None:
    """Without the repair no worker can go on: its put is refused because the key exists."""
    key = version_key(pointer.topic_id, 0, pointer.manifest_version + 1)

    def damage(name: str, of: str) -> None:
        if (name, of) == ("get", key):
            cluster.store.before = lambda name, key: None
            (store_directory / key).write_bytes(b"damaged")

    cluster.store.before = damage
    await cluster.add_ledger(make_batches(3, [3]), 3)
    await cluster.start_worker("worker-2", sweep_interval_ms=DAY_MS)
    await cluster.until(lambda: f"{key} is not what was written" in cluster.last_error())
    unstored: ManifestPointer = cluster.pointer()
    sources = RepairSources(pointers={(pointer.topic_id, 0): unstored}, has_metadata=True)
    assert await repaired(cluster, sources) == [Repair(source=RepairedFrom.METADATA)]
    assert (store_directory / key).read_bytes() == unstored.content
    await cluster.until(lambda: not cluster.pointer().content and not cluster.log().ledgers)


async def test_a_version_of_another_history_is_not_replaced_by_that_in_metadata(
    cluster: Cluster, pointer: ManifestPointer, store_directory: Path
) -> None:
    stored = store_directory / pointer.object_key
    other = encode_manifest(msgspec.structs.replace(decode_manifest(stored.read_bytes()), writer="other"))
    unstored = msgspec.structs.replace(pointer, content=stored.read_bytes())
    stored.write_bytes(other)
    sources = RepairSources(pointers={(pointer.topic_id, 0): unstored}, has_metadata=True)
    repairer, topic = await repairer_of(cluster, sources)
    damage = Finding(kind=Damage.MANIFEST_ALTERED, key=pointer.object_key, problem="damaged when it was read")
    (made,) = (await repairer.repair(topic, 0, [damage])).values()
    assert made.source is None
    assert stored.read_bytes() == other
