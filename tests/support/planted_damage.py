"""A bucket with the history of one partition, and the kinds of damage that can be planted in it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec
from support.archive_writer import ArchiveWriter

from stratalog_core.batches.checkpoint import ProducerEntry
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.system import SystemClock, ThreadBackground
from stratalog_metadata.records import Topic
from stratalog_tiering.core.damage import Damage
from stratalog_tiering.format.descriptor import CommitMarker, encode_descriptor
from stratalog_tiering.format.manifest import (
    MANIFEST_MAGIC,
    PAGE_MAGIC,
    Manifest,
    SegmentEntry,
    decode_manifest,
    parse_page,
)
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_frame import frame, object_sha256
from stratalog_tiering.format.object_keys import owner_key, segments_prefix, topic_prefix
from stratalog_tiering.store import open_store

SEGMENTS = 12
DAY_S = 24 * 3600


class History:
    """A bucket with the history of one partition: pages, tree pages and inline segments. Damages it."""

    def __init__(self, directory: Path, topic: Topic) -> None:
        self.directory = directory
        self.topic = topic
        self.entries: list[SegmentEntry] = []

    async def write(self, writer: ArchiveWriter) -> None:
        for index in range(SEGMENTS):
            batches = [small_batch(index * 24 + 3 * number) for number in range(8)]
            _, entry = await writer.append(0, batches, producers=[ProducerEntry(7, 1)])
            self.entries.append(entry)
        self.age_everything()

    def copied_to(self, directory: Path) -> History:
        shutil.copytree(self.directory, directory)
        copied = History(directory, self.topic)
        copied.entries = list(self.entries)
        return copied

    def age_everything(self) -> None:
        for path in self.directory.rglob("*"):
            if path.is_file():
                self.age(path)

    def age(self, path: Path, seconds: int = 3 * DAY_S) -> None:
        then = path.stat().st_mtime - seconds
        os.utime(path, (then, then))

    def path(self, pattern: str) -> Path:
        """The first file that matches: in ``manifests`` that of the newest version."""
        return sorted(self.directory.glob(pattern))[0]

    def key(self, path: Path) -> str:
        return str(path.relative_to(self.directory))

    def flip(self, path: Path, position: int) -> str:
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)
        return self.key(path)

    def remove(self, path: Path) -> str:
        path.unlink()
        return self.key(path)

    def plant(self, key: str, content: bytes) -> str:
        path = self.directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.age(path)
        return key

    @property
    def manifest_path(self) -> Path:
        return self.path("manifests/*/*/*.manifest")

    @property
    def manifest(self) -> Manifest:
        return decode_manifest(self.manifest_path.read_bytes())

    def commit(self, manifest: Manifest) -> str:
        """Replace the newest manifest, and its digest in the marker, as a defective writer would have written them."""
        content = frame(MANIFEST_MAGIC, manifest)
        self.manifest_path.write_bytes(content)
        key = self.key(self.manifest_path)
        marker = CommitMarker(manifest_key=key, manifest_version=manifest.version, sha256=object_sha256(content).hex())
        self.path("manifests/*/*/*.committed").write_bytes(encode_descriptor(marker))
        return key

    def commit_entries(self, *segments: SegmentEntry, **totals: int) -> str:
        return self.commit(msgspec.structs.replace(self.manifest, segments=segments, **totals))

    def without_segment(self) -> str:
        first, second, *rest = self.manifest.segments
        return self.commit_entries(
            first, *rest, record_count=self.manifest.record_count - second.record_count,
            cold_bytes=self.manifest.cold_bytes - second.stored_bytes,
        )  # fmt: skip

    def segment_twice(self) -> str:
        first, *rest = self.manifest.segments
        return self.commit_entries(
            first, first, *rest, record_count=self.manifest.record_count + first.record_count,
            cold_bytes=self.manifest.cold_bytes + first.stored_bytes,
        )  # fmt: skip

    def other_digest(self) -> str:
        first, *rest = self.manifest.segments
        self.commit_entries(msgspec.structs.replace(first, object_sha256=bytes(32)), *rest)
        return first.key

    def other_leaves(self) -> str:
        first, *rest = self.manifest.segments
        self.commit_entries(msgspec.structs.replace(first, first_leaf=0), *rest)
        return first.key

    def other_head(self) -> str:
        return self.commit(
            msgspec.structs.replace(self.manifest, tree=msgspec.structs.replace(self.manifest.tree, head=bytes(32)))
        )

    def page_without_segment(self) -> str:
        ref, *refs = self.manifest.pages
        path = self.directory / ref.key
        page = parse_page(path.read_bytes(), ref.sha256)
        lost = page.segments[1]
        content = frame(PAGE_MAGIC, msgspec.structs.replace(page, segments=(page.segments[0], *page.segments[2:])))
        path.write_bytes(content)
        pages = (msgspec.structs.replace(ref, sha256=object_sha256(content)), *refs)
        self.commit(
            msgspec.structs.replace(
                self.manifest, pages=pages, record_count=self.manifest.record_count - lost.record_count,
                cold_bytes=self.manifest.cold_bytes - lost.stored_bytes,
            )
        )  # fmt: skip
        return ref.key

    def other_topic(self) -> str:
        path = self.path("topics/*/*.json")
        document = json.loads(path.read_bytes())
        path.write_text(json.dumps({**document, "partition_count": 0}))
        return self.key(path)

    def marker_of_another(self) -> str:
        newest, older, *_ = sorted(self.directory.glob("manifests/*/*/*.committed"))
        newest.write_bytes(older.read_bytes())
        return self.key(newest)

    def marker_with_another_digest(self) -> str:
        path = self.path("manifests/*/*/*.committed")
        document = json.loads(path.read_bytes())
        path.write_text(json.dumps({**document, "sha256": "0" * 64}))
        return self.key(self.manifest_path)

    def segment(self, index: int) -> Path:
        return self.directory / self.entries[index].key

    def cut(self, path: Path) -> str:
        path.write_bytes(path.read_bytes()[:-1])
        return self.key(path)

    def lost_topic(self) -> str:
        self.remove(self.path("topics/*/*.json"))
        return topic_prefix(self.topic.topic_id)


def small_batch(offset: int) -> bytes:
    records = [Record(offset=offset + step, timestamp_ms=offset + step, key=b"key", value=b"v" * 40) for step in range(3)]
    return bytes(build_batch(records, leader_epoch=0))


def write_history(directory: Path) -> History:
    """A new bucket in ``directory``: pages, tree pages, lists of removed objects, and inline segments."""
    topic = Topic(name="flights", topic_id=UUID(int=0xAA), partition_count=2, replication_factor=1, configs={})
    made = History(directory, topic)
    background = ThreadBackground(1, "written")
    store = open_store(str(directory), background=background, clock=SystemClock(), random=random.Random(3))
    limits = ManifestLimits(
        inline_segments_max=4,
        page_segments=2,
        page_fan_in=3,
        inline_removed_max=1,
        removed_list_objects_max=3,
        inline_spans_max=4,
    )
    asyncio.run(made.write(ArchiveWriter(store, topic, SystemClock(), random.Random(5), block_bytes_target=400, limits=limits)))
    background.close()
    return made


@dataclass(frozen=True)
class Planted:
    """A kind of damage, and the function that plants it and returns the key that a finding must name."""

    kind: Damage
    plant: Callable[[History], str]


STRANGER = f"segments/{'b' * 32}/0/{0:020d}-{0:010d}-{1:016x}.segment"
FLAGS: Final = 11
"""A position in the must-understand flags of a manifest, page, list or tree page: altered, it looks like a later release's."""
TRAILER_VERSION: Final = -15
"""The same in the format version of a segment's trailer."""
PLANTED = [
    Planted(Damage.MARKER_MISSING, lambda each: each.remove(each.path("manifests/*/*/*.committed"))),
    Planted(Damage.MARKER_ALTERED, lambda each: each.flip(each.path("manifests/*/*/*.committed"), 0)),
    Planted(Damage.MARKER_ALTERED, History.marker_of_another),
    Planted(Damage.MANIFEST_DIGEST, History.marker_with_another_digest),
    Planted(Damage.MANIFEST_MISSING, lambda each: each.remove(each.manifest_path)),
    Planted(Damage.MANIFEST_ALTERED, lambda each: each.flip(each.manifest_path, 60)),
    Planted(Damage.MANIFEST_ALTERED, lambda each: each.flip(each.manifest_path, FLAGS)),
    Planted(Damage.MANIFEST_ALTERED, lambda each: each.flip(sorted(each.directory.glob("manifests/*/*/*.manifest"))[4], 60)),
    Planted(Damage.MANIFEST_ALTERED, lambda each: each.flip(sorted(each.directory.glob("manifests/*/*/*.manifest"))[4], FLAGS)),
    Planted(Damage.MANIFEST_INCONSISTENT, lambda each: each.commit(msgspec.structs.replace(each.manifest, record_count=1))),
    Planted(Damage.PAGE_MISSING, lambda each: each.remove(each.directory / each.manifest.pages[0].key)),
    Planted(Damage.PAGE_ALTERED, lambda each: each.flip(each.directory / each.manifest.pages[0].key, 60)),
    Planted(Damage.PAGE_ALTERED, lambda each: each.flip(each.directory / each.manifest.pages[0].key, FLAGS)),
    Planted(Damage.REMOVED_LIST_MISSING, lambda each: each.remove(each.directory / each.manifest.removed_lists[0].key)),
    Planted(Damage.REMOVED_LIST_ALTERED, lambda each: each.flip(each.directory / each.manifest.removed_lists[0].key, 60)),
    Planted(Damage.REMOVED_LIST_ALTERED, lambda each: each.flip(each.directory / each.manifest.removed_lists[0].key, FLAGS)),
    Planted(Damage.TREE_PAGE_MISSING, lambda each: each.remove(each.directory / each.manifest.tree.pages[0].key)),
    Planted(Damage.TREE_PAGE_ALTERED, lambda each: each.flip(each.directory / each.manifest.tree.pages[0].key, 60)),
    Planted(Damage.TREE_PAGE_ALTERED, lambda each: each.flip(each.directory / each.manifest.tree.pages[0].key, FLAGS)),
    Planted(Damage.TREE_HEAD, History.other_head),
    Planted(Damage.TREE_LEAVES, History.other_leaves),
    Planted(Damage.GAP, History.without_segment),
    Planted(Damage.GAP, History.page_without_segment),
    Planted(Damage.OVERLAP, History.segment_twice),
    Planted(Damage.SEGMENT_MISSING, lambda each: each.remove(each.segment(3))),
    Planted(Damage.SEGMENT_SIZE, lambda each: each.cut(each.segment(3))),
    Planted(Damage.SEGMENT_DATA, lambda each: each.flip(each.segment(3), 100)),
    Planted(Damage.SEGMENT_SECTION, lambda each: each.flip(each.segment(3), each.entries[3].data_bytes + 1)),
    Planted(Damage.SEGMENT_FOOTER, lambda each: each.flip(each.segment(3), -60)),
    Planted(Damage.SEGMENT_FOOTER, lambda each: each.flip(each.segment(3), TRAILER_VERSION)),
    Planted(Damage.SEGMENT_DIGEST, History.other_digest),
    Planted(Damage.DESCRIPTOR_MISSING, History.lost_topic),
    Planted(Damage.DESCRIPTOR_ALTERED, lambda each: each.flip(each.path("topics/*/*.json"), 0)),
    Planted(Damage.DESCRIPTOR_ALTERED, History.other_topic),
    Planted(Damage.DESCRIPTOR_ALTERED, lambda each: each.plant(owner_key(0), b"{")),
    Planted(Damage.ORPHAN, lambda each: each.plant(segments_prefix(each.topic.topic_id, 0) + "unknown.segment", b"x")),
    Planted(Damage.ORPHAN, lambda each: each.plant(STRANGER, b"x")),
]  # fmt: skip
