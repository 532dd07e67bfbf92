"""Looks up segments in a manifest and its pages, by offset or by timestamp. No I/O."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from typing import TypeVar

from stratalog_core.errors import Corrupt
from stratalog_tiering.format.manifest import Manifest, ManifestPage, PageRef, SegmentEntry


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
