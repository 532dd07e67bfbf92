"""Full verification of cold history, with or without metadata: reads every byte and reports each damage with its place.

It checks, per partition: the manifest against the committed digest, the hash chain back to the oldest version that is kept,
the pages, that segments tile the offsets without gap or overlap, the head of the partition's Merkle tree, and of each segment
size, SHA-256, footer, block CRCs, batch CRCs and offsets, and that its batches are the leaves of the tree, unless it is
compacted and lacks some. Behind a damaged object
it checks all that is left. A store that does not answer raises an error and is not a finding. Repairs nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from stratalog_core.errors import Corrupt, Invalid, NoSuchObject, StratalogError
from stratalog_core.ports import Background
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.archive import Archive
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.segment_check import NOT_RETURNED, Take, block_leaves, check_segment, unlimited
from stratalog_tiering.core.damage import Damage, Finding, judge_manifest, judge_page, page_finding, segment_finding
from stratalog_tiering.format.descriptor import TopicDescriptor
from stratalog_tiering.format.erased_leaves import restore_leaves
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, decode_manifest
from stratalog_tiering.format.merkle import split_hashes
from stratalog_tiering.format.partition_tree import TreePage, TreeProofs
from stratalog_tiering.store import ObjectStore

READS_AT_ONCE: Final = 4
_Part = TypeVar("_Part")


@dataclass(slots=True, kw_only=True)
class Progress:
    """Progress of one partition's verification; the totals are known once the manifest is read."""

    topic: str
    partition: int
    cluster_id: str = ""
    """The cluster in the manifest, empty if it is unknown."""
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
OnNotReturned = Callable[[str, StratalogError], Awaitable[None]]
"""Takes a key, and one of ``NOT_RETURNED``. Raises if the store is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionReport:
    """The result for one partition, which is sound if there are no findings."""

    progress: Progress
    findings: tuple[Finding, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The content of a committed manifest: live segments in offset order, and the tree. None and empty if it is unreadable.

    ``segments`` lack those of unreadable pages; ``proofs`` is None if the tree cannot be read whole. ``not_returned`` are the
    keys of parts that the store did not return.
    """

    manifest: Manifest | None = None
    segments: tuple[SegmentEntry, ...] = ()
    proofs: TreeProofs | None = None
    findings: tuple[Finding, ...] = ()
    not_returned: frozenset[str] = frozenset()


class Verifier:
    """Verifies partitions one after the other; ``background`` computes the checksums."""

    def __init__(
        self,
        store: ObjectStore,
        background: Background,
        *,
        reads_at_once: int = READS_AT_ONCE,
        on_progress: OnProgress = lambda _: None,
        take: Take = unlimited,
        on_not_returned: OnNotReturned | None = None,
    ) -> None:
        """``take`` is awaited for all bytes that are read; it limits their rate.

        ``on_not_returned`` is awaited for each page, list and earlier version that the store does not return, and the rest is
        verified. Without it the error is raised.
        """
        self._store = store
        self._source = ManifestSource(store)
        self._archive = Archive(store)
        self._background = background
        self._reads_at_once = reads_at_once
        self._on_progress = on_progress
        self._take = take
        self._on_not_returned = on_not_returned
        self._not_returned: set[str] = set()

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
        sha256 = bytes.fromhex(pointer.sha256)
        return await self.version(topic, pointer.index, pointer.object_key, sha256, pointer.content)

    async def version(
        self, topic: str, partition: int, key: str, sha256: bytes | None, content: bytes = b""
    ) -> PartitionReport:
        """Verify one partition from the manifest at ``key``; None: its digest is unknown. Raises ``Unavailable``.

        ``content`` is the manifest if it is not in the store yet.
        """
        progress = Progress(topic=topic, partition=partition)
        findings = tuple([found async for found in self._findings(key, sha256, progress, content)])
        return PartitionReport(progress=progress, findings=findings)

    async def structure(self, topic: str, pointer: ManifestPointer) -> Structure:
        """Verify all of a partition's history but the segments, which the caller verifies. Raises ``Unavailable``."""
        key, progress = pointer.object_key, Progress(topic=topic, partition=pointer.index)
        self._not_returned = set()
        content = pointer.content or await self._content(key)
        if content is None:
            return Structure(findings=(self._missing_manifest(key),))
        manifest, judged = judge_manifest(content, bytes.fromhex(pointer.sha256), key)
        if manifest is None:
            return Structure(findings=tuple(judged))
        findings = list(judged)
        findings += [found async for found in self._chain(manifest, progress)]
        findings += [found async for found in self._removed_lists(manifest)]
        proofs, of_tree = await self._proofs(manifest, key)
        findings += of_tree
        totals = _Totals()
        segments: list[SegmentEntry] = []
        async for entries, of_page in self._entries(manifest):
            findings += of_page
            segments += entries
            totals.add(entries, of_page)
        # Without the segments of a page the totals differ.
        findings += totals.judge(manifest, key) if not self._not_returned else []
        return Structure(
            manifest=manifest, segments=tuple(segments), proofs=proofs, findings=tuple(findings),
            not_returned=frozenset(self._not_returned),
        )  # fmt: skip

    def _missing_manifest(self, key: str) -> Finding:
        return Finding(kind=Damage.MANIFEST_MISSING, key=key, problem=f"manifest {key} is missing from {self._store.url}")

    async def _findings(self, key: str, sha256: bytes | None, progress: Progress, known: bytes = b"") -> AsyncIterator[Finding]:
        content = known or await self._content(key)
        if content is None:
            yield self._missing_manifest(key)
            return
        manifest, findings = judge_manifest(content, sha256, key)
        for found in findings:
            yield found
        if manifest is None:
            return
        self._begin(manifest, progress)
        checks = (
            self._chain(manifest, progress),
            self._removed_lists(manifest),
            self._segments(manifest, key, progress),
        )
        for check in checks:
            async for found in check:
                yield found

    async def _content(self, key: str) -> bytes | None:
        """The object at ``key``; None if it is missing."""
        try:
            content = await self._store.get(key)
        except NoSuchObject:
            return None
        await self._take(len(content))
        return content

    async def _skip(self, key: str, failure: StratalogError) -> None:
        """Go on without the object at ``key``, which the store does not return, or raise ``failure``."""
        if self._on_not_returned is None:
            raise failure
        await self._on_not_returned(key, failure)
        self._not_returned.add(key)

    def _begin(self, manifest: Manifest, progress: Progress) -> None:
        progress.cluster_id = manifest.cluster_id
        progress.start_offset, progress.end_offset = manifest.start_offset, manifest.end_offset
        progress.segments_total = len(manifest.segments) + sum(ref.segment_count for ref in manifest.pages)
        progress.bytes_total = manifest.cold_bytes
        progress.tree_size, progress.tree_head = manifest.tree.size, manifest.tree.head.hex()
        self._on_progress(progress)

    async def _chain(self, manifest: Manifest, progress: Progress) -> AsyncIterator[Finding]:
        """Walk back over the versions that are kept; those older than the grace period have been deleted as intended."""
        progress.manifest_versions = 1
        while manifest.previous_key:
            key = manifest.previous_key
            try:
                content = await self._content(key)
            except NOT_RETURNED as failure:
                await self._skip(key, failure)
                return
            if content is None:
                return
            try:
                older = decode_manifest(content, manifest.previous_sha256)
            except (Corrupt, Invalid) as bad:
                kind = Damage.MANIFEST_ALTERED if isinstance(bad, Corrupt) else Damage.UNKNOWN_FORMAT
                yield _whole(manifest, kind, key, bad.message)
                return
            grows = older.end_offset <= manifest.end_offset and older.tree.size <= manifest.tree.size
            # An operator decided on a fork, or restored up to a point: versions, or the end of the history, may be left out.
            is_decided = manifest.settled_at_ms > older.settled_at_ms
            if not is_decided and (older.version != manifest.version - 1 or not grows):
                yield _whole(manifest, Damage.CHAIN_BROKEN, key, "the chain of versions is broken here")
            manifest = older
            progress.manifest_versions += 1

    async def _removed_lists(self, manifest: Manifest) -> AsyncIterator[Finding]:
        for ref in manifest.removed_lists:
            missing, altered = Damage.REMOVED_LIST_MISSING, Damage.REMOVED_LIST_ALTERED
            load = partial(self._source.removed_list, ref)
            _, finding = await self._part(ref.key, ref.list_bytes, load, missing, altered)
            if finding is not None:
                yield finding

    async def _proofs(self, manifest: Manifest, key: str) -> tuple[TreeProofs | None, list[Finding]]:
        """The partition's tree, None if it cannot be read whole, and what is wrong with it."""
        pages: dict[str, TreePage] = {}
        findings: list[Finding] = []
        for ref in manifest.tree.pages:
            missing, altered = Damage.TREE_PAGE_MISSING, Damage.TREE_PAGE_ALTERED
            load = partial(self._source.tree_pages, [ref])
            page, finding = await self._part(ref.key, ref.object_bytes, load, missing, altered)
            pages.update(page or {})
            findings += [finding] if finding is not None else []
        if findings or any(ref.key in self._not_returned for ref in manifest.tree.pages):
            return None, findings
        try:
            return TreeProofs(manifest.tree, pages), []
        except Corrupt as bad:
            return None, [_whole(manifest, Damage.TREE_HEAD, key, bad.message)]

    async def _part(
        self, key: str, size: int, load: Callable[[], Awaitable[_Part]], missing: Damage, altered: Damage
    ) -> tuple[_Part | None, Finding | None]:
        """The result of ``load``, which reads ``size`` bytes at ``key``, or the finding that explains its failure."""
        await self._take(size)
        try:
            return await load(), None
        except Invalid as unknown:
            return None, Finding(kind=Damage.UNKNOWN_FORMAT, key=key, problem=unknown.message)
        except Corrupt as bad:
            kind = missing if isinstance(bad.__cause__, NoSuchObject) else altered
            return None, Finding(kind=kind, key=key, problem=bad.message)
        except NOT_RETURNED as failure:
            await self._skip(key, failure)
            return None, None

    async def _segments(self, manifest: Manifest, key: str, progress: Progress) -> AsyncIterator[Finding]:
        proofs, findings = await self._proofs(manifest, key)
        for found in findings:
            yield found
        totals = _Totals()
        async for segments, findings in self._entries(manifest):
            totals.add(segments, findings)
            for found in findings:
                yield found
            for entry in segments:
                async for found in self._segment(entry, progress, proofs):
                    yield found
        for found in totals.judge(manifest, key):
            yield found

    async def _entries(self, manifest: Manifest) -> AsyncIterator[tuple[Sequence[SegmentEntry], list[Finding]]]:
        """The live segments of each page, then those of the root, each with the page's findings."""
        for ref in manifest.pages:
            try:
                content = await self._content(ref.key)
            except NOT_RETURNED as failure:
                await self._skip(ref.key, failure)
                continue
            if content is None:
                missing = f"manifest page {ref.key} is missing from {self._store.url}"
                yield (), [page_finding(Damage.PAGE_MISSING, ref, missing)]
            else:
                yield judge_page(content, ref, manifest)
        yield manifest.segments, []

    def segment(self, entry: SegmentEntry, proofs: TreeProofs | None) -> AsyncIterator[Finding]:
        """Verify one segment, against the partition's tree if it can be read. Raises ``Unavailable``."""
        return self._segment(entry, Progress(topic="", partition=-1), proofs)

    async def _segment(self, entry: SegmentEntry, progress: Progress, proofs: TreeProofs | None) -> AsyncIterator[Finding]:
        leaves, sha256, is_sound = bytearray(), hashlib.sha256(), True

        def on_content(stored: memoryview, blocks: Sequence[memoryview]) -> None:
            if not entry.is_compacted:
                leaves.extend(block_leaves(blocks))
            sha256.update(stored)

        def on_bytes(count: int) -> None:
            progress.bytes += count
            self._on_progress(progress)

        check = check_segment(
            self._store, self._source, entry, self._background, reads_at_once=self._reads_at_once, on_bytes=on_bytes,
            on_content=on_content, take=self._take,
        )  # fmt: skip
        async for found in check:
            is_sound = False
            yield found
        if is_sound and proofs is not None and not entry.is_compacted:
            try:
                restore_leaves(leaves, await self._source.erased_leaves(entry))
                await self._background.run(lambda: proofs.check(entry.first_leaf, list(split_hashes(leaves))))
            except Corrupt as bad:
                yield segment_finding(entry, Damage.TREE_LEAVES, bad.message)
        is_alone = entry.stored_bytes == entry.object_bytes
        if is_sound and is_alone and sha256.digest() != entry.object_sha256:
            yield segment_finding(entry, Damage.SEGMENT_DIGEST, "the object's SHA-256 is not that of its manifest entry")
        progress.segments += 1
        progress.records += entry.record_count
        progress.bytes += entry.stored_bytes - entry.data_bytes
        self._on_progress(progress)


class _Totals:
    """Records and bytes of all live segments, to compare with a manifest's totals."""

    def __init__(self) -> None:
        self._records = self._bytes = 0
        self._is_whole = True

    def add(self, segments: Sequence[SegmentEntry], findings: Sequence[Finding]) -> None:
        self._is_whole = self._is_whole and not findings
        self._records += sum(entry.record_count for entry in segments)
        self._bytes += sum(entry.stored_bytes for entry in segments)

    def judge(self, manifest: Manifest, key: str) -> list[Finding]:
        if not self._is_whole or (self._records, self._bytes) == (manifest.record_count, manifest.cold_bytes):
            return []
        problem = f"segments hold {self._records} records in {self._bytes} bytes; the manifest's totals differ"
        return [_whole(manifest, Damage.MANIFEST_INCONSISTENT, key, problem)]


def _whole(manifest: Manifest, kind: Damage, key: str, problem: str) -> Finding:
    """A finding about the whole partition."""
    return Finding(kind=kind, key=key, problem=problem, base_offset=manifest.start_offset, end_offset=manifest.end_offset)


def _manifest_report(topic: str, partition: int, bad: Corrupt | Invalid) -> PartitionReport:
    finding = Finding(kind=Damage.MANIFEST_ALTERED, key=str(bad.detail.get("key", "")), problem=bad.message)
    return PartitionReport(progress=Progress(topic=topic, partition=partition), findings=(finding,))
