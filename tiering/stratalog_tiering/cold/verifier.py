"""Full verification of cold history, with or without metadata: reads every byte and reports each damage with its place.

It checks, per partition: the manifest against the committed digest, the hash chain back to the oldest version that is kept,
the pages, that segments tile the offsets without gap or overlap, the head of the partition's Merkle tree, and of each segment
size, SHA-256, footer, block CRCs, batch CRCs and offsets, and that its batches are the tree's leaves. A store that does not
answer raises an error and is not a finding. Repairs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject
from stratalog_core.ports import Background
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import Finding, block_leaves, check_segment, segment_finding
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, decode_manifest
from stratalog_tiering.format.merkle import split_hashes
from stratalog_tiering.format.partition_tree import TreeProofs
from stratalog_tiering.store import ObjectStore

READS_AT_ONCE: Final = 4


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of one partition's verification; the totals are known once the manifest is read."""

    topic: str
    partition: int
    start_offset: int = 0
    end_offset: int = 0
    segments: int = 0
    segments_total: int = 0
    records: int = 0
    bytes: int = 0
    bytes_total: int = 0
    manifest_versions: int = 0
    tree_size: int = 0
    tree_head: str = ""
    """The head of the partition's Merkle tree, in hex."""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """The result for one partition, which is sound if there are no findings."""

    progress: Progress
    findings: tuple[Finding, ...] = field(default=())


class Verifier:
    """Verifies partitions one after the other; ``background`` computes the checksums."""

    def __init__(
        self,
        store: ObjectStore,
        background: Background,
        *,
        reads_at_once: int = READS_AT_ONCE,
        on_progress: OnProgress = lambda _: None,
    ) -> None:
        self._store = store
        self._source = ManifestSource(store)
        self._archive = Archive(store)
        self._background = background
        self._reads_at_once = reads_at_once
        self._on_progress = on_progress

    async def bucket(self) -> AsyncIterator[PartitionReport]:
        """Verify every partition of every topic in the bucket, without metadata. Raises ``Unavailable``."""
        for topic in await self._archive.topics():
            async for report in self.topic(topic):
                yield report

    async def topic(self, topic: TopicDescriptor) -> AsyncIterator[PartitionReport]:
        """Verify every partition of a topic that has cold history, without metadata. Raises ``Unavailable``."""
        for partition in range(topic.partition_count):
            try:
                pointer = await self._archive.pointer(topic, partition)
            except (Corrupt, Invalid) as bad:
                yield _manifest_report(topic.name, partition, bad)
                continue
            if pointer is not None:
                yield await self.partition(topic.name, pointer)

    async def partition(self, topic: str, pointer: ManifestPointer) -> PartitionReport:
        """Verify one partition from its pointer, which may come from metadata. Raises ``Unavailable``."""
        progress = Progress(topic=topic, partition=pointer.index)
        return PartitionReport(progress=progress, findings=tuple([found async for found in self.findings(pointer, progress)]))

    async def findings(self, pointer: ManifestPointer, progress: Progress) -> AsyncIterator[Finding]:
        """Yield findings as they are made, and keep ``progress`` up to date."""
        try:
            manifest = await self._source.manifest(pointer)
        except (Corrupt, Invalid) as bad:
            yield _manifest_finding(pointer, bad)
            return
        self._begin(manifest, progress)
        async for found in self._chain(manifest, pointer, progress):
            yield found
        try:
            proofs = TreeProofs(manifest.tree, await self._source.tree_pages(manifest.tree.pages))
        except (Corrupt, Invalid) as bad:
            yield _manifest_finding(pointer, bad)
            proofs = None
        async for found in self._segments(manifest, pointer, progress, proofs):
            yield found

    def _begin(self, manifest: Manifest, progress: Progress) -> None:
        progress.start_offset, progress.end_offset = manifest.start_offset, manifest.end_offset
        progress.segments_total = len(manifest.segments) + sum(ref.segment_count for ref in manifest.pages)
        progress.bytes_total = manifest.cold_bytes
        progress.tree_size, progress.tree_head = manifest.tree.size, manifest.tree.head.hex()
        self._on_progress(progress)

    async def _chain(self, manifest: Manifest, pointer: ManifestPointer, progress: Progress) -> AsyncIterator[Finding]:
        """Walk back over the versions that are kept; those older than the grace period have been deleted as intended."""
        progress.manifest_versions = 1
        while manifest.previous_key:
            key = manifest.previous_key
            try:
                older = decode_manifest(await self._store.get(key), manifest.previous_sha256)
            except NoSuchObject:
                return
            except (Corrupt, Invalid) as bad:
                yield _manifest_finding(pointer, bad, key)
                return
            grows = older.end_offset <= manifest.end_offset and older.tree.size <= manifest.tree.size
            if older.version != manifest.version - 1 or not grows:
                yield _manifest_finding(pointer, Corrupt("the chain of versions is broken here"), key)
            manifest = older
            progress.manifest_versions += 1

    async def _segments(
        self, manifest: Manifest, pointer: ManifestPointer, progress: Progress, proofs: TreeProofs | None
    ) -> AsyncIterator[Finding]:
        expected = manifest.start_offset
        records = cold_bytes = 0
        try:
            async for entry in self._source.segments(manifest):
                if entry.base_offset != expected:
                    yield _gap(entry, expected)
                expected, records, cold_bytes = entry.end_offset, records + entry.record_count, cold_bytes + entry.stored_bytes
                async for found in self._segment(entry, progress, proofs):
                    yield found
        except (Corrupt, Invalid) as bad:
            yield _manifest_finding(pointer, bad)
            return
        if (expected, records, cold_bytes) != (manifest.end_offset, manifest.record_count, manifest.cold_bytes):
            totals = (
                f"segments end at offset {expected} with {records} records in {cold_bytes} bytes; the manifest's totals differ"
            )
            yield _manifest_finding(pointer, Corrupt(totals))

    async def _segment(self, entry: SegmentEntry, progress: Progress, proofs: TreeProofs | None) -> AsyncIterator[Finding]:
        leaves, sha256, is_sound = bytearray(), hashlib.sha256(), True

        def on_content(stored: memoryview, blocks: Sequence[memoryview]) -> None:
            leaves.extend(block_leaves(blocks))
            sha256.update(stored)

        def on_bytes(count: int) -> None:
            progress.bytes += count
            self._on_progress(progress)

        check = check_segment(
            self._store, self._source, entry, self._background, reads_at_once=self._reads_at_once, on_bytes=on_bytes,
            on_content=on_content,
        )  # fmt: skip
        async for found in check:
            is_sound = False
            yield found
        if is_sound and proofs is not None:
            try:
                await self._background.run(lambda: proofs.check(entry.first_leaf, list(split_hashes(leaves))))
            except Corrupt as bad:
                yield segment_finding(entry, bad.message)
        is_alone = entry.stored_bytes == entry.object_bytes
        if is_sound and is_alone and sha256.digest() != entry.object_sha256:
            yield segment_finding(entry, "the object's SHA-256 is not that of its manifest entry")
        progress.segments += 1
        progress.records += entry.record_count
        progress.bytes += entry.stored_bytes - entry.data_bytes
        self._on_progress(progress)


def _gap(entry: SegmentEntry, expected: int) -> Finding:
    problem = f"begins at offset {entry.base_offset}; expected {expected}"
    return Finding(key=entry.key, problem=problem, base_offset=entry.base_offset, end_offset=entry.end_offset)


def _manifest_finding(pointer: ManifestPointer, bad: Corrupt | Invalid, key: str = "") -> Finding:
    return Finding(
        key=key or pointer.object_key, problem=bad.message, base_offset=pointer.start_offset, end_offset=pointer.end_offset
    )


def _manifest_report(topic: str, partition: int, bad: Corrupt | Invalid) -> PartitionReport:
    finding = Finding(key=str(bad.detail.get("key", "")), problem=bad.message, base_offset=0, end_offset=0)
    return PartitionReport(progress=Progress(topic=topic, partition=partition), findings=(finding,))
