"""Applies retention to one partition's cold history, and deletes removed objects after the grace period.

Runs under the partition's lease, so no other worker commits at the same time; deletions are rate-limited. Which segments have
expired is decided in ``core/retention.py``. An object that a worker locked, and all that were removed after it, stay until the
lock ends. Hot ledgers are not removed here (``hot_expiry.py``).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.commands import Guards, move_start
from stratalog_tiering.core.leases import unprotected_before_ms
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.core.retention import expiry_reason, newest_ms, policy_of, retained_bytes
from stratalog_tiering.format.manifest import Manifest, RemovedObject, SegmentEntry
from stratalog_tiering.format.manifest_edit import ManifestEdit, Removal
from stratalog_tiering.format.removed_objects import RemovedLists
from stratalog_tiering.offload.commit import commit_edit, previous_version, refuse_fork_before_deletion
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.reader_leases import leases_in_force
from stratalog_tiering.store import Locked

DROPS_AT_ONCE_MAX: Final = 10_000
"""Segments that one edit drops. The pages of all of them are in memory at once."""
DELETIONS_AT_ONCE_MAX: Final = 2_000
"""Objects deleted before the commit that forgets them."""
_log = logging.getLogger(__name__)


async def apply_retention(
    ports: WorkerPorts, state: PartitionSnapshot, policy: TierPolicy, guards: Guards, *, deletes: bool = True
) -> bool:
    """Drop expired segments from the manifest and delete objects that were removed a grace period ago; True if there were any.

    Without ``deletes`` it only drops segments. The work of one call is bounded; call it again while it returns True. Objects
    that the store keeps under a lock that no worker asked for are tried again a grace period later. Raises ``Locked`` or
    ``Refused``, having dropped nothing, if the store keeps all that are due, ``Corrupt``, having dropped and deleted nothing,
    if a list of them or a page is damaged, ``Forked``, having deleted nothing, ``Unavailable``, ``OutcomeUnknown``, ``Fenced``.
    """
    if state.pointer is None:
        return False
    previous = await previous_version(ports, state)
    edit, now_ms = ManifestEdit(previous, writer=ports.settings.worker_id, random_id=ports.random_id), ports.clock.wall_ms()
    expired: list[tuple[SegmentEntry, str]] = []
    async for each in expired_segments(ports.source, state, previous.manifest, policy, now_ms):
        expired.append(each)
        if len(expired) == DROPS_AT_ONCE_MAX:
            break
    if expired:
        below = expired[-1][0].end_offset
        start = state.log.log_start_offset
        removals = {entry.key: Removal(reason=why, policy=policy_of(why, policy, start)) for entry, why in expired}
        pages = await ports.source.pages(edit.pages_for_drop(below))
        edit.drop_below(below, lambda entry: removals[entry.key], pages)
    before_ms = await _deletable_before_ms(ports, state, previous.manifest)
    lists = await ports.source.removed_lists(edit.lists_due(before_ms, DELETIONS_AT_ONCE_MAX)) if deletes else {}
    limit = await _unlocked(ports, previous.manifest, lists, before_ms, now_ms) if deletes else 0
    gone = [*edit.forget_due(before_ms, limit, lists)]
    if not edit.is_changed:
        return False
    if gone:
        await refuse_fork_before_deletion(ports, state)
        kept = await _delete(ports, gone)
        edit.keep_removed([each for each in _oldest_removed(previous.manifest, lists) if each.key in kept])
    await commit_edit(ports, state, edit, lambda now, pointer: move_start(now, pointer, guards))
    return True


async def _delete(ports: WorkerPorts, keys: Sequence[str]) -> frozenset[str]:
    """Delete objects; return those that the store keeps. Raises ``Locked`` if it keeps all of them."""
    try:
        await ports.delete_objects(keys)
    except Locked as locked:
        kept = frozenset(locked.detail["keys"])
        if kept.issuperset(keys):
            raise
        _log.warning("removed objects stay for another grace period: %s", locked.message)
        return kept
    return frozenset()


async def _deletable_before_ms(ports: WorkerPorts, state: PartitionSnapshot, manifest: Manifest) -> int:
    """Objects that were removed before this wall time may be deleted. Asks for readers' leases only if there are any."""
    before_ms = ports.deletable_before_ms()
    removed_ms = [ref.removed_at_ms for ref in manifest.removed_lists[:1]]
    removed_ms += [removed.removed_at_ms for removed in manifest.removed[:1]]
    if not removed_ms or min(removed_ms) > before_ms:
        return before_ms
    leases = await leases_in_force(ports.store, ports.clock.wall_ms())
    return unprotected_before_ms(leases, state.log.topic_id, before_ms)


async def expired_segments(
    source: ManifestSource, state: PartitionSnapshot, manifest: Manifest, policy: TierPolicy, now_ms: int
) -> AsyncIterator[tuple[SegmentEntry, str]]:
    """The oldest segments that have expired under ``policy`` at the wall time ``now_ms``, each with the rule.

    ``manifest`` is the one that ``state`` points to.
    """
    total_bytes = retained_bytes(state, manifest)
    async for entry in source.segments(manifest):
        reason = expiry_reason(
            entry, policy, total_bytes=total_bytes, log_start_offset=state.log.log_start_offset, now_ms=now_ms
        )
        if reason is None:
            return
        yield entry, reason
        total_bytes -= entry.stored_bytes


async def _unlocked(ports: WorkerPorts, manifest: Manifest, lists: RemovedLists, before_ms: int, now_ms: int) -> int:
    """The number of objects, of those removed first, that may be deleted now because no lock keeps them."""
    if manifest.lock_until_ms <= now_ms:
        return DELETIONS_AT_ONCE_MAX
    count = 0
    for removed in _oldest_removed(manifest, lists):
        if count == DELETIONS_AT_ONCE_MAX or removed.removed_at_ms > before_ms:
            break
        if await ports.locks.until_ms(removed.key) > now_ms:
            break
        count += 1
    return count


def _oldest_removed(manifest: Manifest, lists: RemovedLists) -> Iterator[RemovedObject]:
    """The removed objects in the order of their removal, as far as ``lists`` has them."""
    for ref in manifest.removed_lists:
        if ref.key not in lists:
            return
        yield from lists[ref.key].objects[ref.deleted_count :]
    yield from manifest.removed


async def next_expiry_ms(ports: WorkerPorts, state: PartitionSnapshot, policy: TierPolicy) -> int | None:
    """Wall time (ms) at which the oldest segment expires or the oldest removed object may be deleted; None: never."""
    if state.pointer is None:
        return None
    manifest = await ports.source.manifest(state.pointer)
    # Lists and inline removed objects are both in the order of removal.
    removed_ms = [ref.removed_at_ms for ref in manifest.removed_lists[:1]] + [
        each.removed_at_ms for each in manifest.removed[:1]
    ]
    times = [max(at_ms + ports.settings.grace_ms + 1, ports.bucket.deletes_from_ms) for at_ms in removed_ms]
    if times and manifest.lock_until_ms > ports.clock.wall_ms():
        times = [max(min(times), await _first_lock_ms(ports, manifest))]
    async for entry in ports.source.segments(manifest):
        locked_ms = entry.options.lock_until_ms
        if policy.retention_ms != UNLIMITED:
            times.append(max(newest_ms(entry) + policy.retention_ms + 1, locked_ms))
        if locked_ms > ports.clock.wall_ms():
            # By its size or the log's start the segment may go as soon as its lock ends.
            times.append(locked_ms)
        break
    return min(times, default=None)


async def _first_lock_ms(ports: WorkerPorts, manifest: Manifest) -> int:
    """The end of the lock of the object that was removed first; 0 without one."""
    lists = await ports.source.removed_lists(manifest.removed_lists[:1])
    for removed in _oldest_removed(manifest, lists):
        return await ports.locks.until_ms(removed.key)
    return 0
