"""Stores the manifest of a committed version, which metadata contains until then.

A version object is written only after its commit, and never replaced: its presence says that the version is committed, to
readers without metadata. It is written, read back, and then removed from the pointer, in this order, so the manifest is always
somewhere whole. No hot copy is dropped while the manifest that covers it is in metadata alone (``core/commands.py``).
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from stratalog_core.errors import Conflict, Corrupt
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import ManifestPointer
from stratalog_metadata.state.commands import Command, Put, VersionIs
from stratalog_metadata.state.guarded_update import Superseded
from stratalog_tiering.core.locks import pointer_lock
from stratalog_tiering.format.manifest import decode_manifest
from stratalog_tiering.format.object_keys import is_version_object, manifest_key
from stratalog_tiering.offload.ownership import COMMITS_SHARE_S
from stratalog_tiering.offload.ports import WorkerPorts

_TIMEOUT_S: Final = 30.0


async def ensure_in_store(ports: WorkerPorts, pointer: ManifestPointer) -> None:
    """Make the committed version ``pointer`` readable without metadata: store its manifest, and its marker if it has one.

    Does nothing if this is known to be done. Raises ``Conflict`` if the pointer has changed, ``Invalid`` if another cluster has
    taken the bucket over, ``Corrupt`` if the store returns other bytes than were written, ``Unavailable``, ``OutcomeUnknown``;
    call it again.
    """
    if pointer.content:
        await _store(ports, pointer)
    if not is_version_object(pointer.object_key) and not ports.commits.is_marked(pointer):
        await ports.bucket.confirm(COMMITS_SHARE_S)  # a marker in another cluster's bucket would be a fork of its history
        await ports.commits.ensure_marked(pointer)


async def _store(ports: WorkerPorts, pointer: ManifestPointer) -> None:
    # The commit may have waited for metadata, and the bucket may have been taken over since the look before it.
    await ports.bucket.confirm(COMMITS_SHARE_S)
    # If the key exists, what is there may be ours, after a lost answer or a change of workers.
    with contextlib.suppress(Conflict):
        await ports.store.put(pointer.object_key, [pointer.content], lock=pointer_lock(pointer, ports.clock.wall_ms()))
    found = await ports.store.get(pointer.object_key)
    if found == pointer.content:
        await _update(ports, pointer, msgspec.structs.replace(pointer, content=b""))
        return
    try:
        other = decode_manifest(found)
    except Corrupt as damaged:
        raise Corrupt(f"{pointer.object_key} is not what was written: {damaged.message}", key=pointer.object_key) from damaged
    # Another history has this version, which was not in the store before the commit. Ours gets a key of its own, so that the
    # next step finds two versions of one number: a fork.
    key = manifest_key(pointer.topic_id, pointer.index, pointer.manifest_version, ports.random_id())
    await _update(ports, pointer, msgspec.structs.replace(pointer, object_key=key))
    raise Conflict(f"{pointer.object_key} is of another history, written by {other.writer}")


async def _update(ports: WorkerPorts, pointer: ManifestPointer, changed: ManifestPointer) -> None:
    """Replace the pointer, if it is still ``pointer``. Raises ``Conflict`` if it is not."""
    (found,) = await ports.metadata.read([pointer.key()])
    if found is None or found.record != pointer:
        raise Conflict(f"{pointer.key()} has changed since its version was stored")
    command = Command(updates=(Put(record=changed),), requirements=(VersionIs(key=pointer.key(), version=found.version),))
    try:
        await propose_guarded(ports.metadata, command, pointer.key(), _TIMEOUT_S)
    except Superseded as lost:
        raise Conflict(lost.message) from lost
