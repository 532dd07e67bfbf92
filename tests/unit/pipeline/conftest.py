"""A bucket as tiering workers leave it, built with tiering's own writers in a local directory, and one Spark session."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from uuid import UUID

import msgspec
import pytest

from stratalog_core.batches.batch import read_header
from stratalog_tiering.core.compaction import BatchFilter, MapBuilder
from stratalog_tiering.core.offset_map import OffsetMap
from stratalog_tiering.format.block_cipher import BlockCipher, SegmentEncryption, data_key_context
from stratalog_tiering.format.descriptor import (
    CommitMarker,
    DeletionMarker,
    TopicDescriptor,
    WrappedDataKey,
    encode_descriptor,
)
from stratalog_tiering.format.footer import AbortedTransaction
from stratalog_tiering.format.manifest import (
    PresentBatches,
    Reason,
    SegmentEntry,
    SegmentKind,
    SegmentOptions,
    empty_manifest,
    segment_entry,
)
from stratalog_tiering.format.manifest_cut import cut_manifest
from stratalog_tiering.format.manifest_edit import ManifestEdit, NewManifest, Previous, Removal
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_keys import data_key_key, deletion_marker_key, marker_key, segment_key, topic_key
from stratalog_tiering.format.segment import (
    SegmentIdentity,
    SegmentWriter,
    iterate_block_batches,
    parse_footer,
    plain_block,
)
from stratalog_tiering.store.key_ring import FileKeyRing, create_key

Segment = Sequence[bytes | bytearray]
"""Batches of one segment."""


class ColdBucket:
    """Topics whose whole history is cold. ``partitions``: for each partition its segments, each a list of batches."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = f"file://{root}"
        self.segment_keys: dict[tuple[str, int], list[str]] = {}
        self._previous: dict[tuple[str, int], tuple[UUID, Previous]] = {}
        self._ids = itertools.count(1)
        self._random = Random(7)
        self._keys: Path | None = None
        root.mkdir(exist_ok=True)

    def encrypt(self, keys: Path) -> None:
        """Encrypt what is written from now on, with a new key in the directory ``keys``, which the URL then names."""
        create_key(keys, "k1")
        self._keys = keys
        self.url = f"file://{self.root}?keys={keys}"

    def add_topic(
        self,
        name: str,
        partitions: Sequence[Sequence[Segment]],
        *,
        block_bytes: int = 4096,
        drop_below: int = 0,
        limits: ManifestLimits | None = None,
        aborted: Sequence[AbortedTransaction] = (),
        deleted_at_ms: int = 0,
        zstd_level: int | None = None,
        topic_id: UUID | None = None,
    ) -> UUID:
        topic_id = topic_id or UUID(int=next(self._ids))
        descriptor = TopicDescriptor(topic_id=topic_id, name=name, partition_count=len(partitions), replication_factor=1)
        self.put(topic_key(topic_id, 1), encode_descriptor(descriptor))
        if deleted_at_ms:
            marker = DeletionMarker(topic_id=topic_id, deleted_at_ms=deleted_at_ms)
            self.put(deletion_marker_key(topic_id), encode_descriptor(marker))
        for number, segments in enumerate(partitions):
            if segments:
                entries = [
                    self._segment(topic_id, name, number, segment, block_bytes, aborted, zstd_level) for segment in segments
                ]
                self.segment_keys[name, number] = [entry.key for entry, _ in entries]
                self._manifest(topic_id, name, number, entries, drop_below, limits)
        return topic_id

    def extend(self, name: str, number: int, *segments: Segment, drop_below: int = 0) -> None:
        """Offload more segments to a partition that has some; ``drop_below``: retention removes what is before this offset."""
        topic_id, previous = self._previous[name, number]
        entries = [self._segment(topic_id, name, number, segment, 4096, (), None) for segment in segments]
        self.segment_keys[name, number] += [entry.key for entry, _ in entries]
        self._append(name, number, previous, entries, drop_below, None)

    def cut(self, name: str, number: int, end_offset: int) -> None:
        """Let a partition end where one of its segments begins, as an operator's restore up to a point does."""
        _, previous = self._previous[name, number]
        kept = cut_manifest(previous.manifest, end_offset, {}, {}).kept
        base = Previous(manifest=kept, key=previous.key, sha256=previous.sha256)
        edit = ManifestEdit(base, writer="test", random_id=lambda: self._random.getrandbits(64))
        edit.settle_cut((), 1)
        self._finish(name, number, edit)

    def merge(self, name: str, number: int, batches: Segment) -> None:
        """Replace all segments of a partition by one that holds the same batches."""
        topic_id, previous = self._previous[name, number]
        merged, _ = self._segment(topic_id, name, number, batches, 4096, (), None)
        self.segment_keys[name, number] = [merged.key]
        edit = ManifestEdit(previous, writer="test", random_id=lambda: self._random.getrandbits(64))
        edit.replace(merged)
        self._finish(name, number, edit)

    def compact(self, name: str, number: int, now_ms: int = 0) -> None:
        """Replace all segments of a partition by a compacted one, as a tiering worker's pass does."""
        topic_id, previous = self._previous[name, number]
        sources = previous.manifest.segments
        batches = [batch for entry in sources for batch in self._batches_of(entry)]
        builder = MapBuilder(OffsetMap(1_000_000, b"secret"), sources[0].base_offset)
        assert all(builder.add(batch, read_header(batch)) for batch in batches)
        keep = BatchFilter(builder.offsets, builder.end_offset, now_ms, 0)
        writer = SegmentWriter(self._identity(topic_id, name, number, sources[0].base_offset), 400, is_compacted=True)
        for batch in batches:
            header = read_header(batch)
            kept = keep.filter(batch, header, is_last=header.next_offset == sources[-1].end_offset).batch
            if kept is not None:
                writer.append(kept)
        written = writer.finish(created_at_ms=1_000)
        key = segment_key(topic_id, number, sources[0].base_offset, 0, next(self._ids))
        self.put(key, b"".join(writer.take_parts()))
        entry = segment_entry(key, written, SegmentKind.COMPACTED)
        present = PresentBatches(
            base_offset=writer.first_batch_offset, end_offset=entry.end_offset, batch_count=entry.leaf_count
        )
        leaf_count = sum(each.leaf_count for each in sources)
        entry = msgspec.structs.replace(entry, leaf_count=leaf_count, options=SegmentOptions(present=present))
        edit = ManifestEdit(previous, writer="test", random_id=lambda: self._random.getrandbits(64))
        edit.replace(entry, reason=Reason.COMPACTED)
        self._finish(name, number, edit)

    def _batches_of(self, entry: SegmentEntry) -> list[memoryview]:
        content = (self.root / entry.key).read_bytes()
        blocks = parse_footer(content, len(content)).blocks
        plain = (plain_block(content[block.position : block.end_position], block) for block in blocks)
        return [batch for block in plain for batch, _ in iterate_block_batches(block)]

    def put(self, key: str, content: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _segment(
        self,
        topic_id: UUID,
        name: str,
        number: int,
        batches: Segment,
        block_bytes: int,
        aborted: Sequence[AbortedTransaction],
        zstd_level: int | None,
    ) -> tuple[SegmentEntry, bytes]:
        base_offset = read_header(batches[0]).base_offset
        identity = self._identity(topic_id, name, number, base_offset)
        key = segment_key(topic_id, number, base_offset, 0, self._random.getrandbits(64))
        writer = SegmentWriter(identity, block_bytes, zstd_level, self._encryption(topic_id, number, key))
        for batch in batches:
            writer.append(batch)
        written = writer.finish(created_at_ms=1, aborted_transactions=aborted)
        self.put(key, b"".join(writer.take_parts()))
        return segment_entry(key, written), written.leaves

    def _identity(self, topic_id: UUID, name: str, number: int, base_offset: int) -> SegmentIdentity:
        return SegmentIdentity(
            cluster_id="c", topic_id=topic_id, topic_name=name, partition=number, base_offset=base_offset, ledger_ids=(1,)
        )

    def _encryption(self, topic_id: UUID, number: int, segment: str) -> SegmentEncryption | None:
        if self._keys is None:
            return None
        data_key, wrapped = asyncio.run(FileKeyRing(self._keys).make("k1", data_key_context(topic_id, number)))
        stored = WrappedDataKey(topic_id=topic_id, partition=number, key_name="k1", wrapped=wrapped)
        self.put(data_key_key(segment), encode_descriptor(stored))
        return SegmentEncryption(data_key=data_key_key(segment), cipher=BlockCipher(data_key))

    def _manifest(
        self,
        topic_id: UUID,
        name: str,
        number: int,
        entries: Sequence[tuple[SegmentEntry, bytes]],
        drop_below: int,
        limits: ManifestLimits | None,
    ) -> None:
        previous = Previous(manifest=empty_manifest(topic_id, name, number, entries[0][0].base_offset))
        self._previous[name, number] = topic_id, previous
        self._append(name, number, previous, entries, drop_below, limits)

    def _append(
        self,
        name: str,
        number: int,
        previous: Previous,
        entries: Sequence[tuple[SegmentEntry, bytes]],
        drop_below: int,
        limits: ManifestLimits | None,
    ) -> None:
        for entry, leaves in entries:
            # One version for each segment, as offloading makes them; only the newest counts.
            edit = ManifestEdit(previous, writer="test", random_id=lambda: self._random.getrandbits(64), limits=limits)
            edit.append(entry, leaves)
            edit.move_to_pages()
            if entry is entries[-1][0] and drop_below:
                edit.drop_below(drop_below, lambda _: Removal(reason=Reason.LOG_START))
            previous = self._finish(name, number, edit)

    def _finish(self, name: str, number: int, edit: ManifestEdit) -> Previous:
        new = edit.finish(created_at_ms=1)
        self._commit(new)
        previous = Previous(manifest=new.manifest, key=new.key, sha256=new.sha256)
        self._previous[name, number] = self._previous[name, number][0], previous
        return previous

    def _commit(self, new: NewManifest) -> None:
        for key, content in new.parts:
            self.put(key, content)
        self.put(new.key, new.content)
        marker = CommitMarker(manifest_key=new.key, manifest_version=new.manifest.version, sha256=new.sha256.hex())
        self.put(marker_key(new.key), encode_descriptor(marker))


@pytest.fixture
def cold_bucket(tmp_path: Path) -> ColdBucket:
    return ColdBucket(tmp_path / "bucket")


@pytest.fixture(scope="session")
def make_bucket(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], ColdBucket]:
    return lambda: ColdBucket(tmp_path_factory.mktemp("bucket"))
