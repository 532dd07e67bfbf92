"""Keeps one partition's part of the bucket as it should be: retention, deletion after the grace period, orphans.

All of it runs under the partition's lease, so that nobody else commits meanwhile; deletions are paced.
"""

from __future__ import annotations

from stratalog_core.errors import Corrupt
from stratalog_metadata.records import ManifestPointer, manifest_pointer_key
from stratalog_tiering.commands import Guards, move_start
from stratalog_tiering.committing import commit_manifest, own_objects, previous_version
from stratalog_tiering.gc import manifest_garbage, orphans, referenced_keys, unknown_to_metadata
from stratalog_tiering.manifest import Manifest, empty_manifest
from stratalog_tiering.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.object_keys import manifests_prefix, pages_prefix, segments_prefix
from stratalog_tiering.planning import PartitionState
from stratalog_tiering.policy import TierPolicy
from stratalog_tiering.ports import WorkerPorts
from stratalog_tiering.publish import store_manifest
from stratalog_tiering.retention import drop_below_offset


async def apply_retention(ports: WorkerPorts, state: PartitionState, policy: TierPolicy, guards: Guards) -> bool:
    """Let expired segments go, and delete what was let go a grace period ago. Whether anything was committed."""
    if state.pointer is None:
        return False
    previous = await previous_version(ports, state)
    edit = ManifestEdit(previous, random_id=ports.random_id)
    gone = list(edit.removable(ports.clock.wall_ms() - ports.settings.grace_ms))
    await ports.delete_objects(gone)
    edit.forget(gone)
    below = await _expired_below(ports, state, previous.manifest, policy)
    if below is not None:
        edit.drop_below(below, ports.clock.wall_ms(), await ports.source.pages(edit.pages_for_drop(below)))
    if not gone and below is None:
        return False
    new = edit.finish(created_at_ms=ports.clock.wall_ms(), writer=ports.settings.worker_id)
    pointer = await store_manifest(ports.store, new)
    return await commit_manifest(ports, state, pointer, move_start(state, pointer, guards), own_objects(new))


async def _expired_below(ports: WorkerPorts, state: PartitionState, manifest: Manifest, policy: TierPolicy) -> int | None:
    hot = (stored.ledger for stored in state.ledgers if stored.ledger.base_offset >= manifest.end_offset)
    total_bytes = manifest.cold_bytes + sum(ledger.payload_bytes for ledger in hot)
    below: int | None = None
    async for entry in ports.source.segments(manifest):
        end = drop_below_offset(
            (entry,), policy, total_bytes=total_bytes, log_start_offset=state.log.log_start_offset,
            now_ms=ports.clock.wall_ms(),
        )  # fmt: skip
        if end is None:
            break
        below, total_bytes = end, total_bytes - entry.object_bytes
    return below


async def sweep_orphans(ports: WorkerPorts, state: PartitionState) -> int:
    """Delete objects that nothing refers to and that are older than the grace period; how many.

    The listing comes first and the pointer after it, linearizably, so what is referred to is never taken for garbage. An
    object that is being written is younger than the grace period. Raises ``Corrupt``, having deleted nothing, if the bucket
    holds committed history that metadata does not know of.
    """
    topic_id, index = state.log.topic_id, state.log.index
    before_ms = ports.clock.wall_ms() - ports.settings.grace_ms
    data = [info async for info in ports.store.list(segments_prefix(topic_id, index))]
    data += [info async for info in ports.store.list(pages_prefix(topic_id, index))]
    manifests = [info async for info in ports.store.list(manifests_prefix(topic_id, index))]
    if not data and not manifests:
        return 0
    current = await _current(ports, state)
    unknown = unknown_to_metadata(manifests, current.manifest.version, current.key)
    if unknown is not None:
        raise Corrupt(
            f"manifest {unknown} was committed, and metadata knows only of version {current.manifest.version}"
            f" ({current.key or 'none'}): metadata has lost history that is in the bucket, so nothing is deleted there"
        )
    paged = [entry.key async for entry in ports.source.segments(current.manifest)]
    garbage = orphans(data, referenced_keys(current.manifest, paged), before_ms)
    garbage += manifest_garbage(manifests, current.manifest.version, current.key, before_ms)
    await ports.delete_objects(garbage)
    return len(garbage)


async def _current(ports: WorkerPorts, state: PartitionState) -> Previous:
    (found,) = await ports.metadata.read([manifest_pointer_key(state.log.topic_id, state.log.index)])
    pointer = found.record if found is not None else None
    if not isinstance(pointer, ManifestPointer):
        return Previous(manifest=empty_manifest(state.topic.topic_id, state.topic.name, state.log.index, 0))
    return Previous(manifest=await ports.source.manifest(pointer), key=pointer.object_key)
