"""The manifest: the index of a partition's segments, as immutable, numbered, hash-chained objects.

A root holds the newest segments inline and refers to index pages for older ones. Pages are merged level by level
(``PAGE_FAN_IN`` pages of one level make one of the next), so the root's size is bounded however long the history, and a lookup
by offset or time reads the root and at most one page. Each root names its predecessor by key and SHA-256, each page is named by
its SHA-256, and the root's own digest is in the metadata quorum's pointer: history cannot be replaced unnoticed.

The live segments of a valid manifest tile ``start_offset`` to ``end_offset`` without gap or overlap. A page may still list
segments below ``start_offset``; they are dead, and the reference to the page counts live segments only.

Removed objects are listed, in the order of their removal, until they are deleted: the newest few in the root, the others in
lists, which are separate immutable objects, so their number is unbounded.

This module packs, checks and looks up; ``manifest_edit.py`` makes changes. No I/O. Format:
``docs/reference/formats/manifest.md``.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import Final, TypeVar
from uuid import UUID

import msgspec
from crc32c import crc32c

from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.errors import Corrupt, Invalid
from stratalog_core.malformed import MALFORMED
from stratalog_core.ports import Buffer
from stratalog_core.stepwise import decode_map
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.format.merkle import root_hash, split_hashes
from stratalog_tiering.format.segment import WrittenSegment

FORMAT_VERSION: Final = 2
MANIFEST_MAGIC: Final = b"SLMANIFS"
PAGE_MAGIC: Final = b"SLMFPAGE"
REMOVED_MAGIC: Final = b"SLMFRMVD"
INLINE_SEGMENTS_MAX: Final = 128
PAGE_SEGMENTS: Final = 64
PAGE_FAN_IN: Final = 16
INLINE_REMOVED_MAX: Final = 64
REMOVED_LIST_OBJECTS_MAX: Final = 16_384
"""Lists of removed objects are merged up to this length (about 2 MB)."""

_HEADER: Final = struct.Struct(">8sHHI")
_Body = TypeVar("_Body", bound=msgspec.Struct)


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One segment. Offsets: base inclusive, end exclusive. The order of the fields is permanent, new fields are appended.

    The footer is at ``data_bytes`` to ``object_bytes``; ``footer_sha256`` binds it to the hash chain. ``leader_epochs`` are
    those in effect in the segment, each with the offset at which it begins there. ``created_at_ms`` is the time at which the
    newest of its records was uploaded first, ``merge_count`` the number of times that any of them was rewritten since.
    """

    key: str
    base_offset: int
    end_offset: int
    object_bytes: int
    data_bytes: int
    record_count: int
    max_timestamp_ms: int
    first_timestamp_min_ms: int
    merkle_root: bytes
    footer_sha256: bytes
    leader_epochs: tuple[EpochStart, ...]
    created_at_ms: int
    merge_count: int = 0


class PageRef(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A reference to an index page. It counts live segments only; ``base_offset`` rises as retention removes segments."""

    key: str
    sha256: bytes
    object_bytes: int
    level: int
    base_offset: int
    end_offset: int
    max_timestamp_ms: int
    segment_count: int


class RemovedObject(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """An object that is no longer part of the history. It is deleted one grace period after ``removed_at_ms``.

    ``reason`` is one of ``Reason``, or unknown if a later release wrote it.
    """

    key: str
    object_bytes: int
    reason: str
    removed_at_ms: int


class Reason:
    """Why an object was removed."""

    RETENTION_MS: Final = "retention.ms"
    RETENTION_BYTES: Final = "retention.bytes"
    LOG_START: Final = "log-start"
    """Its records are below the log's start, because of DeleteRecords or the expiry of hot ledgers."""
    MERGED: Final = "merged"
    SUPERSEDED: Final = "superseded"
    """A page or a list of removed objects whose content was copied to a newer one."""
    FORK: Final = "fork"
    """It belongs to the line of a forked history that was not kept."""


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


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a root. ``previous_key`` and ``previous_sha256`` are empty in version 1.

    ``record_count`` and ``cold_bytes`` (sum of object sizes) count live segments. ``writer`` is informative. Objects in
    ``removed`` were removed after those in ``removed_lists``; ``removed_lists_made`` is the number of the next list.

    Forks at or below ``settled_version`` are resolved, the last one at ``settled_at_ms``; 0: there was none.
    """

    topic_id: UUID
    topic_name: str
    partition: int
    version: int
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


def empty_manifest(topic_id: UUID, topic_name: str, partition: int, base_offset: int) -> Manifest:
    """The manifest from which the first edit starts: version 0, which is never stored."""
    return Manifest(
        topic_id=topic_id, topic_name=topic_name, partition=partition, version=0, previous_key="", previous_sha256=b"",
        created_at_ms=0, writer="", start_offset=base_offset, end_offset=base_offset, record_count=0, cold_bytes=0,
    )  # fmt: skip


def encode_manifest(manifest: Manifest) -> bytes:
    """The root's object as bytes. Raises ``Invalid`` for an inconsistent manifest, so none is ever stored."""
    check_manifest(manifest)
    return _frame(MANIFEST_MAGIC, msgspec.msgpack.encode(manifest))


def decode_manifest(content: Buffer, sha256: bytes | None = None) -> Manifest:
    """Decode and check a root. Raises ``Corrupt``, also if its digest is not ``sha256``, ``Invalid`` for an unknown version."""
    manifest = _decode(content, MANIFEST_MAGIC, Manifest, "manifest", sha256)
    return _consistent(manifest, lambda: check_manifest(manifest))


def _consistent(body: _Body, check: Callable[[], None]) -> _Body:
    try:
        check()
    except Invalid as inconsistent:
        raise Corrupt(inconsistent.message) from inconsistent
    return body


def encode_page(page: ManifestPage) -> bytes:
    return _frame(PAGE_MAGIC, msgspec.msgpack.encode(page))


def decode_page(content: Buffer, sha256: bytes) -> ManifestPage:
    """Decode and check. Raises ``Corrupt``, or ``Invalid`` for an unknown format version."""
    page = _decode(content, PAGE_MAGIC, ManifestPage, "manifest page", sha256)
    return _consistent(page, lambda: _check_contiguous(page.segments))


def encode_removed_list(removed: RemovedList) -> bytes:
    return _frame(REMOVED_MAGIC, msgspec.msgpack.encode(removed))


def decode_removed_list(content: Buffer, sha256: bytes) -> RemovedList:
    """Decode and check. Raises ``Corrupt``, or ``Invalid`` for an unknown format version."""
    return _decode(content, REMOVED_MAGIC, RemovedList, "list of removed objects", sha256)


def object_sha256(content: Buffer) -> bytes:
    """The digest that pointers, chains and references contain."""
    return hashlib.sha256(content).digest()


def segment_entry(key: str, written: WrittenSegment) -> SegmentEntry:
    """The manifest's entry for a new segment."""
    footer = written.footer
    return SegmentEntry(
        key=key,
        base_offset=footer.base_offset,
        end_offset=footer.end_offset,
        object_bytes=written.object_bytes,
        data_bytes=footer.data_bytes,
        record_count=footer.record_count,
        max_timestamp_ms=footer.max_timestamp_ms,
        first_timestamp_min_ms=footer.first_timestamp_min_ms,
        merkle_root=root_hash(list(split_hashes(written.leaves))),
        footer_sha256=written.footer_sha256,
        leader_epochs=written.leader_epochs,
        created_at_ms=footer.created_at_ms,
    )


def pointer_to(manifest: Manifest, key: str, sha256: bytes) -> ManifestPointer:
    """The metadata record whose compare-and-set commits ``manifest``, which is stored at ``key``."""
    return ManifestPointer(
        topic_id=manifest.topic_id,
        index=manifest.partition,
        manifest_version=manifest.version,
        object_key=key,
        sha256=sha256.hex(),
        start_offset=manifest.start_offset,
        end_offset=manifest.end_offset,
        cold_bytes=manifest.cold_bytes,
        newest_ms=_newest_ms(manifest),
    )


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


def live_segments(manifest: Manifest, page: ManifestPage) -> tuple[SegmentEntry, ...]:
    """The segments of a referenced page that end above the manifest's start."""
    return tuple(entry for entry in page.segments if entry.end_offset > manifest.start_offset)


def locate(manifest: Manifest, offset: int) -> SegmentEntry | PageRef | None:
    """The inline segment that holds ``offset``, or the page that does, or None outside the manifest."""
    if not manifest.start_offset <= offset < manifest.end_offset:
        return None
    if manifest.segments and offset >= manifest.segments[0].base_offset:
        return _holding(manifest.segments, offset)
    return _holding(manifest.pages, offset)


def locate_in_page(page: ManifestPage, offset: int) -> SegmentEntry:
    """The segment of a page that holds ``offset``. Raises ``Corrupt`` if there is none, because the root says there is."""
    entry = _holding(page.segments, offset)
    if entry is None:
        raise Corrupt(f"manifest page of partition {page.partition} does not hold offset {offset}")
    return entry


_Span = TypeVar("_Span", SegmentEntry, PageRef)


def _holding(spans: Sequence[_Span], offset: int) -> _Span | None:
    index = bisect_right(spans, offset, key=lambda span: span.base_offset) - 1
    return spans[index] if index >= 0 and offset < spans[index].end_offset else None


def reaching_timestamp(manifest: Manifest, timestamp_ms: int, from_offset: int = 0) -> SegmentEntry | PageRef | None:
    """The first segment with a record at ``timestamp_ms`` or later that ends beyond ``from_offset``, or the page that holds it.

    A returned page may hold no such segment, because all candidates end at or before ``from_offset``: continue at its end.
    """
    spans = chain[PageRef | SegmentEntry](manifest.pages, manifest.segments)
    wanted = (span for span in spans if span.max_timestamp_ms >= timestamp_ms and span.end_offset > from_offset)
    return next(wanted, None)


def reaching_timestamp_in_page(page: ManifestPage, timestamp_ms: int, from_offset: int) -> SegmentEntry | None:
    """The first segment of a page with a record at ``timestamp_ms`` or later that ends beyond ``from_offset``."""
    wanted = (s for s in page.segments if s.max_timestamp_ms >= timestamp_ms and s.end_offset > from_offset)
    return next(wanted, None)


_ELEMENTS: Final = {"segments": SegmentEntry, "pages": PageRef}
"""Members with many elements, which are decoded step by step."""


def _frame(magic: bytes, body: bytes) -> bytes:
    return _HEADER.pack(magic, FORMAT_VERSION, 0, crc32c(body)) + body


def _decode(content: Buffer, magic: bytes, kind: type[_Body], name: str, sha256: bytes | None) -> _Body:
    if len(content) < _HEADER.size:
        raise Corrupt(f"{name} of {len(content)} bytes is truncated")
    found_magic, version, _, crc = _HEADER.unpack_from(content)
    if found_magic != magic:
        raise Corrupt(f"the object is not a {name}: it does not begin with its magic")
    if version != FORMAT_VERSION:
        raise Invalid(f"{name} format version {version} is unknown; this release reads {FORMAT_VERSION}: upgrade it")
    body = memoryview(content)[_HEADER.size :]
    if crc32c(body) != crc:
        raise Corrupt(f"{name} does not match its CRC")
    if sha256 is not None and object_sha256(content) != sha256:
        raise Corrupt(f"{name} is not the committed one: its SHA-256 differs")
    try:
        return decode_map(body, kind, _ELEMENTS)
    except MALFORMED as bad:
        raise Corrupt(f"{name} cannot be decoded: {bad}") from bad
