"""Stores a manifest version and commits it, unless history has forked; deletes exactly what a definite loser left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from stratalog_core.errors import Conflict, Corrupt, Fenced, OutcomeUnknown, StratalogError
from stratalog_metadata.records import ManifestPointer, manifest_pointer_key
from stratalog_metadata.state.commands import ABSENT, Command
from stratalog_tiering.core.commit_protocol import ManifestCommit, Next
from stratalog_tiering.core.forks import find_fork, fork_error
from stratalog_tiering.core.planning import PartitionState
from stratalog_tiering.format.manifest import Manifest, empty_manifest
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.format.object_keys import manifests_prefix, parse_manifest_key
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.publish import mark_committed, store_manifest
from stratalog_tiering.store import ObjectInfo

_log = logging.getLogger(__name__)


async def previous_version(ports: WorkerPorts, state: PartitionState) -> Previous:
    """What the next edit starts from."""
    pointer = state.pointer
    if pointer is None:
        topic = state.topic
        return Previous(manifest=empty_manifest(topic.topic_id, topic.name, state.log.index, state.cold_end))
    manifest = await committed_manifest(ports, state, pointer)
    return Previous(manifest=manifest, key=pointer.object_key, sha256=bytes.fromhex(pointer.sha256))


async def committed_manifest(ports: WorkerPorts, state: PartitionState, pointer: ManifestPointer) -> Manifest:
    """The manifest that ``pointer`` names. Raises ``Forked`` if it is not in the store because metadata went back."""
    try:
        return await ports.source.manifest(pointer)
    except Corrupt:
        await refuse_fork(ports, state)
        raise


async def refuse_fork(ports: WorkerPorts, state: PartitionState) -> None:
    """Raise ``Forked`` if the newest markers in the store are not metadata's; ``Conflict`` if ``state`` is outdated.

    One listing, which begins with the newest version and is not read further than to metadata's.
    """
    pointer = state.pointer
    version, key = (pointer.manifest_version, pointer.object_key) if pointer is not None else (0, "")
    newest: list[ObjectInfo] = []
    async for info in ports.store.list(manifests_prefix(state.log.topic_id, state.log.index)):
        parsed = parse_manifest_key(info.key)
        if parsed is not None and parsed.version < version:
            break
        newest.append(info)
    fork = find_fork(newest, {version: key})
    if fork is None:
        return
    (found,) = await ports.metadata.read([manifest_pointer_key(state.log.topic_id, state.log.index)])
    if (found.version if found is not None else ABSENT) != state.pointer_version:
        raise Conflict(f"the manifest of {state.topic.name}-{state.log.index} has changed since the work was planned")
    raise fork_error(fork, state.topic.name, state.log.index)


async def commit_edit(
    ports: WorkerPorts,
    state: PartitionState,
    edit: ManifestEdit,
    command: Callable[[ManifestPointer], Command],
    own_keys: Sequence[str] = (),
) -> bool:
    """Store the version that ``edit`` ends in and commit it by ``command``; see :func:`commit_manifest`.

    ``own_keys`` were written for this commit alone. Raises ``Forked``, having stored nothing, if history has forked.
    """
    await refuse_fork(ports, state)
    edit.seal(ports.clock.wall_ms(), await ports.source.pages(edit.pages_for_sealing()))
    lists = await ports.source.removed_lists(edit.lists_to_merge())
    new = edit.finish(created_at_ms=ports.clock.wall_ms(), writer=ports.settings.worker_id, lists=lists)
    pointer = await store_manifest(ports.store, new)
    written = [*own_keys, new.key, *(key for key, _ in new.parts)]
    return await commit_manifest(ports, state, pointer, command(pointer), written)


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
