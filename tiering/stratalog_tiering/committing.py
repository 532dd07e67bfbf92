"""Stores a manifest version and commits it; cleans up exactly what a definite loser left."""

from __future__ import annotations

import logging

from stratalog_core.errors import Fenced, OutcomeUnknown, StratalogError
from stratalog_metadata.commands import Command
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.commit import ManifestCommit, Next
from stratalog_tiering.manifest import empty_manifest
from stratalog_tiering.manifest_edit import NewManifest, Previous
from stratalog_tiering.planning import PartitionState
from stratalog_tiering.ports import WorkerPorts
from stratalog_tiering.publish import mark_committed

_log = logging.getLogger(__name__)


async def previous_version(ports: WorkerPorts, state: PartitionState) -> Previous:
    """What the next edit starts from."""
    pointer = state.pointer
    if pointer is None:
        topic = state.topic
        return Previous(manifest=empty_manifest(topic.topic_id, topic.name, state.log.index, state.cold_end))
    manifest = await ports.source.manifest(pointer)
    return Previous(manifest=manifest, key=pointer.object_key, sha256=bytes.fromhex(pointer.sha256))


async def commit_manifest(
    ports: WorkerPorts, state: PartitionState, pointer: ManifestPointer, command: Command, own_keys: list[str]
) -> bool:
    """Whether ``pointer``, whose objects are stored, was committed by ``command``; then it is marked, too.

    False: it definitely was not, and ``own_keys`` were deleted. Raises ``OutcomeUnknown`` or ``Fenced``, having deleted
    nothing.
    """
    core = ManifestCommit(pointer.object_key, state.pointer_version)
    step, failure = await _propose(ports, core, command)
    while step in (Next.PROPOSE, Next.READ_POINTER):
        if step is Next.PROPOSE:
            step, failure = await _propose(ports, core, command)
        else:
            step = await _read_pointer(ports, core, pointer.key())
    if step is Next.COMMITTED:
        await _mark(ports, pointer)
        return True
    if step is Next.LOST:
        _log.info("manifest version %d of %s lost its race; its objects go", pointer.manifest_version, pointer.key())
        await ports.delete_objects(own_keys)
        return False
    if isinstance(failure, Fenced):
        raise failure
    raise OutcomeUnknown(f"whether manifest version {pointer.manifest_version} of {pointer.key()} was committed is not known")


def own_objects(new: NewManifest) -> list[str]:
    """What storing ``new`` wrote."""
    return [new.key, *(key for key, _ in new.pages)]


async def _mark(ports: WorkerPorts, pointer: ManifestPointer) -> None:
    try:
        await mark_committed(ports.store, pointer)
    except StratalogError as failure:
        # The commit stands all the same. Whoever next works on the partition writes the marker, and before any hot copy goes.
        _log.warning(
            "manifest version %d of %s is committed, its marker is not: %s", pointer.manifest_version, pointer.key(), failure
        )


async def _propose(ports: WorkerPorts, core: ManifestCommit, command: Command) -> tuple[Next, StratalogError | None]:
    try:
        await ports.metadata.propose(command)
    except StratalogError as failure:
        return core.proposed(failure), failure
    return core.proposed(None), None


async def _read_pointer(ports: WorkerPorts, core: ManifestCommit, key: str) -> Next:
    try:
        (found,) = await ports.metadata.read([key])
    except StratalogError:
        return core.pointer_not_read()
    return core.pointer_read(found)
