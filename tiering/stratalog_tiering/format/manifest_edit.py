"""Edits of a manifest: append segments, drop a prefix, replace a run by one segment, forget deleted objects.

A :class:`ManifestEdit` starts from the committed version, refuses every change that would leave a gap or an overlap, and makes
the next version's bytes and the pages and lists that must be stored before it. The caller loads the pages and lists named by
``pages_for…`` and ``lists_…`` and passes them in, so nothing here does I/O. An object that leaves the history becomes a removed
object (``removed_objects.py``) and stays in the store for the grace period, for readers of older versions. The leaves of an
appended segment stay in the partition's tree for good (``tree_edit.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

import msgspec

from stratalog_core.errors import Invalid
from stratalog_core.object_lock import ObjectLock, in_force, joined
from stratalog_tiering.format.locks import entry_lock, manifest_lock
from stratalog_tiering.format.manifest import (
    Manifest,
    ManifestPage,
    PageRef,
    Reason,
    RemovedListRef,
    RemovedObject,
    SegmentEntry,
    encode_manifest,
    encode_page,
)
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.manifest_writers import OLDEST_WRITER, check_writer
from stratalog_tiering.format.merkle import HASH_BYTES
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import manifest_key, page_key
from stratalog_tiering.format.partition_tree import TreePageRef, TreePages
from stratalog_tiering.format.removed_objects import NO_LISTS, UNFINISHED_MS, RemovedLists, RemovedObjects
from stratalog_tiering.format.tree_edit import TreeEdit

Pages = Mapping[str, ManifestPage]
"""Pages loaded for an edit, by object key."""

NO_PAGES: Final[Pages] = {}
NO_TREE_PAGES: Final[TreePages] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """Why a segment is dropped: one of ``Reason``, and the policy as in ``RemovedObject``."""

    reason: str
    policy: str = ""


RemovalOf = Callable[[SegmentEntry], Removal]


@dataclass(frozen=True, slots=True, kw_only=True)
class Previous:
    """The committed version from which an edit starts; key and digest are empty before the first version."""

    manifest: Manifest
    key: str = ""
    sha256: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewManifest:
    """The result of an edit: store ``parts`` (pages and lists, by key), then ``content`` at ``key``, then commit.

    ``lock`` is the lock of all of them: they are kept as long as what they refer to.
    """

    manifest: Manifest
    key: str
    content: bytes
    sha256: bytes
    parts: tuple[tuple[str, bytes], ...]
    lock: ObjectLock | None = None


class ManifestEdit:
    """One edit. ``random_id`` returns 64 random bits for each new key. :meth:`finish` sets the time of removal."""

    def __init__(
        self, previous: Previous, *, writer: str, random_id: Callable[[], int], limits: ManifestLimits | None = None
    ) -> None:
        """``writer`` names the worker that edits. Raises ``Invalid`` if the manifest requires a newer writer."""
        base = previous.manifest
        check_writer(base)
        self._writer = writer
        self._previous = previous
        self._random_id = random_id
        self._limits = limits or ManifestLimits()
        self._start_offset = base.start_offset
        self._refs = list(base.pages)
        self._inline = list(base.segments)
        self._removed = RemovedObjects(base, random_id, self._limits)
        self._tree = TreeEdit(base.tree, base.topic_id, base.partition, random_id, self._limits)
        self._record_count = base.record_count
        self._cold_bytes = base.cold_bytes
        self._new_pages: dict[str, ManifestPage] = {}
        self._version = base.version + 1
        self._settled_version, self._settled_at_ms = base.settled_version, base.settled_at_ms
        self._lock = manifest_lock(base)
        self._erases = False

    @property
    def end_offset(self) -> int:
        """The offset at which the next appended segment must begin."""
        if self._inline:
            return self._inline[-1].end_offset
        return self._refs[-1].end_offset if self._refs else self._start_offset

    def restart_at(self, offset: int) -> None:
        """Continue an empty history at a later offset. Raises ``Invalid`` while it has segments, or for an earlier offset."""
        if self._refs or self._inline or offset < self._start_offset:
            raise Invalid(f"history of offsets {self._start_offset}..{self.end_offset} cannot continue at {offset}")
        self._start_offset = offset

    def append(self, entry: SegmentEntry, leaves: bytes) -> SegmentEntry:
        """Add the next segment, and the hashes of its leaves to the tree; returns the entry as it is stored.

        Raises ``Invalid`` for a gap, an overlap, an empty segment, or another number of leaves.
        """
        if entry.base_offset != self.end_offset or entry.end_offset <= entry.base_offset:
            raise Invalid(
                f"segment {entry.key} covers offsets {entry.base_offset}..{entry.end_offset}; "
                f"the manifest ends at {self.end_offset}: gaps and overlaps are refused"
            )
        if len(leaves) != entry.leaf_count * HASH_BYTES:
            raise Invalid(f"segment {entry.key} has {entry.leaf_count} leaves; their hashes are {len(leaves)} bytes")
        entry = msgspec.structs.replace(entry, first_leaf=self._tree.size)
        self._tree.append(leaves)
        self._inline.append(entry)
        self.keep_as_long_as(entry_lock(entry))
        self._record_count += entry.record_count
        self._cold_bytes += entry.stored_bytes
        return entry

    def pages_to_merge(self) -> tuple[PageRef, ...]:
        """The stored pages that :meth:`move_to_pages` can merge; load them and pass them to it."""
        levels, untouched = [ref.level for ref in self._refs], len(self._refs)
        for _ in range(self._new_page_count()):
            levels.append(0)
            while self._mergeable(levels):
                levels[-self._limits.page_fan_in :] = [levels[-1] + 1]
                untouched = min(untouched, len(levels) - 1)
        return self._stored(self._refs[untouched:])

    def _new_page_count(self) -> int:
        return max(0, -(-(len(self._inline) - self._limits.inline_segments_max) // self._limits.page_segments))

    def _mergeable(self, levels: Sequence[int]) -> bool:
        newest = levels[-self._limits.page_fan_in :]
        return len(newest) == self._limits.page_fan_in and len(set(newest)) == 1

    def _stored(self, refs: Sequence[PageRef]) -> tuple[PageRef, ...]:
        return tuple(ref for ref in refs if ref.key not in self._new_pages)

    def move_to_pages(self, pages: Pages = NO_PAGES) -> None:
        """Move the oldest inline segments into pages while there are too many, and merge full levels of pages.

        A level stays as it is if one of its pages is missing from ``pages``, because it is damaged.
        """
        while len(self._inline) > self._limits.inline_segments_max:
            oldest = self._inline[: self._limits.page_segments]
            del self._inline[: len(oldest)]
            self._refs.append(self._new_page(oldest, 0))
            self._merge_levels(pages)

    def _merge_levels(self, pages: Pages) -> None:
        fan_in = self._limits.page_fan_in
        while self._mergeable([ref.level for ref in self._refs]):
            merging = self._refs[-fan_in:]
            if any(ref.key not in pages for ref in self._stored(merging)):
                return
            entries = [entry for ref in merging for entry in self._live(self._loaded(ref, pages))]
            del self._refs[-fan_in:]
            self._refs.append(self._new_page(entries, merging[0].level + 1))
            for ref in merging:
                self._retire_page(ref)

    def pages_for_drop(self, below_offset: int) -> tuple[PageRef, ...]:
        """The stored pages that :meth:`drop_below` needs."""
        return self._stored([ref for ref in self._refs if ref.base_offset < below_offset])

    def drop_below(self, below_offset: int, removal_of: RemovalOf, pages: Pages = NO_PAGES) -> tuple[SegmentEntry, ...]:
        """Drop the segments that end at or before ``below_offset``; returns them, oldest first."""
        dropped: list[SegmentEntry] = []
        while self._refs and self._refs[0].base_offset < below_offset:
            ref = self._refs[0]
            live = self._live(self._loaded(ref, pages))
            expired = list(takewhile(lambda entry: entry.end_offset <= below_offset, live))
            dropped += expired
            if len(expired) < len(live):
                self._refs[0] = _narrowed(ref, live[len(expired) :])
                break
            del self._refs[0]
            self._retire_page(ref)
        if not self._refs:
            expired = list(takewhile(lambda entry: entry.end_offset <= below_offset, self._inline))
            del self._inline[: len(expired)]
            dropped += expired
        for entry in dropped:
            self._start_offset = entry.end_offset
            self._record_count -= entry.record_count
            self._cold_bytes -= entry.stored_bytes
        self._removed.add([self._removed_object(entry, removal_of(entry)) for entry in dropped])
        return tuple(dropped)

    def pages_for_replace(self, base_offset: int) -> tuple[PageRef, ...]:
        """The stored page that :meth:`replace` rewrites; empty if the run is inline."""
        return self._stored([ref for ref in self._refs if ref.base_offset <= base_offset < ref.end_offset])

    def replace(self, merged: SegmentEntry, pages: Pages = NO_PAGES, reason: str = Reason.MERGED) -> tuple[SegmentEntry, ...]:
        """Replace the run of segments that covers exactly the offsets of ``merged``; returns the run.

        The tree does not change. Raises ``Invalid`` if no run has exactly these offsets and as many leaves, and as many records
        unless it is compacted or erased, or if the run spans two pages.
        """
        for position, ref in enumerate(self._refs):
            if ref.base_offset <= merged.base_offset < ref.end_offset:
                entries, run = _spliced(self._live(self._loaded(ref, pages)), merged)
                self._refs[position] = self._new_page(entries, ref.level)
                self._retire_page(ref)
                break
        else:
            self._inline, run = _spliced(self._inline, merged)
        self.keep_as_long_as(entry_lock(merged))
        self._cold_bytes += merged.stored_bytes - sum(entry.stored_bytes for entry in run)
        self._record_count += merged.record_count - sum(entry.record_count for entry in run)
        self._erases = self._erases or merged.is_erased
        self._removed.add([self._removed_object(entry, Removal(reason=reason)) for entry in run])
        return run

    def lists_due(self, before_ms: int, limit: int) -> tuple[RemovedListRef, ...]:
        """The stored lists that :meth:`forget_due` needs."""
        return self._removed.lists_due(before_ms, limit)

    def forget_due(self, before_ms: int, limit: int, lists: RemovedLists = NO_LISTS) -> tuple[str, ...]:
        """Forget at most ``limit`` objects removed at ``before_ms`` or earlier; returns their keys, to be deleted first.

        Objects that this edit removes are not among them: the committed version still refers to those.
        """
        return self._removed.forget_due(before_ms, limit, self._writer, lists)

    def keep_removed(self, objects: Sequence[RemovedObject]) -> None:
        """Put objects back that :meth:`forget_due` gave and the store keeps: they are due again after another grace period."""
        self._removed.add(objects)

    def lists_to_merge(self, without: Set[str] = frozenset()) -> tuple[RemovedListRef, ...]:
        """The stored lists that :meth:`finish` can merge, ``without`` these keys; load them all and pass them to it."""
        return self._removed.lists_to_merge(without)

    def tree_pages_to_merge(self, without: Set[str] = frozenset()) -> tuple[TreePageRef, ...]:
        """The stored tree pages that :meth:`finish` can merge, ``without`` these keys; load them all and pass them to it."""
        return self._tree.pages_to_merge(without)

    def settle_fork(self, newest_version: int, others: Sequence[RemovedObject], now_ms: int) -> None:
        """Make the next version newer than both lines of a fork; ``others`` are all objects that it does not refer to."""
        self._version = newest_version + 1
        self._settled_version, self._settled_at_ms = newest_version, now_ms
        self._removed.replace(others)

    def settle_cut(self, left_out: Sequence[RemovedObject], now_ms: int) -> None:
        """Note that an operator had the history cut, which made the base of it; ``left_out`` are the objects beyond the cut."""
        self._removed.add(left_out)
        self._settled_version, self._settled_at_ms = self._previous.manifest.version, now_ms

    def keep_as_long_as(self, lock: ObjectLock | None) -> None:
        """Lock the next version at least as long as ``lock`` says, which is that of an object that it refers to."""
        self._lock = joined((self._lock, lock))

    @property
    def is_changed(self) -> bool:
        """Whether the edit differs from the committed version."""
        base, removed = self._previous.manifest, self._removed
        is_same = (self._start_offset, self._refs, self._inline) == (base.start_offset, [*base.pages], [*base.segments])
        return not is_same or bool(removed.added) or (removed.refs, removed.inline) != ([*base.removed_lists], [*base.removed])

    def finish(
        self, *, created_at_ms: int, lists: RemovedLists = NO_LISTS, tree_pages: TreePages = NO_TREE_PAGES
    ) -> NewManifest:
        """The next version. Raises ``Invalid`` if it is inconsistent.

        ``created_at_ms`` (wall time) is also when the objects of this edit are removed: their grace period must not begin
        earlier, however long the edit took to prepare.
        """
        base = self._previous.manifest
        for ref in self._tree.move_to_pages(tree_pages):
            self._retire(ref)
        self._removed.finish(created_at_ms, self._writer, lists)
        tree = self._tree.finish()
        lock = self._lock if self._lock is not None and self._lock.until_ms > created_at_ms else None
        pages = tuple((key, encode_page(page)) for key, page in self._new_pages.items() if self._is_referenced(key))
        successor = Manifest(
            cluster_id=base.cluster_id,
            oldest_writer=max(base.oldest_writer, OLDEST_WRITER),
            topic_id=base.topic_id,
            topic_name=base.topic_name,
            partition=base.partition,
            version=self._version,
            previous_key=self._previous.key,
            previous_sha256=self._previous.sha256,
            created_at_ms=created_at_ms,
            writer=self._writer,
            start_offset=self._start_offset,
            end_offset=self.end_offset,
            record_count=self._record_count,
            cold_bytes=self._cold_bytes,
            pages=tuple(self._refs),
            segments=tuple(self._inline),
            removed=tuple(self._removed.inline),
            removed_lists=tuple(self._removed.refs),
            removed_lists_made=self._removed.lists_made,
            settled_version=self._settled_version,
            settled_at_ms=self._settled_at_ms,
            tree=tree,
            signatures=base.signatures if tree.head == base.tree.head else (),
            lock_until_ms=lock.until_ms if lock is not None else 0,
            lock_mode=lock.mode.value if lock is not None else "",
            erased_version=self._version if self._erases else base.erased_version,
        )
        content = encode_manifest(successor)
        parts = (*pages, *self._tree.new_pages(), *self._removed.new_lists())
        key = manifest_key(base.topic_id, base.partition, successor.version, self._random_id())
        return NewManifest(
            manifest=successor, key=key, content=content, sha256=object_sha256(content), parts=parts,
            lock=in_force(lock, created_at_ms),
        )  # fmt: skip

    def _is_referenced(self, key: str) -> bool:
        return any(ref.key == key for ref in self._refs)

    def _live(self, page: ManifestPage) -> tuple[SegmentEntry, ...]:
        return tuple(entry for entry in page.segments if entry.end_offset > self._start_offset)

    def _loaded(self, ref: PageRef, pages: Pages) -> ManifestPage:
        page = self._new_pages.get(ref.key) or pages.get(ref.key)
        assert page is not None, f"page {ref.key} was not loaded for the edit"
        return page

    def _retire_page(self, ref: PageRef) -> None:
        # A page made by this edit has not been stored, so there is nothing to delete later.
        if self._new_pages.pop(ref.key, None) is None:
            self._retire(ref)

    def _retire(self, ref: PageRef | TreePageRef) -> None:
        self._removed.add([self._removed_object(ref, Removal(reason=Reason.SUPERSEDED))])

    def _removed_object(self, what: SegmentEntry | PageRef | TreePageRef, removal: Removal) -> RemovedObject:
        return RemovedObject(
            key=what.key, object_bytes=what.object_bytes, reason=removal.reason, removed_at_ms=UNFINISHED_MS,
            policy=removal.policy, actor=self._writer,
        )  # fmt: skip

    def _new_page(self, entries: Sequence[SegmentEntry], level: int) -> PageRef:
        base = self._previous.manifest
        page = ManifestPage(topic_id=base.topic_id, partition=base.partition, segments=tuple(entries))
        key = page_key(base.topic_id, base.partition, entries[0].base_offset, level, self._random_id())
        self._new_pages[key] = page
        content = encode_page(page)
        ref = PageRef(
            key=key, sha256=object_sha256(content), object_bytes=len(content), level=level, base_offset=0, end_offset=0,
            min_timestamp_ms=None, max_timestamp_ms=0, segment_count=0,
        )  # fmt: skip
        return _narrowed(ref, entries)


def _narrowed(ref: PageRef, live: Sequence[SegmentEntry]) -> PageRef:
    return msgspec.structs.replace(
        ref,
        base_offset=live[0].base_offset,
        end_offset=live[-1].end_offset,
        min_timestamp_ms=minimum_timestamp_ms(live),
        max_timestamp_ms=max(entry.max_timestamp_ms for entry in live),
        segment_count=len(live),
    )


def minimum_timestamp_ms(entries: Sequence[SegmentEntry]) -> int | None:
    """The minimum timestamp over all records of the segments; None if it is unknown for any of them."""
    known = [entry.min_timestamp_ms for entry in entries if entry.min_timestamp_ms is not None]
    return min(known) if len(known) == len(entries) else None


def _spliced(entries: Sequence[SegmentEntry], merged: SegmentEntry) -> tuple[list[SegmentEntry], tuple[SegmentEntry, ...]]:
    run = tuple(e for e in entries if e.end_offset > merged.base_offset and e.base_offset < merged.end_offset)
    if not run or run[0].base_offset != merged.base_offset or run[-1].end_offset != merged.end_offset:
        raise Invalid(f"no run of segments covers exactly offsets {merged.base_offset}..{merged.end_offset}")
    records = sum(entry.record_count for entry in run)
    may_lack_records = merged.is_compacted or merged.is_erased
    if records < merged.record_count or (records != merged.record_count and not may_lack_records):
        raise Invalid(
            f"merged segment {merged.key} holds {merged.record_count} records; the run that it replaces holds another number"
        )
    if sum(entry.leaf_count for entry in run) != merged.leaf_count:
        raise Invalid(
            f"merged segment {merged.key} has {merged.leaf_count} leaves; the run that it replaces has another number"
        )
    if any(entry.is_compacted for entry in run) and not merged.is_compacted:
        raise Invalid(f"merged segment {merged.key} would not say that batches of the run that it replaces are missing")
    if any(entry.is_erased for entry in run) and not (merged.is_compacted or merged.is_erased):
        raise Invalid(f"merged segment {merged.key} would not say that records of the run that it replaces were erased")
    merged = msgspec.structs.replace(merged, first_leaf=run[0].first_leaf)
    before = [entry for entry in entries if entry.end_offset <= merged.base_offset]
    after = [entry for entry in entries if entry.base_offset >= merged.end_offset]
    return [*before, merged, *after], run
