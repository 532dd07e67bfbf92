"""The removed objects of one manifest edit: added, moved into lists, merged, and forgotten once they are deleted.

They stay in the order of their removal, so those whose grace period has passed always come first. A new list holds a multiple
of ``inline_removed_max`` objects, and ``page_fan_in`` neighbouring lists of one size class are merged, so the root grows with
the logarithm of their number up to the longest list, and with a 16,384th of it beyond. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import takewhile
from typing import Final

import msgspec

from stratalog_tiering.format.manifest import Manifest, Reason, RemovedList, RemovedListRef, RemovedObject, encode_removed_list
from stratalog_tiering.format.manifest_limits import ManifestLimits
from stratalog_tiering.format.object_frame import object_sha256
from stratalog_tiering.format.object_keys import removed_list_key

RemovedLists = Mapping[str, RemovedList]
"""Lists loaded for an edit, by object key."""

NO_LISTS: Final[RemovedLists] = {}
UNFINISHED_MS: Final = 0
"""``removed_at_ms`` of an object until :meth:`RemovedObjects.finish` sets it."""


class RemovedObjects:
    """The removed objects of one edit, which starts from those of ``base``."""

    def __init__(self, base: Manifest, random_id: Callable[[], int], limits: ManifestLimits) -> None:
        self._base = base
        self._random_id = random_id
        self._limits = limits
        self.refs = list(base.removed_lists)
        self.inline = list(base.removed)
        self.added: list[RemovedObject] = []
        self.lists_made = base.removed_lists_made
        self._new: dict[str, bytes] = {}

    def add(self, objects: Iterable[RemovedObject]) -> None:
        """Add objects that this edit removes from the history; :meth:`finish` sets their time."""
        self.added.extend(objects)

    def replace(self, objects: Iterable[RemovedObject]) -> None:
        """Keep these objects and no others."""
        self.refs.clear()
        self.inline[:] = objects

    def lists_due(self, before_ms: int, limit: int) -> tuple[RemovedListRef, ...]:
        """The stored lists that :meth:`forget_due` needs."""
        due: list[RemovedListRef] = []
        for ref in self.refs:
            if ref.removed_at_ms > before_ms or sum(each.object_count for each in due) >= limit:
                break
            due.append(ref)
        return tuple(due)

    def forget_due(self, before_ms: int, limit: int, actor: str, lists: RemovedLists = NO_LISTS) -> tuple[str, ...]:
        """Forget at most ``limit`` objects removed at ``before_ms`` or earlier; returns their keys.

        They must be deleted before the edit is committed.
        """
        keys: list[str] = []
        emptied: list[RemovedObject] = []
        while self.refs and len(keys) < limit:
            ref = self.refs[0]
            if ref.removed_at_ms > before_ms:
                break
            objects = lists[ref.key].objects[ref.deleted_count :]
            due = _due(objects, before_ms, limit - len(keys))
            keys.extend(removed.key for removed in due)
            if len(due) < len(objects):
                self.refs[0] = _narrowed(ref, objects[len(due) :])
                break
            del self.refs[0]
            emptied.append(_superseded(ref, actor))
        if not self.refs:
            due = _due(self.inline, before_ms, limit - len(keys))
            keys.extend(removed.key for removed in due)
            del self.inline[: len(due)]
        self.add(emptied)
        return tuple(keys)

    def lists_to_merge(self, without: Set[str] = frozenset()) -> tuple[RemovedListRef, ...]:
        """The first neighbouring lists that :meth:`finish` can merge, ``without`` these keys; empty if there are none."""
        fan_in = self._limits.page_fan_in
        for first in range(len(self.refs) - fan_in + 1):
            run = self.refs[first : first + fan_in]
            same = len({self._size_class(ref.object_count) for ref in run}) == 1
            is_short = sum(ref.object_count for ref in run) <= self._limits.removed_list_objects_max
            if same and is_short and without.isdisjoint(ref.key for ref in run):
                return tuple(run)
        return ()

    def finish(self, removed_at_ms: int, actor: str, lists: RemovedLists = NO_LISTS) -> None:
        """Merge ``lists``, append what was added, and move inline objects into lists if there are too many.

        ``lists`` are those of :meth:`lists_to_merge`, or none.
        """
        run = [ref for ref in self.refs if ref.key in lists]
        if run:
            first = self.refs.index(run[0])
            assert self.refs[first : first + len(run)] == run, "only neighbouring lists are merged"
            objects = [removed for ref in run for removed in lists[ref.key].objects[ref.deleted_count :]]
            self.refs[first : first + len(run)] = [self._new_list(objects)]
            self.add(_superseded(ref, actor) for ref in run)
        self.inline += [msgspec.structs.replace(each, removed_at_ms=removed_at_ms) for each in self.added]
        self.added.clear()
        if len(self.inline) > self._limits.inline_removed_max:
            # Whole multiples: sixteen lists of sixteen such lists then have the longest list's length, and merge to it.
            moved = len(self.inline) - len(self.inline) % self._limits.inline_removed_max
            for start in range(0, moved, self._limits.removed_list_objects_max):
                end = min(moved, start + self._limits.removed_list_objects_max)
                self.refs.append(self._new_list(self.inline[start:end]))
            del self.inline[:moved]

    def new_lists(self) -> tuple[tuple[str, bytes], ...]:
        """Keys and contents of the lists that this edit has made."""
        return tuple(self._new.items())

    def _size_class(self, count: int) -> int:
        size, size_class = count // self._limits.inline_removed_max, 0
        while size >= self._limits.page_fan_in:
            size, size_class = size // self._limits.page_fan_in, size_class + 1
        return size_class

    def _new_list(self, objects: Sequence[RemovedObject]) -> RemovedListRef:
        topic_id, partition, number = self._base.topic_id, self._base.partition, self.lists_made
        content = encode_removed_list(
            RemovedList(topic_id=topic_id, partition=partition, number=number, objects=tuple(objects))
        )  # fmt: skip
        key = removed_list_key(topic_id, partition, number, self._random_id())
        self.lists_made += 1
        self._new[key] = content
        return RemovedListRef(
            key=key, sha256=object_sha256(content), list_bytes=len(content), number=number, deleted_count=0,
            object_count=len(objects), removed_at_ms=objects[0].removed_at_ms,
        )  # fmt: skip


def _due(objects: Sequence[RemovedObject], before_ms: int, limit: int) -> list[RemovedObject]:
    return list(takewhile(lambda removed: removed.removed_at_ms <= before_ms, objects[:limit]))


def _narrowed(ref: RemovedListRef, left: Sequence[RemovedObject]) -> RemovedListRef:
    return msgspec.structs.replace(
        ref,
        deleted_count=ref.deleted_count + ref.object_count - len(left),
        object_count=len(left),
        removed_at_ms=left[0].removed_at_ms,
    )


def _superseded(ref: RemovedListRef, actor: str) -> RemovedObject:
    return RemovedObject(
        key=ref.key, object_bytes=ref.list_bytes, reason=Reason.SUPERSEDED, removed_at_ms=UNFINISHED_MS, actor=actor
    )
