"""The objects that a manifest refers to, each with the digest by which the right bytes are recognised anywhere. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stratalog_core.object_lock import ObjectLock
from stratalog_tiering.format.locks import entry_lock, manifest_lock
from stratalog_tiering.format.manifest import Manifest, PageRef, SegmentEntry
from stratalog_tiering.format.partition_tree import TreePageRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """An object that must have these bytes. ``lock`` is the one that it was written with."""

    key: str
    sha256: bytes
    object_bytes: int
    storage_class: str = ""
    lock: ObjectLock | None = None


def side_objects(manifest: Manifest) -> Iterator[Reference]:
    """The pages, tree pages and lists of removed objects of a manifest."""
    lock = manifest_lock(manifest)
    pages: tuple[PageRef | TreePageRef, ...] = (*manifest.pages, *manifest.tree.pages)
    for page in pages:
        yield Reference(key=page.key, sha256=page.sha256, object_bytes=page.object_bytes, lock=lock)
    for ref in manifest.removed_lists:
        yield Reference(key=ref.key, sha256=ref.sha256, object_bytes=ref.list_bytes, lock=lock)


def segment_object(entry: SegmentEntry) -> Reference:
    """The object that holds a segment."""
    return Reference(
        key=entry.key, sha256=entry.object_sha256, object_bytes=entry.object_bytes,
        storage_class=entry.options.storage_class, lock=entry_lock(entry),
    )  # fmt: skip
