"""Sizes at which a manifest's pages and lists are made and merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

INLINE_SEGMENTS_MAX: Final = 128
PAGE_SEGMENTS: Final = 64
PAGE_FAN_IN: Final = 16
INLINE_REMOVED_MAX: Final = 64
REMOVED_LIST_OBJECTS_MAX: Final = 16_384
"""Lists of removed objects are merged up to this length (about 3 MB)."""
INLINE_SPANS_MAX: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestLimits:
    """The sizes of one edit; tests use small ones."""

    inline_segments_max: int = INLINE_SEGMENTS_MAX
    page_segments: int = PAGE_SEGMENTS
    page_fan_in: int = PAGE_FAN_IN
    inline_removed_max: int = INLINE_REMOVED_MAX
    removed_list_objects_max: int = REMOVED_LIST_OBJECTS_MAX
    inline_spans_max: int = INLINE_SPANS_MAX
