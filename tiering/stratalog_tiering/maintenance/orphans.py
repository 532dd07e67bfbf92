"""Deletes a partition's orphans: objects that the committed manifest does not refer to, after the grace period.

Orphans are left by failed uploads, lost commits and superseded manifests. Objects that the manifest lists as removed are not
orphans (``retention.py`` deletes them). Runs under the partition's lease; which objects are garbage is decided in
``core/garbage.py``.
"""

from __future__ import annotations

from stratalog_metadata.records import ManifestPointer, manifest_pointer_key
from stratalog_tiering.core.forks import find_fork, fork_error
from stratalog_tiering.core.garbage import manifest_garbage, orphans, referenced_keys
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.format.manifest import Manifest, check_writer, empty_manifest
from stratalog_tiering.format.object_keys import DATA_PREFIXES, manifests_prefix
from stratalog_tiering.offload.commit import committed_manifest
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import ObjectInfo


async def sweep_orphans(ports: WorkerPorts, state: PartitionSnapshot) -> int:
    """Delete the partition's orphans that are older than the grace period; returns how many.

    The store is listed first and the pointer is read after it, linearizably, so that an object that a commit refers to is never
    taken for an orphan. An object that is being written is younger than the grace period.
    Raises, having deleted nothing, ``Forked`` if the store holds committed history that metadata does not know, and ``Invalid``
    if the manifest requires a newer writer, which may refer to objects that this release does not know.
    """
    topic_id, index = state.log.topic_id, state.log.index
    before_ms = ports.clock.wall_ms() - ports.settings.grace_ms
    data: list[ObjectInfo] = []
    for make_prefix in DATA_PREFIXES:
        data += [info async for info in ports.store.list(make_prefix(topic_id, index))]
    manifests = [info async for info in ports.store.list(manifests_prefix(topic_id, index))]
    if not data and not manifests:
        return 0
    pointer = await _current_pointer(ports, state)
    current = await _manifest_of(ports, state, pointer)
    check_writer(current)
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


async def _current_pointer(ports: WorkerPorts, state: PartitionSnapshot) -> ManifestPointer | None:
    (found,) = await ports.metadata.read([manifest_pointer_key(state.log.topic_id, state.log.index)])
    pointer = found.record if found is not None else None
    return pointer if isinstance(pointer, ManifestPointer) else None


async def _manifest_of(ports: WorkerPorts, state: PartitionSnapshot, pointer: ManifestPointer | None) -> Manifest:
    if pointer is None:
        return empty_manifest(state.topic.topic_id, state.topic.name, state.log.index, 0)
    return await committed_manifest(ports, state, pointer)
