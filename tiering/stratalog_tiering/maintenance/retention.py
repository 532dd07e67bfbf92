"""Keeps one partition's part of the bucket as it should be: retention, deletion after the grace period, orphans.

All of it runs under the partition's lease, so that nobody else commits meanwhile; deletions are paced.
"""

from __future__ import annotations

from typing import Final

from stratalog_metadata.records import ManifestPointer, manifest_pointer_key
from stratalog_tiering.core.commands import Guards, move_start
from stratalog_tiering.core.forks import find_fork, fork_error
from stratalog_tiering.core.garbage import manifest_garbage, orphans, referenced_keys
from stratalog_tiering.core.planning import PartitionState
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.core.retention import expiry_reason, newest_ms
from stratalog_tiering.format.manifest import Manifest, SegmentEntry, empty_manifest
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.format.object_keys import manifests_prefix, pages_prefix, removed_prefix, segments_prefix
from stratalog_tiering.offload.commit import commit_edit, committed_manifest, previous_version, refuse_fork
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import ObjectInfo

DROPS_AT_ONCE_MAX: Final = 10_000
"""Segments that one edit drops; all their pages are in memory at once."""
DELETIONS_AT_ONCE_MAX: Final = 2_000
"""Objects that are deleted before an edit says that they are gone."""


async def apply_retention(ports: WorkerPorts, state: PartitionState, policy: TierPolicy, guards: Guards) -> bool:
    """Let expired segments go, and delete what was let go a grace period ago. Whether there was anything to do.

    Bounded for each call: what is left goes with the next. Raises ``Forked``, having deleted nothing.
    """
    if state.pointer is None:
        return False
    previous = await previous_version(ports, state)
    edit, now_ms = ManifestEdit(previous, random_id=ports.random_id), ports.clock.wall_ms()
    expired = await _expired(ports, state, previous.manifest, policy)
    if expired:
        below = expired[-1][0].end_offset
        reasons = {entry.key: reason for entry, reason in expired}
        pages = await ports.source.pages(edit.pages_for_drop(below))
        edit.drop_below(below, now_ms, lambda entry: reasons[entry.key], pages)
    before_ms = now_ms - ports.settings.grace_ms
    lists = await ports.source.removed_lists(edit.lists_due(before_ms, DELETIONS_AT_ONCE_MAX))
    gone = [*edit.forget_due(before_ms, DELETIONS_AT_ONCE_MAX, now_ms, lists)]
    if not edit.is_changed:
        return False
    if gone:
        await refuse_fork(ports, state)
        await ports.delete_objects(gone)
    await commit_edit(ports, state, edit, lambda pointer: move_start(state, pointer, guards))
    return True


async def _expired(
    ports: WorkerPorts, state: PartitionState, manifest: Manifest, policy: TierPolicy
) -> list[tuple[SegmentEntry, str]]:
    """The oldest segments that may go, each with the reason."""
    hot = (stored.ledger for stored in state.ledgers if stored.ledger.base_offset >= manifest.end_offset)
    total_bytes = manifest.cold_bytes + sum(ledger.payload_bytes for ledger in hot)
    expired: list[tuple[SegmentEntry, str]] = []
    async for entry in ports.source.segments(manifest):
        reason = expiry_reason(
            entry, policy, total_bytes=total_bytes, log_start_offset=state.log.log_start_offset, now_ms=ports.clock.wall_ms()
        )
        if reason is None or len(expired) == DROPS_AT_ONCE_MAX:
            break
        expired.append((entry, reason))
        total_bytes -= entry.object_bytes
    return expired


async def next_expiry_ms(ports: WorkerPorts, state: PartitionState, policy: TierPolicy) -> int | None:
    """When time alone gives retention something to do (wall time): the oldest segment expires, or the oldest removed object.

    None if it never does.
    """
    if state.pointer is None:
        return None
    manifest = await ports.source.manifest(state.pointer)
    # Lists, and removed objects outside of them, are in the order of their removal.
    removed_ms = [ref.removed_at_ms for ref in manifest.removed_lists[:1]] + [
        each.removed_at_ms for each in manifest.removed[:1]
    ]
    times = [removed_at_ms + ports.settings.grace_ms + 1 for removed_at_ms in removed_ms]
    if policy.retention_ms != UNLIMITED:
        async for entry in ports.source.segments(manifest):
            times.append(newest_ms(entry) + policy.retention_ms + 1)
            break
    return min(times, default=None)


async def sweep_orphans(ports: WorkerPorts, state: PartitionState) -> int:
    """Delete objects that nothing refers to and that are older than the grace period; how many.

    The listing comes first and the pointer after it, linearizably, so what is referred to is never taken for garbage. An
    object that is being written is younger than the grace period. Raises ``Forked``, having deleted nothing, if the bucket
    holds committed history that metadata does not know of.
    """
    topic_id, index = state.log.topic_id, state.log.index
    before_ms = ports.clock.wall_ms() - ports.settings.grace_ms
    data: list[ObjectInfo] = []
    for prefix in (segments_prefix(topic_id, index), pages_prefix(topic_id, index), removed_prefix(topic_id, index)):
        data += [info async for info in ports.store.list(prefix)]
    manifests = [info async for info in ports.store.list(manifests_prefix(topic_id, index))]
    if not data and not manifests:
        return 0
    pointer = await _current_pointer(ports, state)
    current = await _manifest_of(ports, state, pointer)
    key = pointer.object_key if pointer is not None else ""
    fork = find_fork(manifests, {current.version: key}, current.settled_version)
    if fork is not None:
        raise fork_error(fork, state.topic.name, index)
    live = [entry.key async for entry in ports.source.segments(current)]
    referenced = referenced_keys(current, live, [removed.key async for removed in ports.source.removed(current)])
    garbage = orphans(data, referenced, before_ms)
    garbage += manifest_garbage(manifests, current.version, key, referenced, before_ms)
    await ports.delete_objects(garbage)
    return len(garbage)


async def _current_pointer(ports: WorkerPorts, state: PartitionState) -> ManifestPointer | None:
    (found,) = await ports.metadata.read([manifest_pointer_key(state.log.topic_id, state.log.index)])
    pointer = found.record if found is not None else None
    return pointer if isinstance(pointer, ManifestPointer) else None


async def _manifest_of(ports: WorkerPorts, state: PartitionState, pointer: ManifestPointer | None) -> Manifest:
    if pointer is None:
        return empty_manifest(state.topic.topic_id, state.topic.name, state.log.index, 0)
    return await committed_manifest(ports, state, pointer)
