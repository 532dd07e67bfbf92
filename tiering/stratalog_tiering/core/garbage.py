"""Which objects are garbage, why, and from when on they may be deleted.

An object of a live topic is garbage if a listing shows it and the committed manifest, read after the listing, has not referred
to it for the grace period. The period begins when an orphan was written, when a superseded manifest's successor was written,
and when a manifest removed a segment, a page or a list. The objects of a deleted topic are garbage once it cannot be restored
and the grace period is over. Workers and ``stratalog tier gc`` decide by these functions. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from stratalog_metadata.records import DeletedTopic, PendingTopic
from stratalog_tiering.core.forks import manifest_keys
from stratalog_tiering.format.manifest import Manifest, RemovedObject
from stratalog_tiering.format.object_keys import is_data_key, marker_key
from stratalog_tiering.store.base import ObjectInfo

ORPHAN: Final = "orphan"
"""Left by a failed upload or a lost commit."""
OLD_MANIFEST: Final = "old-manifest"
"""A superseded manifest, one that lost its race, or the marker of one."""
DELETED_TOPIC: Final = "deleted-topic"
RESTORABLE_TOPIC: Final = "restorable-topic"
"""Its topic can still be restored; a worker makes the deletion final first."""
EARLIER_DELETION: Final = "earlier-deletion"
"""Its topic was deleted by an earlier owner of the bucket; a worker records that first."""
PENDING_TOPIC: Final = "pending-topic"
"""Its topic is being attached, or the process that did it has died; a worker gives the attachment up first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """An object that goes. ``reason`` is one of this module's, or the one for which a manifest removed the object.

    ``due_ms`` is the wall time from which on it may be deleted, ``lease`` the holder of the reader's lease that keeps it.
    """

    key: str
    object_bytes: int
    reason: str
    due_ms: int
    lease: str = ""

    def is_due(self, now_ms: int) -> bool:
        """Whether the object may be deleted at the wall time ``now_ms``."""
        return self.reason not in (RESTORABLE_TOPIC, EARLIER_DELETION, PENDING_TOPIC) and self.due_ms <= now_ms


def orphans(listed: Iterable[ObjectInfo], referenced: frozenset[str], grace_ms: int) -> list[Garbage]:
    """The data objects that nothing refers to."""
    return [_garbage(info, ORPHAN, info.last_modified_ms, grace_ms) for info in listed if info.key not in referenced]


def manifest_garbage(
    listed: Sequence[ObjectInfo], current_version: int, current_key: str, referenced: frozenset[str], grace_ms: int
) -> list[Garbage]:
    """Superseded manifests with their markers, and manifests that lost their race.

    The current version is never garbage, nor is any ``referenced`` object: those of a resolved fork are removed objects. The
    grace period of a superseded version begins when its successor was written, that of a loser when it was itself. Markers come
    after manifests in the result, so that an interrupted deletion leaves no old version that looks uncommitted.
    """
    # A successor may be missing because it is deleted or because the listing lags, so the next marked version counts. An
    # unmarked one may have lost its race long before the successor was written.
    marked_ms = {key.version: info.last_modified_ms for info, key in manifest_keys(listed) if key.is_marker}
    versions = sorted({key.version for _, key in manifest_keys(listed)})
    superseded_ms: dict[int, int] = {}
    newer_ms: int | None = None
    for version in reversed(versions):
        if newer_ms is not None:
            superseded_ms[version] = newer_ms
        newer_ms = marked_ms.get(version, newer_ms)
    kept = {current_key, marker_key(current_key), *referenced}
    garbage: list[tuple[bool, str, Garbage]] = []
    for info, key in manifest_keys(listed):
        since_ms = info.last_modified_ms if key.version >= current_version else superseded_ms.get(key.version)
        if info.key not in kept and since_ms is not None:
            garbage.append((key.is_marker, info.key, _garbage(info, OLD_MANIFEST, since_ms, grace_ms)))
    return [each for _, _, each in sorted(garbage, key=lambda found: found[:2])]


def kept_by_policy(garbage: Iterable[Garbage], written_ms: Mapping[str, int], lock_ms: int) -> list[Garbage]:
    """``garbage`` that is not due before the lock that a topic with ``lock_ms`` gives what it writes would have ended.

    ``written_ms`` are the times of writing by key. The real lock may end later: this spares questions to the store. Wrapped
    data keys are never locked.
    """
    return [
        each if is_data_key(each.key) else replace(each, due_ms=max(each.due_ms, written_ms.get(each.key, 0) + lock_ms))
        for each in garbage
    ]


def removed_garbage(
    listed: Iterable[ObjectInfo], removed: Iterable[RemovedObject], live: frozenset[str], grace_ms: int
) -> list[Garbage]:
    """The ``listed`` objects that a manifest lists as ``removed``, in the order of their removal.

    ``live`` are the keys that it refers to otherwise: an object may hold several segments.
    """
    present = {info.key for info in listed} - live
    return [
        Garbage(key=each.key, object_bytes=each.object_bytes, reason=each.reason, due_ms=each.removed_at_ms + grace_ms)
        for each in removed
        if each.key in present
    ]


def _garbage(info: ObjectInfo, reason: str, since_ms: int, grace_ms: int) -> Garbage:
    # A listing may round times down, so the period is over one millisecond later.
    return Garbage(key=info.key, object_bytes=info.size_bytes, reason=reason, due_ms=since_ms + grace_ms + 1)


def live_keys(manifest: Manifest, segments: Iterable[str]) -> frozenset[str]:
    """Keys of all objects that a manifest refers to but its removed ones, given the keys of its live segments."""
    return frozenset(
        [
            *(ref.key for ref in manifest.pages), *(ref.key for ref in manifest.removed_lists),
            *(ref.key for ref in manifest.tree.pages), *segments,
        ]
    )  # fmt: skip


def deletion_due_ms(deleted: DeletedTopic, hidden_ms: int, grace_ms: int) -> int:
    """Wall time of the next step of a deletion: it becomes final, or if it is final the topic's objects are deleted.

    ``hidden_ms`` is the time of the bucket's deletion marker. Both periods begin then, or at the broker's time if it is later.
    """
    return max(hidden_ms, deleted.deleted_at_ms) + (grace_ms if deleted.is_final else deleted.restorable_ms)


def late_writes_until_ms(due_ms: int, grace_ms: int) -> int:
    """Wall time until which objects of a topic may still be written whose objects were due at ``due_ms``.

    A write that got no answer may take effect after they were listed. After this time they are listed once more.
    """
    return due_ms + grace_ms


def deleted_topic_garbage(listed: Iterable[ObjectInfo], deleted: DeletedTopic, hidden_ms: int, grace_ms: int) -> list[Garbage]:
    """All ``listed`` objects of a deleted topic. Those of a topic that can be restored are not due before it cannot."""
    due_ms = max(deletion_due_ms(deleted, hidden_ms, grace_ms), max(hidden_ms, deleted.deleted_at_ms) + grace_ms)
    reason = DELETED_TOPIC if deleted.is_final else RESTORABLE_TOPIC
    return [Garbage(key=info.key, object_bytes=info.size_bytes, reason=reason, due_ms=due_ms) for info in listed]


def pending_topic_garbage(listed: Iterable[ObjectInfo], pending: PendingTopic, grace_ms: int) -> list[Garbage]:
    """All ``listed`` objects of a topic that is being attached, as if nobody finished it."""
    due_ms = pending.expires_at_ms + grace_ms
    return [Garbage(key=info.key, object_bytes=info.size_bytes, reason=PENDING_TOPIC, due_ms=due_ms) for info in listed]
