"""Commits a manifest version: the one place where cold history changes.

The order is: refuse a forked history, store the pages and lists, set the pointer in metadata by compare-and-set, store the
manifest (``offload/version_objects.py``). The compare-and-set is the commit; the object store never decides it. Until the
manifest is in the store, the pointer contains it. ``propose_guarded`` says what each answer of metadata allows: nothing is
deleted unless the commit certainly had no effect.

A version object is written only after its commit is certain, so it is committed. After an unknown outcome nothing is deleted.
This module does not decide what a new version contains (``format/manifest_edit.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence, Set
from dataclasses import replace
from typing import Final, Protocol, TypeVar
from uuid import UUID

from stratalog_core.errors import Conflict, Corrupt, NoSuchObject, OutcomeUnknown, StratalogError
from stratalog_metadata.client.guarded_updates import propose_guarded
from stratalog_metadata.records import Log, ManifestPointer, log_key, manifest_pointer_key
from stratalog_metadata.state.commands import ABSENT, Command
from stratalog_metadata.state.guarded_update import Superseded
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.forks import find_fork, fork_error
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.format.manifest import Manifest, decode_manifest, empty_manifest, pointer_to
from stratalog_tiering.format.manifest_edit import ManifestEdit, NewManifest, Previous
from stratalog_tiering.format.object_keys import manifests_prefix, parse_manifest_key, version_key
from stratalog_tiering.offload.ownership import COMMITS_SHARE_S
from stratalog_tiering.offload.ports import HistoryPorts, WorkerPorts
from stratalog_tiering.offload.version_objects import ensure_in_store
from stratalog_tiering.store import ObjectInfo, ObjectStore

COMMIT_TIMEOUT_S: Final = 30.0
ATTEMPTS_MAX: Final = 8
"""Proposals of one manifest version: an owner that opens ledgers changes the log meanwhile."""
RENEWAL_SHARE: Final = 0.1
"""Share of the grace period after which a refused version is not proposed again: the objects that it removes are in use until
its commit, and their grace period counts from its creation."""
_log = logging.getLogger(__name__)


class _PartRef(Protocol):
    """A reference to a page, a list of removed objects or a tree page."""

    @property
    def key(self) -> str: ...


_Ref = TypeVar("_Ref", bound=_PartRef)
_Part = TypeVar("_Part")


async def previous_version(ports: WorkerPorts, state: PartitionSnapshot) -> Previous:
    """The version that the next edit starts from: the committed one, or an empty manifest. Raises as `committed_manifest`."""
    pointer = state.pointer
    if pointer is None:
        topic = state.topic
        return Previous(manifest=empty_manifest(topic.topic_id, topic.name, state.log.index, state.cold_end, ports.cluster_id))
    manifest = await committed_manifest(ports, state, pointer)
    return Previous(manifest=manifest, key=pointer.object_key, sha256=bytes.fromhex(pointer.sha256))


async def committed_manifest(ports: HistoryPorts, state: PartitionSnapshot, pointer: ManifestPointer) -> Manifest:
    """The manifest that ``pointer`` names.

    Raises ``Forked`` if it is missing because metadata was restored from an old copy, else ``Corrupt`` or ``Unavailable``.
    """
    try:
        return await ports.source.manifest(pointer)
    except Corrupt:
        await refuse_fork(ports, state)
        raise


async def refuse_fork(ports: HistoryPorts, state: PartitionSnapshot) -> None:
    """Raise ``Forked`` if the store's newest commit markers are not those of metadata, ``Conflict`` if ``state`` is outdated.

    One listing, newest version first, that ends at metadata's version.
    """
    pointer = state.pointer
    version, key = (pointer.manifest_version, pointer.object_key) if pointer is not None else (0, "")
    fork = find_fork(await versions_from(ports.store, state.log.topic_id, state.log.index, version), {version: key})
    if fork is None:
        return
    (found,) = await ports.metadata.read([manifest_pointer_key(state.log.topic_id, state.log.index)])
    if (found.version if found is not None else ABSENT) != state.pointer_version:
        raise Conflict(f"the manifest of {state.topic.name}-{state.log.index} has changed since this step was planned")
    raise fork_error(fork, state.topic.name, state.log.index)


async def versions_from(store: ObjectStore, topic_id: UUID, index: int, version: int) -> list[ObjectInfo]:
    """The manifests and commit markers of ``version`` and of those after it, newest first, by one listing."""
    newest: list[ObjectInfo] = []
    async for info in store.list(manifests_prefix(topic_id, index)):
        parsed = parse_manifest_key(info.key)
        if parsed is not None and parsed.version < version:
            break
        newest.append(info)
    return newest


async def refuse_fork_before_commit(ports: WorkerPorts, state: PartitionSnapshot) -> None:
    """As :func:`refuse_fork`, without a request if this worker has found the version to be the store's newest one lately.

    Whatever was committed since begins with the next version, whose key follows from its number, and nothing of it is deleted
    for a grace period. So its object is found when this worker stores its own: exactly one of them can be created.
    """
    pointer = state.pointer
    if pointer is not None and ports.commits.was_newest(pointer):
        return
    began_at_s = ports.clock.monotonic()
    await refuse_fork(ports, state)
    if pointer is not None:
        ports.commits.found_newest(pointer, began_at_s)


async def refuse_fork_before_deletion(ports: WorkerPorts, state: PartitionSnapshot) -> None:
    """As :func:`refuse_fork`, by one HEAD of the next version if this worker has found its own to be the newest one lately."""
    pointer = state.pointer
    if pointer is not None and ports.commits.was_newest(pointer):
        try:
            await ports.store.head(version_key(pointer.topic_id, pointer.index, pointer.manifest_version + 1))
        except NoSuchObject:
            return
        ports.commits.forget(pointer)
    await refuse_fork_before_commit(ports, state)


async def commit_edit(
    ports: WorkerPorts,
    state: PartitionSnapshot,
    edit: ManifestEdit,
    command: Callable[[PartitionSnapshot, ManifestPointer], Command],
    own_keys: Sequence[str] = (),
) -> bool:
    """Store the version that ``edit`` makes and commit it with ``command``; returns and raises as :func:`commit_manifest`.

    ``command`` is called again with the current log if the log has changed since ``state`` and the version is not old.
    ``own_keys`` are objects that were written for this commit only. Raises, having stored nothing, ``Forked`` if history has
    forked and ``Invalid`` if another cluster has taken the bucket over.
    """
    await ports.bucket.confirm(COMMITS_SHARE_S)
    await refuse_fork_before_commit(ports, state)
    if state.pointer is not None:
        # Whatever happens, the next step that asks does not rely on it; a commit notes its own version anew.
        ports.commits.forget(state.pointer)
    edit.move_to_pages(await readable(edit.pages_to_merge(), ports.source.page))
    lists = await mergeable(edit.lists_to_merge, ports.source.removed_list)
    tree_pages = await mergeable(edit.tree_pages_to_merge, ports.source.tree_page)
    new = edit.finish(created_at_ms=ports.clock.wall_ms(), lists=lists, tree_pages=tree_pages)
    pointer = await prepare_version(ports, new)
    written = [*own_keys, *(key for key, _ in new.parts)]

    async def again() -> Command | None:
        if ports.clock.wall_ms() - new.manifest.created_at_ms > RENEWAL_SHARE * ports.settings.grace_ms:
            return None
        current = await _with_current_log(ports, state)
        return command(current, pointer) if current is not None else None

    return await commit_manifest(ports, pointer, command(state, pointer), written, again)


async def mergeable(choose: Callable[[Set[str]], Sequence[_Ref]], load: Callable[[_Ref], Awaitable[_Part]]) -> dict[str, _Part]:
    """The first parts of a manifest that ``choose`` lets merge and that can all be read. The damaged ones stay as they are."""
    damaged: set[str] = set()
    while True:
        refs = choose(damaged)
        loaded = await readable(refs, load)
        if len(loaded) == len(refs):
            return loaded
        damaged.update(ref.key for ref in refs if ref.key not in loaded)


async def readable(refs: Sequence[_Ref], load: Callable[[_Ref], Awaitable[_Part]]) -> dict[str, _Part]:
    """The parts of a manifest that are not damaged, by key."""
    loaded: dict[str, _Part] = {}
    for ref in refs:
        try:
            loaded[ref.key] = await load(ref)
        except Corrupt as damaged:
            _log.warning("a part of a manifest stays unmerged: %s", damaged.message)
    return loaded


async def _with_current_log(ports: WorkerPorts, state: PartitionSnapshot) -> PartitionSnapshot | None:
    """``state`` with the log as it is now; None if it has not changed or is gone. Raises ``Unavailable``."""
    (found,) = await ports.metadata.read([log_key(state.log.topic_id, state.log.index)])
    if found is None or found.version == state.log_version or not isinstance(found.record, Log):
        return None
    return replace(state, log=found.record, log_version=found.version)


async def prepare_version(ports: WorkerPorts, new: NewManifest) -> ManifestPointer:
    """Store pages and lists; returns the pointer to commit, which contains the manifest."""
    for key, content in new.parts:
        await ports.store.put(key, [content], lock=new.lock)
    key = version_key(new.manifest.topic_id, new.manifest.partition, new.manifest.version)
    ports.source.remember(key, new.sha256, decode_manifest(new.content, new.sha256))
    return pointer_to(new.manifest, key, new.sha256, new.content)


async def store_manifest(store: ObjectStore, source: ManifestSource, new: NewManifest) -> ManifestPointer:
    """Store pages, lists and manifest, and read the manifest back; returns the pointer to commit, then to mark.

    For history that is made without a worker: a topic that is attached, a bucket that is restored. Raises ``Conflict`` if a key
    exists: keys are fresh.
    """
    for key, content in new.parts:
        await store.put(key, [content], lock=new.lock)
    await store.put(new.key, [new.content], lock=new.lock)
    source.remember(new.key, new.sha256, decode_manifest(await store.get(new.key), new.sha256))
    return pointer_to(new.manifest, new.key, new.sha256)


async def commit_manifest(
    ports: WorkerPorts,
    pointer: ManifestPointer,
    command: Command,
    own_keys: list[str],
    again: Callable[[], Awaitable[Command | None]] | None = None,
) -> bool:
    """Commit ``pointer``, whose pages and lists are stored, with ``command``, and store its manifest. True if it was committed.

    ``again`` returns the command to propose after a refusal, None or the refused one if the refusal is final. False: it was
    certainly not committed, and ``own_keys`` were deleted unless they are locked. Raises ``OutcomeUnknown``, ``Unavailable`` or
    ``Fenced``, having deleted nothing: another worker may have committed a version that refers to the same objects.
    """
    name = f"manifest version {pointer.manifest_version} of {pointer.key()}"
    for attempt in range(1, ATTEMPTS_MAX + 1):
        try:
            await propose_guarded(ports.metadata, command, pointer.key(), COMMIT_TIMEOUT_S)
            break
        except (Superseded, Conflict) as lost:
            if isinstance(lost, Superseded) and not lost.is_certain:
                raise OutcomeUnknown(f"{name} may have been committed before another worker changed the pointer") from lost
            # After a Conflict the pointer is as required, and the refused command can never take effect.
            renewed = None
            if again is not None and isinstance(lost, Conflict) and attempt < ATTEMPTS_MAX:
                renewed = await again()
            if renewed is None or renewed == command:
                _log.info("%s lost a race with another commit: %s", name, lost)
                # Locked objects are left to the sweep of orphans, which waits for the end of their locks.
                if pointer.lock_until_ms <= ports.clock.wall_ms():
                    await ports.delete_objects(own_keys)
                return False
            command = renewed
    ports.commits.committed(pointer)
    try:
        await ensure_in_store(ports, pointer)
    except StratalogError as failure:
        # The version is committed. The partition's next step stores it, before it drops any hot copy.
        _log.warning("%s is committed, but is not known to be in the store: %s", name, failure)
    return True
