"""Finds a partition's garbage, and deletes its orphans after the grace period.

Orphans are left by failed uploads, lost commits and superseded manifests. Objects that the manifest lists as removed are not
orphans (``retention.py`` deletes them). ``core/garbage.py`` decides which objects are garbage, and since when.

A command beside the workers may be stopped for any time after it has written objects and before the commit that refers to them.
So before an orphan is deleted, the pointer is written again as it is: each commit that began before requires its former
version, and fails from then on (``refuse_earlier_commits``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import ManifestPointer, Topic, Versioned, configs_in_force, manifest_pointer_key, topic_key
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_tiering.core.forks import find_fork, fork_error
from stratalog_tiering.core.garbage import (
    ORPHAN,
    Garbage,
    kept_by_policy,
    live_keys,
    manifest_garbage,
    orphans,
    removed_garbage,
)
from stratalog_tiering.core.leases import kept_by_leases
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.core.policy import tier_policy
from stratalog_tiering.format.manifest import Manifest, empty_manifest
from stratalog_tiering.format.manifest_writers import check_writer
from stratalog_tiering.format.object_keys import DATA_PREFIXES, manifests_prefix, marker_key, with_data_keys
from stratalog_tiering.offload.commit import committed_manifest
from stratalog_tiering.offload.locks import KnownLocks
from stratalog_tiering.offload.ports import HistoryPorts, WorkerPorts
from stratalog_tiering.offload.reader_leases import leases_in_force
from stratalog_tiering.store import Locked, ObjectInfo

_QUESTIONS_AT_ONCE: Final = 16
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionGarbage:
    """``orphans`` are objects that the manifest does not refer to, ``removed`` those that it lists as removed."""

    orphans: tuple[Garbage, ...] = ()
    removed: tuple[Garbage, ...] = ()
    pointer: Versioned | None = None
    """The pointer by which they were judged; None if nothing was committed yet."""


async def sweep_orphans(ports: WorkerPorts, state: PartitionSnapshot) -> int:
    """Delete the partition's orphans that are older than the grace period; returns how many.

    Those that the store keeps under a lock that no worker asked for stay, until a later sweep. Runs under the partition's
    lease. Raises, having deleted nothing, as :func:`find_garbage` does.
    """
    now_ms = ports.clock.wall_ms()
    found = await find_garbage(ports, state, ports.settings.grace_ms, now_ms)
    due = [each for each in found.orphans if each.is_due(now_ms)] if now_ms >= ports.bucket.deletes_from_ms else []
    await refuse_earlier_commits(ports.metadata, found.pointer, due)
    try:
        await ports.delete_objects([each.key for each in due])
    except Locked as kept:
        _log.warning("orphans of %s-%d stay: %s", state.topic.name, state.log.index, kept.message)
        return len(due) - len(kept.detail["keys"])
    return len(due)


async def refuse_earlier_commits(metadata: MetadataClient, pointer: Versioned | None, due: Sequence[Garbage]) -> None:
    """Make each commit fail that began before, if one of them may refer to an object that is ``due``.

    Raises ``Conflict`` if the pointer is not as it was when they were judged, ``Unavailable``, ``OutcomeUnknown``: delete
    nothing then.
    """
    if pointer is not None and any(each.reason == ORPHAN for each in due):
        record = pointer.record
        unchanged = VersionIs(key=record.key(), version=pointer.version)
        await metadata.propose(Command(updates=(Put(record=record),), requirements=(unchanged,)))


async def find_garbage(ports: HistoryPorts, state: PartitionSnapshot, grace_ms: int, now_ms: int) -> PartitionGarbage:
    """The partition's objects that are no part of its history, each with the time from which on it may be deleted.

    Where locks are in use at the wall time ``now_ms``, the store is asked for the lock of each object that is due otherwise.

    The store is listed first and the pointer is read after it, linearizably, so that an object that a commit refers to is never
    taken for an orphan. An object that is being written is younger than the grace period.
    Raises ``Forked`` if the store holds committed history that metadata does not know, ``Invalid`` if the manifest requires a
    newer writer, which may refer to objects that this release does not know, and ``Conflict`` if the topic was deleted, if
    another version was committed meanwhile, or if the committed version is not in the store yet: a restore would read the one
    before it, which refers to objects that the committed one has removed.
    """
    topic_id, index = state.log.topic_id, state.log.index
    data: list[ObjectInfo] = []
    for make_prefix in DATA_PREFIXES:
        data += [info async for info in ports.store.list(make_prefix(topic_id, index))]
    manifests = [info async for info in ports.store.list(manifests_prefix(topic_id, index))]
    if not data and not manifests:
        return PartitionGarbage()
    judged = await _current_pointer(ports, state)
    pointer = judged.record if judged is not None and isinstance(judged.record, ManifestPointer) else None
    current = await _manifest_of(ports, state, pointer)
    check_writer(current)
    _require_stored(pointer, state.topic.name)
    key = pointer.object_key if pointer is not None else ""
    fork = find_fork(manifests, {current.version: key}, current.settled_version)
    if fork is not None:
        raise fork_error(fork, state.topic.name, index)
    segments = [entry.key async for entry in ports.source.segments(current)]
    removed = [each async for each in ports.source.removed(current)]
    live = live_keys(current, [*segments, key, marker_key(key)])
    referenced = with_data_keys(live.union(each.key for each in removed))
    found = orphans(data, referenced, grace_ms)
    found += manifest_garbage(manifests, current.version, key, referenced, grace_ms)
    gone = removed_garbage([*data, *manifests], removed, live, grace_ms)
    if any(each.is_due(now_ms) for each in (*found, *gone)):
        leases = await leases_in_force(ports.store, now_ms)
        # A command beside the workers releases its lease after its commit, which may have been since the pointer was read.
        if await _current_pointer(ports, state) != judged:
            raise Conflict(f"the manifest of {state.topic.name}-{index} has changed while its objects were listed")
        found = kept_by_leases(found, leases, topic_id, grace_ms)
        gone = kept_by_leases(gone, leases, topic_id, grace_ms)
    policy = tier_policy(configs_in_force(state.topic, topic_defaults(ports.metadata.view)))
    if policy.lock_mode is None and current.lock_until_ms <= now_ms:
        return PartitionGarbage(orphans=tuple(found), removed=tuple(gone), pointer=judged)
    written_ms = {info.key: info.last_modified_ms for info in (*data, *manifests)}
    found = kept_by_policy(found, written_ms, policy.lock_ms if policy.lock_mode is not None else 0)
    return PartitionGarbage(
        orphans=tuple(await _kept_by_locks(ports.locks, found, now_ms)),
        removed=tuple(await _kept_by_locks(ports.locks, gone, now_ms)),
        pointer=judged,
    )


async def _kept_by_locks(locks: KnownLocks, garbage: Sequence[Garbage], now_ms: int) -> list[Garbage]:
    """``garbage``, what is due and locked being due when its lock ends."""

    async def kept(each: Garbage) -> Garbage:
        return replace(each, due_ms=max(each.due_ms, await locks.until_ms(each.key))) if each.is_due(now_ms) else each

    return await bounded_map(kept, garbage, _QUESTIONS_AT_ONCE)


async def _current_pointer(ports: HistoryPorts, state: PartitionSnapshot) -> Versioned | None:
    """The pointer as it is now. Raises ``Conflict`` if the topic was deleted: its objects are not orphans."""
    keys = [manifest_pointer_key(state.log.topic_id, state.log.index), topic_key(state.topic.name)]
    pointer, found = await ports.metadata.read(keys)
    topic = found.record if found is not None else None
    if not isinstance(topic, Topic) or topic.topic_id != state.topic.topic_id:
        raise Conflict(f"topic {state.topic.name!r} was deleted while its objects were listed")
    return pointer


def _require_stored(pointer: ManifestPointer | None, name: str) -> None:
    if pointer is not None and pointer.content:
        raise Conflict(
            f"version {pointer.manifest_version} of the manifest of {name}-{pointer.index} is committed and not in the store"
            " yet: a tiering worker stores it"
        )


async def _manifest_of(ports: HistoryPorts, state: PartitionSnapshot, pointer: ManifestPointer | None) -> Manifest:
    if pointer is None:
        return empty_manifest(state.topic.topic_id, state.topic.name, state.log.index, 0)
    return await committed_manifest(ports, state, pointer)
