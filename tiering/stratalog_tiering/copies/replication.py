"""Copies the committed history of a partition to the second copy, and removes there what is no longer needed.

A version's segments and data keys go first, then its pages and lists, then the manifest, and its marker at last. So the newest
marker in the second copy names a version that is whole there, and only what a new version adds to it must be copied: there is
no other state. Versions that follow each other quickly are not all copied. A segment that is damaged in the first store, or not
returned by it, is not copied; the others are. Copies are locked as their originals are: a store that cannot lock objects
gets none of a locked topic.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import replace
from uuid import UUID

from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject, StratalogError
from stratalog_metadata.records import ManifestPointer, Topic, manifest_pointer_key, topic_key
from stratalog_tiering.cold.archive import read_marker
from stratalog_tiering.cold.segment_check import NOT_RETURNED, check_presence, require_answers
from stratalog_tiering.copies.copying import copy_object, has_object
from stratalog_tiering.copies.data_keys import copy_data_key
from stratalog_tiering.copies.second import SecondCopy, put_if_absent
from stratalog_tiering.core.garbage import live_keys
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.core.references import Reference, segment_object, side_objects
from stratalog_tiering.core.second_copy import CopiedVersion, copied_versions, copy_garbage, version_at
from stratalog_tiering.format.locks import manifest_lock
from stratalog_tiering.format.manifest import Manifest, SegmentEntry
from stratalog_tiering.format.manifest_writers import check_writer
from stratalog_tiering.format.object_keys import (
    DATA_PREFIXES,
    is_version_object,
    manifests_prefix,
    marker_key,
    topic_prefix,
    with_data_keys,
)
from stratalog_tiering.offload.commit import committed_manifest, refuse_fork
from stratalog_tiering.offload.commit_markers import mark_committed
from stratalog_tiering.offload.locks import unlocked
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import ObjectInfo, ObjectStore

_log = logging.getLogger(__name__)


async def copy_partition(ports: WorkerPorts, second: SecondCopy, state: PartitionSnapshot) -> int:
    """Bring the second copy to the partition's committed version; returns the number of objects copied.

    Raises ``Corrupt`` if an object is damaged in the first store, or the store returns all but this object (all others are
    copied, and the version is not marked),
    ``Forked`` if history has forked, ``Invalid`` if the second copy is another cluster's, ``Unavailable``, ``OutcomeUnknown``.
    """
    pointer = state.pointer
    if pointer is None or pointer.content or second.known.get(pointer.key()) == pointer.object_key:
        return 0  # A manifest that is not stored yet is copied when the pointer changes, once it is.
    await second.confirm(ports)
    await refuse_fork(ports, state)
    await copy_descriptors(ports.store, second, state.topic.topic_id)
    return await copy_committed(ports, second, pointer, await committed_manifest(ports, state, pointer))


async def copy_committed(ports: WorkerPorts, second: SecondCopy, pointer: ManifestPointer, manifest: Manifest) -> int:
    """Bring the second copy to a committed version; returns the number of objects copied. Raises as `copy_partition` does."""
    check_writer(manifest)
    listed = [info async for info in second.store.list(manifests_prefix(pointer.topic_id, pointer.index))]
    newest = next(iter(copied_versions(listed)), None)
    if newest is None and pointer.key() in second.known:
        second.lost(pointer.key())
        await second.confirm(ports)
    copied = 0
    if newest is None or newest.manifest_key != pointer.object_key:
        if newest is not None and newest.version >= pointer.manifest_version:
            raise Corrupt(
                f"the second copy in {second.store.url} has version {newest.version} of {pointer.key()}, and metadata has"
                f" version {pointer.manifest_version}: history has forked, and nothing is copied before it is resolved"
            )
        copied = await _copy_version(ports, second, pointer, manifest, newest)
    second.known.put(pointer.key(), pointer.object_key)
    return copied


async def _copy_version(
    ports: WorkerPorts, second: SecondCopy, pointer: ManifestPointer, manifest: Manifest, newest: CopiedVersion | None
) -> int:
    try:
        present = await _keys_of(second, newest)
    except (Corrupt, Invalid) as damaged:
        _log.warning("%s: each object of the next version is compared with the committed one", damaged.message)
        present = frozenset()
    copied, failures = await _copy_segments(ports, second, pointer, manifest, present)
    for wanted in side_objects(manifest):
        if wanted.key not in present:
            await _copy(ports.store, second, wanted)
            copied += 1
    if failures:
        raise Corrupt(f"{len(failures)} segments cannot be copied, first: {failures[0].message}") from failures[0]
    size = (await ports.store.head(pointer.object_key)).size_bytes
    whole = Reference(
        key=pointer.object_key, sha256=bytes.fromhex(pointer.sha256), object_bytes=size, lock=manifest_lock(manifest)
    )
    await second.confirm(ports)
    await _copy(ports.store, second, whole)
    await mark_committed(second.store, pointer, ports.clock.wall_ms())
    return copied + (1 if is_version_object(pointer.object_key) else 2)


async def _copy_segments(
    ports: WorkerPorts, second: SecondCopy, pointer: ManifestPointer, manifest: Manifest, present: Set[str]
) -> tuple[int, list[StratalogError]]:
    """Copy the segments that are not ``present``; returns the number of objects, and why segments could not be copied."""
    copied, failures = 0, list[StratalogError]()
    async for entry in ports.source.segments(manifest):
        if entry.key in present:
            continue
        try:
            copied += await _copy_segment(ports, second, entry)
        except (Corrupt, NoSuchObject, *NOT_RETURNED) as failure:
            if isinstance(failure, NOT_RETURNED) and await _is_returned(ports, pointer, entry):
                raise
            _log.warning("%s is not copied: %s", entry.key, failure)
            failures.append(failure)
    return copied, failures


async def _is_returned(ports: WorkerPorts, pointer: ManifestPointer, entry: SegmentEntry) -> bool:
    """Whether the first store returns a segment of which the copy failed. Raises what it raises if it is away."""
    try:
        footer, _ = await check_presence(ports.store, ports.source, entry)
        await ports.store.get_range(entry.key, entry.data_position, 1, uncached=True)
        if footer.is_encrypted:
            await ports.store.get(footer.data_key)
    except (Corrupt, NoSuchObject):
        return False
    except NOT_RETURNED:
        await require_answers(ports.store, pointer.object_key)
        return False
    return True


async def _keys_of(second: SecondCopy, version: CopiedVersion | None) -> frozenset[str]:
    """Keys of all objects that a version in the second copy refers to. Raises ``Corrupt`` if that is damaged there."""
    if version is None:
        return frozenset()
    marker = await read_marker(second.store, marker_key(version.manifest_key))
    manifest = await second.source.manifest_at(marker.manifest_key, bytes.fromhex(marker.sha256))
    return live_keys(manifest, [entry.key async for entry in second.source.segments(manifest)])


async def _copy_segment(ports: WorkerPorts, second: SecondCopy, entry: SegmentEntry) -> int:
    """Copy a segment, and before it the data key without which it cannot be read; returns the number of objects."""
    footer = await ports.source.footer(entry)
    if footer.is_encrypted:
        await copy_data_key(ports.store, second.store, footer, lambda: second.confirm(ports))
    await _copy(ports.store, second, segment_object(entry))
    return 2 if footer.is_encrypted else 1


async def _copy(first: ObjectStore, second: SecondCopy, wanted: Reference) -> None:
    """Copy one object, unless a copy that was interrupted has left it there whole."""
    wanted = replace(wanted, storage_class="")
    # Ask before the first store is read: beside a damaged segment all others are met again at each attempt.
    if await has_object(second.store, wanted, second.limits):
        return
    try:
        await copy_object(first, second.store, wanted, second.limits)
    except Conflict:
        if await has_object(second.store, wanted, second.limits):
            return
        await copy_object(first, second.store, wanted, second.limits, replace=True)
    second.counters.objects_copied += 1
    second.counters.copied_bytes += wanted.object_bytes


async def copy_descriptors(first: ObjectStore, second: SecondCopy, topic_id: UUID) -> None:
    """Copy the versions of the topic's descriptor that the second copy lacks, oldest first: the newest one is the valid one."""
    prefix = topic_prefix(topic_id)
    present = {info.key async for info in second.store.list(prefix)}
    for key in sorted([info.key async for info in first.list(prefix) if info.key not in present], reverse=True):
        await put_if_absent(second.store, key, await first.get(key))


async def sweep_partition(ports: WorkerPorts, second: SecondCopy, state: PartitionSnapshot) -> int:
    """Delete the garbage of the partition's second copy; returns the number of objects deleted.

    Deletes nothing while the copy is not at the committed version, while history has forked, and while the committed manifest
    or its pages cannot be read in the first store: whether an object is needed is read from there, never from what the first
    store lacks. Raises ``Conflict`` if the copy lacks the committed version, although it was copied: copy it again. Else raises
    as `copy_partition` does.
    """
    listed: list[ObjectInfo] = []
    topic_id, index = state.log.topic_id, state.log.index
    for make_prefix in DATA_PREFIXES:
        listed += [info async for info in second.store.list(make_prefix(topic_id, index))]
    manifests = [info async for info in second.store.list(manifests_prefix(topic_id, index))]
    versions = copied_versions(manifests)
    oldest_kept = version_at(versions, ports.clock.wall_ms() - second.grace_ms)
    pointer = await _committed_now(ports, state)
    if pointer is None or pointer.content:
        return 0
    if not versions or versions[0].manifest_key != pointer.object_key:
        second.lost(pointer.key())
        text = f"{second.store.url} no longer has version {pointer.manifest_version} of {state.topic.name}-{state.log.index}"
        _log.warning("%s, which was copied to it: it is copied again", text)
        raise Conflict(text)
    if oldest_kept is None:
        return 0
    await refuse_fork(ports, state)
    manifest = await committed_manifest(ports, state, pointer)
    check_writer(manifest)
    live = [entry.key async for entry in ports.source.segments(manifest)]
    removed = [each.key async for each in ports.source.removed(manifest)]
    needed = with_data_keys(live_keys(manifest, live).union(removed, await _keys_of(second, oldest_kept)))
    garbage = copy_garbage(listed, manifests, needed, oldest_kept)
    if pointer.lock_until_ms > ports.clock.wall_ms():
        garbage = await unlocked(second.locks, garbage, ports.clock.wall_ms())
    return len(garbage) - await second.delete(ports, garbage)


async def _committed_now(ports: WorkerPorts, state: PartitionSnapshot) -> ManifestPointer | None:
    """The pointer, read linearizably after the listing. Raises ``Conflict`` if the topic was deleted or the pointer changed."""
    keys = [manifest_pointer_key(state.log.topic_id, state.log.index), topic_key(state.topic.name)]
    pointer, topic = (found.record if found is not None else None for found in await ports.metadata.read(keys))
    if not isinstance(topic, Topic) or topic.topic_id != state.topic.topic_id or pointer != state.pointer:
        raise Conflict(f"{state.topic.name}-{state.log.index} has changed while its second copy was listed")
    return pointer if isinstance(pointer, ManifestPointer) else None
