"""The manifest: the index of a partition's segments, as immutable, numbered, hash-chained objects.

A root holds the newest segments inline and refers to index pages for older ones. Pages are merged level by level
(``PAGE_FAN_IN`` pages of one level make one of the next), so the root's size is bounded however long the history, and a lookup
by offset or time reads the root and at most one page. Each root names its predecessor by key and SHA-256, each page is named by
its SHA-256, and the root's own digest is in the metadata quorum's pointer: history cannot be replaced unnoticed.

The live segments of a valid manifest tile ``start_offset`` to ``end_offset`` without gap or overlap. A page may still list
segments below ``start_offset``; they are dead, and the reference to the page counts live segments only.

Removed objects are listed, in the order of their removal, until they are deleted: the newest few in the root, the others in
lists, which are separate immutable objects, so their number is unbounded.

This module packs and checks; ``lookup.py`` looks up, ``manifest_edit.py`` makes changes. No I/O. Format:
``docs/reference/formats/manifest.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final
from uuid import UUID

import msgspec

from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.ports import Buffer
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.format.footer import Signature
from stratalog_tiering.format.manifest_limits import INLINE_REMOVED_MAX, INLINE_SEGMENTS_MAX
from stratalog_tiering.format.merkle import HASH_BYTES
from stratalog_tiering.format.object_frame import Body, frame, unframe
from stratalog_tiering.format.partition_tree import EMPTY_TREE, PartitionTree
from stratalog_tiering.format.segment import WrittenSegment

MANIFEST_MAGIC: Final = b"SLMANIFS"
PAGE_MAGIC: Final = b"SLMFPAGE"
REMOVED_MAGIC: Final = b"SLMFRMVD"


class SegmentKind(IntEnum):
    """How a segment came to be: by an offload, a merge, a compaction, or an erasure of records."""

    RAW = 0
    MERGED = 1
    COMPACTED = 2
    ERASED = 3


class SourceSegment(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A segment that another one replaced: the parts of its key within its partition."""

    base_offset: int
    leader_epoch: int
    random_id: int


class PresentBatches(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The batches that a compacted segment holds. The last one is always there, so the end is that of the segment."""

    base_offset: int
    end_offset: int
    batch_count: int


class SegmentOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Optional members of a segment entry; an absent one is not stored.

    ``version_id`` is the store's id of the object's version, ``lock_until_ms`` (wall time) the end of its Object Lock of
    ``lock_mode`` (``governance`` or ``compliance``), ``storage_class`` the store's name of its class. ``present`` is absent
    unless the segment is compacted. ``dirty_from`` is the offset from which a compacted segment's keys may occur again in it,
    its base offset if ``job compact`` wrote it; absent if each of its keys occurs once.
    """

    version_id: str = ""
    lock_until_ms: int = 0
    storage_class: str = ""
    lock_mode: str = ""
    present: PresentBatches | None = None
    dirty_from: int | None = None


NO_OPTIONS: Final = SegmentOptions()


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One segment. Offsets: base inclusive, end exclusive. The order of the fields is permanent, new fields are appended.

    The segment covers its offsets; ``options.present`` says which of them it lacks. Positions and lengths are in stored bytes
    of the object at ``key``, which may hold other segments, too; the footer's own positions count from ``data_position``. The
    footer includes signatures and trailer. ``footer_sha256`` binds it to the hash chain; ``object_sha256`` is over the object.

    ``leaf_count`` leaves of the partition's tree from ``first_leaf`` on are the segment's batches. ``min_timestamp_ms`` is the
    minimum over all records, None if unknown; ``first_timestamp_min_ms`` the minimum over the first records of batches.
    ``leader_epochs`` are those in effect in the segment, each with the offset at which it begins there; of a compacted segment
    the first, and those of which batches are left. ``created_at_ms`` is the time at which the newest of its records was
    uploaded first, ``merge_count`` the number of times that any of them was rewritten since, ``sources`` are the segments that
    it replaced.
    """

    key: str
    kind: SegmentKind = SegmentKind.RAW
    base_offset: int
    end_offset: int
    data_position: int = 0
    data_bytes: int
    footer_position: int
    footer_bytes: int
    object_bytes: int
    object_sha256: bytes
    footer_sha256: bytes
    record_count: int
    first_leaf: int = 0
    leaf_count: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int
    first_timestamp_min_ms: int
    leader_epochs: tuple[EpochStart, ...]
    created_at_ms: int
    merge_count: int = 0
    sources: tuple[SourceSegment, ...] = ()
    options: SegmentOptions = NO_OPTIONS

    @property
    def stored_bytes(self) -> int:
        """The segment's own bytes, from its data to the end of its footer, without other segments in the object."""
        return self.footer_position + self.footer_bytes - self.data_position

    @property
    def is_compacted(self) -> bool:
        """Whether batches, and records of batches, may be missing."""
        return self.options.present is not None

    @property
    def is_erased(self) -> bool:
        """Whether records were erased. All batches are there, and the segment keeps the leaves of those that were altered."""
        return self.kind is SegmentKind.ERASED

    @property
    def batch_count(self) -> int:
        """The batches that the segment holds; ``leaf_count`` counts those that it covers."""
        return self.leaf_count if self.options.present is None else self.options.present.batch_count


class PageRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A reference to an index page. It counts live segments only; ``base_offset`` rises as retention removes segments.

    ``min_timestamp_ms`` is None if it is unknown for any of the segments.
    """

    key: str
    sha256: bytes
    object_bytes: int
    level: int
    base_offset: int
    end_offset: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int
    segment_count: int


class RemovedObject(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An object that is no longer part of the history. It is deleted one grace period after ``removed_at_ms``.

    ``reason`` is one of ``Reason``, or unknown if a later release wrote it. ``policy`` is the setting that removed it and its
    value, or the decision; empty if the reason says all. ``actor`` is the worker that removed it.
    """

    key: str
    object_bytes: int
    reason: str
    removed_at_ms: int
    policy: str = ""
    actor: str = ""


class Reason:
    """Why an object was removed."""

    RETENTION_MS: Final = "retention.ms"
    RETENTION_BYTES: Final = "retention.bytes"
    LOG_START: Final = "log-start"  # below the log's start, after DeleteRecords or the expiry of hot ledgers
    MERGED: Final = "merged"
    COMPACTED: Final = "compacted"
    ERASED: Final = "erased"  # replaced by a segment without the records of a data-protection request
    SUPERSEDED: Final = "superseded"  # a page or a list of removed objects whose content was copied to a newer one
    REPAIRED: Final = "repaired"
    CUT: Final = "cut"  # beyond the point up to which its topic was restored
    FORK: Final = "fork"  # it belongs to the line of a forked history that was not kept


class RemovedListRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A reference to a list of removed objects. The first ``deleted_count`` are deleted, ``object_count`` are left.

    ``removed_at_ms`` is the time of the first object that is left. ``number`` counts the partition's lists from 0.
    """

    key: str
    sha256: bytes
    list_bytes: int
    number: int
    deleted_count: int
    object_count: int
    removed_at_ms: int


class RemovedList(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a list: removed objects in the order of their removal."""

    topic_id: UUID
    partition: int
    number: int
    objects: tuple[RemovedObject, ...]


class ManifestPage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an index page: contiguous segments in offset order."""

    topic_id: UUID
    partition: int
    segments: tuple[SegmentEntry, ...]


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a root. ``previous_key`` and ``previous_sha256`` are empty in version 1.

    A writer whose version is below ``oldest_writer`` must not edit it. ``record_count`` and ``cold_bytes`` (bytes of segments)
    count live segments. ``writer`` is informative. Objects in ``removed`` were removed after those in ``removed_lists``;
    ``removed_lists_made`` is the number of the next list. ``signatures`` are over the size and head of ``tree``.
    Forks at or below ``settled_version`` are resolved, the last one at ``settled_at_ms``; 0: there was none. No object that
    this version or an earlier one refers to is locked after ``lock_until_ms``; ``lock_mode`` is the strictest of their modes.
    ``erased_version``: the newest that erased records.
    """

    cluster_id: str
    topic_id: UUID
    topic_name: str
    partition: int
    version: int
    oldest_writer: int
    previous_key: str
    previous_sha256: bytes
    created_at_ms: int
    writer: str
    start_offset: int
    end_offset: int
    record_count: int
    cold_bytes: int
    pages: tuple[PageRef, ...] = ()
    segments: tuple[SegmentEntry, ...] = ()
    removed: tuple[RemovedObject, ...] = ()
    removed_lists: tuple[RemovedListRef, ...] = ()
    removed_lists_made: int = 0
    settled_version: int = 0
    settled_at_ms: int = 0
    tree: PartitionTree = EMPTY_TREE
    signatures: tuple[Signature, ...] = ()
    lock_until_ms: int = 0
    lock_mode: str = ""
    erased_version: int = 0


def empty_manifest(topic_id: UUID, topic_name: str, partition: int, base_offset: int, cluster_id: str = "") -> Manifest:
    """The manifest from which the first edit starts: version 0, which is never stored."""
    return Manifest(
        cluster_id=cluster_id, oldest_writer=1, topic_id=topic_id, topic_name=topic_name, partition=partition,
        version=0, previous_key="", previous_sha256=b"",
        created_at_ms=0, writer="", start_offset=base_offset, end_offset=base_offset, record_count=0, cold_bytes=0,
    )  # fmt: skip


def encode_manifest(manifest: Manifest) -> bytes:
    """The root's object as bytes. Raises ``Invalid`` for an inconsistent manifest, so none is ever stored."""
    check_manifest(manifest)
    return frame(MANIFEST_MAGIC, manifest)


def parse_manifest(content: Buffer, sha256: bytes | None = None) -> Manifest:
    """Decode a root without checking that its members agree. Raises as :func:`decode_manifest`."""
    return unframe(content, MANIFEST_MAGIC, Manifest, "manifest", sha256, _ELEMENTS)


def decode_manifest(content: Buffer, sha256: bytes | None = None) -> Manifest:
    """Decode and check a root. Raises ``Corrupt``, also if its digest is not ``sha256``, ``Invalid`` for an unknown version."""
    manifest = parse_manifest(content, sha256)
    return _consistent(manifest, lambda: check_manifest(manifest))


def _consistent(body: Body, check: Callable[[], None]) -> Body:
    try:
        check()
    except Invalid as inconsistent:
        raise Corrupt(inconsistent.message) from inconsistent
    return body


def encode_page(page: ManifestPage) -> bytes:
    return frame(PAGE_MAGIC, page)


def parse_page(content: Buffer, sha256: bytes) -> ManifestPage:
    """Decode a page without checking that its segments are contiguous. Raises as :func:`decode_page`."""
    return unframe(content, PAGE_MAGIC, ManifestPage, "manifest page", sha256, _ELEMENTS)


def decode_page(content: Buffer, sha256: bytes) -> ManifestPage:
    """Decode and check. Raises ``Corrupt``, or ``Invalid`` for an unknown format version."""
    page = parse_page(content, sha256)
    return _consistent(page, lambda: _check_contiguous(page.segments))


def encode_removed_list(removed: RemovedList) -> bytes:
    return frame(REMOVED_MAGIC, removed)


def decode_removed_list(content: Buffer, sha256: bytes) -> RemovedList:
    """Decode and check. Raises ``Corrupt``, or ``Invalid`` for an unknown format version."""
    return unframe(content, REMOVED_MAGIC, RemovedList, "list of removed objects", sha256, {"objects": RemovedObject})


def segment_entry(key: str, written: WrittenSegment, kind: SegmentKind = SegmentKind.RAW) -> SegmentEntry:
    """The manifest's entry for a new segment, which has the object at ``key`` to itself."""
    footer = written.footer
    return SegmentEntry(
        key=key,
        kind=kind,
        base_offset=footer.base_offset,
        end_offset=footer.end_offset,
        data_bytes=footer.data_bytes,
        footer_position=written.footer_position,
        footer_bytes=written.footer_length,
        object_bytes=written.object_bytes,
        object_sha256=written.sha256,
        footer_sha256=written.footer_sha256,
        record_count=footer.record_count,
        leaf_count=len(written.leaves) // HASH_BYTES,
        min_timestamp_ms=footer.min_timestamp_ms,
        max_timestamp_ms=footer.max_timestamp_ms,
        first_timestamp_min_ms=footer.first_timestamp_min_ms,
        leader_epochs=written.leader_epochs,
        created_at_ms=footer.created_at_ms,
    )


def pointer_to(manifest: Manifest, key: str, sha256: bytes, content: bytes = b"") -> ManifestPointer:
    """The record that commits ``manifest``, stored at ``key``; ``content`` is its bytes if that comes after the commit."""
    return ManifestPointer(
        topic_id=manifest.topic_id, index=manifest.partition, manifest_version=manifest.version, object_key=key,
        sha256=sha256.hex(), start_offset=manifest.start_offset, end_offset=manifest.end_offset, cold_bytes=manifest.cold_bytes,
        newest_ms=_newest_ms(manifest), lock_until_ms=manifest.lock_until_ms, lock_mode=manifest.lock_mode,
        content=content, erased_version=manifest.erased_version,
    )  # fmt: skip


def _newest_ms(manifest: Manifest) -> int:
    """An upper bound of all records' timestamps. Records without one count from their upload."""
    created_ms = manifest.segments[-1].created_at_ms if manifest.segments else manifest.created_at_ms
    pages_ms = max((page.max_timestamp_ms for page in manifest.pages), default=-1)
    segments_ms = max((entry.max_timestamp_ms for entry in manifest.segments), default=-1)
    return max(created_ms, pages_ms, segments_ms)


def check_manifest(manifest: Manifest) -> None:
    """Raise ``Invalid`` unless pages and inline segments tile ``start_offset`` to ``end_offset`` and stay within the limits."""
    _check_contiguous((*manifest.pages, *manifest.segments))
    first, last = _ends(manifest)
    if first != manifest.start_offset or last != manifest.end_offset:
        raise Invalid(
            f"manifest says offsets {manifest.start_offset}..{manifest.end_offset}, its segments hold {first}..{last}"
        )
    if len(manifest.segments) > INLINE_SEGMENTS_MAX:
        raise Invalid(f"manifest holds {len(manifest.segments)} segments inline; maximum is {INLINE_SEGMENTS_MAX}")
    if len(manifest.removed) > INLINE_REMOVED_MAX:
        raise Invalid(f"manifest holds {len(manifest.removed)} removed objects inline; maximum is {INLINE_REMOVED_MAX}")
    leaf_counts = [part.leaf_count for parts in (manifest.tree.pages, manifest.tree.spans) for part in parts]
    if min(leaf_counts, default=1) < 1 or sum(leaf_counts) != manifest.tree.size:
        raise Invalid(f"the tree's spans hold {sum(leaf_counts)} leaves; manifest says {manifest.tree.size}")
    for entry in manifest.segments:
        _check_entry(entry, manifest.tree.size)


def _check_entry(entry: SegmentEntry, leaves: int) -> None:
    """Raise ``Invalid`` unless data and footer are within the object, and the segment's leaves within the tree."""
    ends = (entry.data_position + entry.data_bytes, entry.footer_position + entry.footer_bytes)
    if (
        min(entry.data_position, entry.data_bytes, entry.footer_position, entry.footer_bytes) < 0
        or max(ends) > entry.object_bytes
    ):
        raise Invalid(f"{entry.key} has data or footer beyond its {entry.object_bytes} bytes")
    if min(entry.first_leaf, entry.leaf_count) < 0 or entry.first_leaf + entry.leaf_count > leaves:
        raise Invalid(f"{entry.key} has leaves beyond the tree's {leaves}")
    present, dirty_from = entry.options.present, entry.options.dirty_from
    if present and not entry.base_offset <= present.base_offset <= present.end_offset <= entry.end_offset:
        raise Invalid(f"{entry.key} holds offsets {present.base_offset}..{present.end_offset}, which it does not cover")
    if dirty_from is not None and not (present and entry.base_offset <= dirty_from < entry.end_offset):
        raise Invalid(f"{entry.key} is compacted up to offset {dirty_from}, which it does not cover")


def _ends(manifest: Manifest) -> tuple[int, int]:
    spans: Sequence[PageRef | SegmentEntry] = (*manifest.pages, *manifest.segments)
    if not spans:
        return manifest.start_offset, manifest.start_offset
    return spans[0].base_offset, spans[-1].end_offset


def _check_contiguous(spans: Sequence[PageRef | SegmentEntry]) -> None:
    for span in spans:
        if span.end_offset <= span.base_offset:
            raise Invalid(f"{span.key} covers no offset: {span.base_offset}..{span.end_offset}")
    for left, right in pairwise(spans):
        if left.end_offset != right.base_offset:
            raise Invalid(f"{right.key} begins at offset {right.base_offset}; expected {left.end_offset}")


_ELEMENTS: Final[dict[str, type[Any]]] = {"segments": SegmentEntry, "pages": PageRef}
"""Members with many elements, which are decoded step by step."""
