"""Whichever bit of a bucket's objects is altered, or wherever one ends: no reader gets wrong records, and repairs undo it.

The bucket has every kind of object: encrypted and plain segments, data keys, manifest pages, lists of removed objects, tree
pages, markers and version objects, descriptors. One object is damaged at a time, and a second copy is sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any, cast
from uuid import UUID

import pytest
from support.archive_writer import ArchiveWriter
from support.memory_store import MemoryStore
from support.planted_damage import small_batch

from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.errors import Corrupt, Invalid, NotFound, StorageFailed
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.bucket_scrub import BucketScrub
from stratalog_tiering.cold.reader import ColdReader, ColdReaderSettings
from stratalog_tiering.copies.copying import CopyLimits
from stratalog_tiering.copies.repair import RepairedFrom, Repairer, RepairSources
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.commit_marker import decode_marker, decode_topic
from stratalog_tiering.format.descriptor import OwnerDescriptor, WrappedDataKey, decode_descriptor, encode_descriptor
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_keys import (
    data_key_key,
    is_data_key,
    is_marker,
    is_version_object,
    marker_key,
    owner_key,
    parse_segment_key,
    topic_key,
)
from stratalog_tiering.store import ObjectStore, StoreWithCopy
from stratalog_tiering.store.key_ring import FileKeyRing, create_key

SEGMENTS = 9
ENCRYPTED = frozenset({2, SEGMENTS - 1})
EXPECTED = b"".join(small_batch(3 * number) for number in range(SEGMENTS))
INTENDED = (Corrupt, Invalid, NotFound, StorageFailed)


async def write(contents: MemoryStore, *, version_objects: bool) -> None:
    store, topic = cast(ObjectStore, contents), Topic(
        name="flights", topic_id=UUID(int=0xAA), partition_count=1, replication_factor=1, configs={"retention.ms": "-1"}
    )  # fmt: skip
    limits = ManifestLimits(
        inline_segments_max=4, page_segments=2, page_fan_in=3, inline_removed_max=1, removed_list_objects_max=3,
        inline_spans_max=4,
    )  # fmt: skip
    writer = ArchiveWriter(
        store, topic, SystemClock(), random.Random(5), limits=limits, zstd_level=3, version_objects=version_objects
    )  # fmt: skip
    for number in range(SEGMENTS):
        writer._encryption_key = "k1" if number in ENCRYPTED else ""
        await writer.append(0, [small_batch(3 * number)], producers=[ProducerEntry(7, 1)])
    await store.put(owner_key(0), [encode_descriptor(OwnerDescriptor(cluster_id="c", number=0, taken_at_ms=1))])


@pytest.fixture(scope="module", params=[False, True], ids=["markers", "version objects"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MemoryStore:
    keys = tmp_path_factory.mktemp("keys")
    create_key(keys, "k1")
    contents = MemoryStore({}, FileKeyRing(keys))
    asyncio.run(write(contents, version_objects=request.param))
    return contents


async def needed(sound: MemoryStore) -> list[str]:
    """The objects that the newest version needs, one of each kind, and all descriptors and data keys."""
    archive = Archive(cast(ObjectStore, sound))
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    manifest = await archive.manifest(pointer)
    entries = [entry async for entry in archive.segments(manifest)]
    assert all((manifest.pages, manifest.removed_lists, manifest.tree.pages))
    return [
        pointer.object_key,
        marker_key(pointer.object_key),
        manifest.pages[0].key,
        manifest.removed_lists[0].key,
        manifest.tree.pages[0].key,
        entries[0].key,
        entries[-1].key,
        data_key_key(entries[-1].key),
        owner_key(0),
        topic_key(UUID(int=0xAA), 1),
    ]


def alterations(key: str, content: bytes, seed: int) -> Iterator[bytes]:
    """The object with one bit altered, cut, and longer: a sample of the bits, more of headers, trailers and descriptors."""
    chance = random.Random(f"{seed} {key}")
    for position in range(len(content)):
        at_ends = min(position, len(content) - position) < 44
        share = 0.03 if content.startswith(b"{") or at_ends else 0.002
        for bit in range(8):
            if chance.random() < share:
                yield content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]
    for version in (b"0", b"3", b"5", b"9"):
        if content.startswith(b"{"):
            yield content.replace(b'"format_version": 1', b'"format_version": ' + version)
    for end in sorted({0, 1, 19, 20, len(content) // 2, len(content) - 1}):
        yield content[:end]
    yield content + b"\0"


def is_known_as_altered(key: str, altered: bytes, sound: bytes) -> bool:
    """Descriptors are JSON without a checksum: of one that says something possible, nothing shows that it is altered.

    Nor that there has never been a key with the name that is in an altered data key.
    """
    try:
        if key == owner_key(0):
            decode_descriptor(altered, OwnerDescriptor, key)
        elif key == topic_key(UUID(int=0xAA), 1):
            decode_topic(altered, key)
        elif is_marker(key) and not is_version_object(key):
            return decode_marker(altered, key) != decode_marker(sound, key)
        elif is_data_key(key):
            found, expected = (decode_descriptor(each, WrappedDataKey, key) for each in (altered, sound))
            return found.key_name == expected.key_name and found != expected
        else:
            return True
    except INTENDED:
        return True
    return False


async def read_all(store: Any) -> bytes:
    """All records, found as a reader without metadata finds them."""
    archive = Archive(store)
    pointer = await archive.pointer(await archive.topic("flights"), 0)
    assert pointer is not None
    reader = ColdReader(store, ColdReaderSettings(), SystemClock())
    content, offset = b"", pointer.start_offset
    try:
        while offset < pointer.end_offset:
            run = await reader.fetch(pointer, offset, 2**30, 10)
            content, offset = content + b"".join(run.batches), run.end_offset
    finally:
        await reader.close()
    return content


async def repair(store: MemoryStore, copy: MemoryStore, background: ThreadBackground) -> list[Any]:
    async def unlimited(_: int) -> None:
        pass

    scrub = BucketScrub(cast(ObjectStore, store), background, before_ms=0)
    limits = CopyLimits(background=background, clock=SystemClock(), take=unlimited)
    sources = RepairSources(copy=cast(ObjectStore, copy))
    repairer = Repairer(scrub, cast(ObjectStore, store), sources, limits)
    inventory = await scrub.inventory()
    results = [*(await repairer.bucket(inventory.findings)).items()]
    clusters = set()
    for topic in inventory.topics:
        report, made = await repairer.partition(topic, 0)
        results += made.items()
        clusters |= {report.progress.cluster_id} - {""}
    of_owners = await scrub.owners(frozenset(clusters))
    return [*results, *(await repairer.bucket(of_owners)).items()]


async def test_no_altered_object_is_read_wrong(sound: MemoryStore, fresh_seed: int) -> None:
    for key in await needed(sound):
        for altered in alterations(key, sound.contents[key], fresh_seed):
            damaged = MemoryStore({**sound.contents, key: altered}, sound.keys)
            with contextlib.suppress(*INTENDED):
                assert await read_all(damaged) == EXPECTED, (key, altered)
            if is_known_as_altered(key, altered, sound.contents[key]):
                both = StoreWithCopy(cast(ObjectStore, damaged), cast(ObjectStore, sound), SystemClock())
                assert await read_all(both) == EXPECTED, (key, altered)


async def test_every_altered_object_is_repaired(sound: MemoryStore, background: ThreadBackground, fresh_seed: int) -> None:
    for key in await needed(sound):
        for altered in alterations(key, sound.contents[key], fresh_seed):
            damaged = MemoryStore({**sound.contents, key: altered}, sound.keys)
            if is_known_as_altered(key, altered, sound.contents[key]):
                results = await repair(damaged, sound, background)
                assert damaged.contents == sound.contents, (key, altered, results)


async def test_the_data_key_of_another_segment_is_replaced(sound: MemoryStore, background: ThreadBackground) -> None:
    keys = [key for key in sound.contents if is_data_key(key)]
    assert len(keys) == len(ENCRYPTED)
    damaged = MemoryStore({**sound.contents, keys[0]: sound.contents[keys[1]]}, sound.keys)
    (((kind, _), made),) = await repair(damaged, sound, background)
    assert (kind, made.source) == (Damage.SEGMENT_DATA, RepairedFrom.COPY)
    assert damaged.contents == sound.contents


async def test_a_lost_data_key_is_restored_although_the_copys_segment_is_altered(
    sound: MemoryStore, background: ThreadBackground
) -> None:
    """The copy's key must decrypt the segment that is here: that of another segment is not taken."""
    key, other = [key for key in sound.contents if is_data_key(key)]
    segment = next(each for each in sound.contents if parse_segment_key(each) and data_key_key(each) == key)
    damaged = MemoryStore({name: content for name, content in sound.contents.items() if name != key}, sound.keys)
    altered = {segment: sound.contents[segment][:-1] + b"\0"}
    (((kind, _), made),) = await repair(damaged, MemoryStore({**sound.contents, **altered}, sound.keys), background)
    assert (kind, made.source) == (Damage.DATA_KEY_MISSING, RepairedFrom.COPY)
    assert damaged.contents == sound.contents
    del damaged.contents[key]
    wrong = MemoryStore({**sound.contents, **altered, key: sound.contents[other]}, sound.keys)
    ((_, made),) = await repair(damaged, wrong, background)
    assert made.source is None
    assert key not in damaged.contents


@pytest.mark.parametrize("altered_at", [1, -1])
@pytest.mark.parametrize("has_data_key", [True, False])
async def test_an_altered_segment_is_restored_together_with_its_data_key(
    sound: MemoryStore, background: ThreadBackground, altered_at: int, has_data_key: bool
) -> None:
    key = next(key for key in sound.contents if is_data_key(key))
    segment = next(each for each in sound.contents if parse_segment_key(each) and data_key_key(each) == key)
    altered = bytearray(sound.contents[segment])
    altered[altered_at] ^= 1
    wrong_key = sound.contents[key].replace(b'"format_version": 1', b'"format_version": 9')
    assert wrong_key != sound.contents[key]
    damaged = MemoryStore({**sound.contents, segment: bytes(altered), key: wrong_key}, sound.keys)
    if not has_data_key:
        del damaged.contents[key]
    made = await repair(damaged, sound, background)
    assert {each.source for _, each in made} == {RepairedFrom.COPY}
    assert damaged.contents == sound.contents


@pytest.mark.parametrize("kind", ["markers", "topics", "owners", "keys"])
async def test_descriptors_of_a_later_release_stay(sound: MemoryStore, background: ThreadBackground, kind: str) -> None:
    """They differ from the second copy's in more than their format version."""
    keys = {"topics": topic_key(UUID(int=0xAA), 1), "owners": owner_key(0), "keys": next(filter(is_data_key, sound.contents))}
    keys["markers"] = (await needed(sound))[1]
    if is_version_object(keys[kind]):
        return
    later = {**json.loads(sound.contents[keys[kind]]), "format_version": 2, "another": 1}
    damaged = MemoryStore({**sound.contents, keys[kind]: json.dumps(later).encode()}, sound.keys)
    before = dict(damaged.contents)
    results = await repair(damaged, sound, background)
    assert [(name[0], made.source) for name, made in results] == [(Damage.UNKNOWN_FORMAT, None)]
    assert damaged.contents == before
