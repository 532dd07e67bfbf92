"""Carries out an operator's decision on which line of a forked history to keep. See ADR 87.

The next manifest version continues the kept line and is newer than any version in the store. Every object that it does not
refer to becomes a removed object with the current time, so nothing is deleted before one grace period has passed. A decision
that cannot be carried out is marked as refused, with the reason, and the fork stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from stratalog_core.bounded_map import bounded_map
from stratalog_core.errors import Conflict, Corrupt, Invalid, NoSuchObject
from stratalog_metadata.records import (
    NO_OWNER,
    ForkDecision,
    Log,
    ManifestPointer,
    Partition,
    ledger_key,
    manifest_pointer_key,
    partition_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Delete, Put, Update, VersionIs
from stratalog_tiering.cold.archive import read_marker
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.core.commands import Guards, ledgers_unchanged, pointer_unchanged
from stratalog_tiering.core.forks import Fork, find_fork
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, is_sealed
from stratalog_tiering.format.locks import manifest_lock
from stratalog_tiering.format.manifest import Manifest, Reason, RemovedObject
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.format.object_keys import (
    is_marker,
    manifests_prefix,
    marker_key,
    parse_manifest_key,
    partition_prefixes,
    with_data_keys,
)
from stratalog_tiering.offload.commit import commit_manifest, mergeable, prepare_version, previous_version
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.store import ObjectStore

_log = logging.getLogger(__name__)
_HEADS_AT_ONCE: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A fork with the newest manifest of each line; ``metadata`` is None if metadata or the store has none of its line."""

    fork: Fork
    metadata: Manifest | None
    store: Previous


async def read_lines(store: ObjectStore, prefix: str, pointer: ManifestPointer | None) -> Lines | None:
    """The fork of the partition whose manifests are below ``prefix``; None if there is none. ``pointer`` is metadata's.

    Raises ``Corrupt`` if the manifest of the store's line is missing or damaged, ``Unavailable``.
    """
    source = ManifestSource(store)
    listed = [info async for info in store.list(prefix)]
    newest = await _newest(source, pointer) if pointer is not None else None
    known = {pointer.manifest_version: pointer.object_key} if pointer is not None else {0: ""}
    settled_version = newest.settled_version if newest is not None else 0
    manifest, fork = newest, find_fork(listed, known, settled_version)
    # Of two markers of one earlier version, metadata's is the one that its chain of manifests leads to.
    while fork is not None and manifest is not None and min(known) > fork.store_version and manifest.previous_key:
        known[_version(manifest.previous_key)] = manifest.previous_key
        manifest = await _manifest(source, manifest.previous_key, manifest.previous_sha256)
        fork = find_fork(listed, known, settled_version)
    if fork is None:
        return None
    marker = await read_marker(store, marker_key(fork.store_key))
    sha256 = bytes.fromhex(marker.sha256)
    kept = Previous(manifest=await source.manifest_at(fork.store_key, sha256), key=fork.store_key, sha256=sha256)
    return Lines(fork=fork, metadata=newest, store=kept)


def _version(key: str) -> int:
    parsed = parse_manifest_key(key)
    return parsed.version if parsed is not None else 0


async def _newest(source: ManifestSource, pointer: ManifestPointer) -> Manifest | None:
    """The manifest of metadata's line; None if it is missing or damaged. It may not be in the store yet."""
    if pointer.content:
        return await source.manifest(pointer)
    return await _manifest(source, pointer.object_key, bytes.fromhex(pointer.sha256))


async def _manifest(source: ManifestSource, key: str, sha256: bytes) -> Manifest | None:
    try:
        return await source.manifest_at(key, sha256)
    except Corrupt as damaged:
        _log.warning("%s", damaged)
        return None


async def resolve_fork(ports: WorkerPorts, state: PartitionSnapshot, guards: Guards) -> bool:
    """Carry out the partition's pending decision; True if a manifest was committed.

    A decision that is impossible is refused: the reason is written into its record, and the fork stays. Raises ``Conflict`` if
    the manifest has changed, ``Corrupt``, ``Unavailable``, ``OutcomeUnknown``, and ``Refused`` by the store.
    """
    decision = state.pending_decision
    assert decision is not None, "a decision is pending"
    lines = await read_lines(ports.store, manifests_prefix(state.log.topic_id, state.log.index), state.pointer)
    (found,) = await ports.metadata.read([manifest_pointer_key(state.log.topic_id, state.log.index)])
    if (found.version if found is not None else ABSENT) != state.pointer_version:
        raise Conflict("the manifest has changed since the decision was read")
    try:
        return await _resolve(ports, state, decision, lines, guards)
    except Invalid as impossible:
        refused: ForkDecision = msgspec.structs.replace(decision, refused=impossible.message)
        await ports.metadata.propose(Command(updates=(Put(record=refused),), requirements=(*guards, _decided(state))))
        return False


async def _resolve(
    ports: WorkerPorts, state: PartitionSnapshot, decision: ForkDecision, lines: Lines | None, guards: Guards
) -> bool:
    name = f"{state.topic.name}-{state.log.index}"
    if lines is None or (lines.fork.metadata_key, lines.fork.store_key) != (decision.metadata_key, decision.store_key):
        raise Invalid(f"the fork of {name} has changed since the decision: inspect it and decide again")
    if decision.keeps_store:
        kept, command = lines.store, await _keep_store(ports, state, decision, lines.store.manifest)
    elif lines.metadata is None and state.pointer is not None:
        raise Invalid(f"metadata's manifest {state.pointer.object_key} is no longer in the store: decide with --keep store")
    else:
        kept, command = await previous_version(ports, state), Command(updates=())
    now_ms = ports.clock.wall_ms()
    edit = ManifestEdit(kept, writer=ports.settings.worker_id, random_id=ports.random_id)
    edit.settle_fork(lines.fork.newest_version, await _others(ports, state, kept.manifest, decision, now_ms), now_ms)
    for line in (lines.metadata, lines.store.manifest):
        edit.keep_as_long_as(manifest_lock(line) if line is not None else None)
    tree_pages = await mergeable(edit.tree_pages_to_merge, ports.source.tree_page)
    new = edit.finish(created_at_ms=now_ms, tree_pages=tree_pages)
    pointer = await prepare_version(ports, new)
    unchanged = (_decided(state), pointer_unchanged(state), *command.requirements)
    updates = (Put(record=pointer), Delete(key=decision.key()), *command.updates)
    command = Command(updates=updates, requirements=(*guards, *unchanged))
    _log.warning("the fork of %s is resolved: keeping %s, version %d", name, decision.keep, kept.manifest.version)
    return await commit_manifest(ports, pointer, command, [key for key, _ in new.parts])


async def _others(
    ports: WorkerPorts, state: PartitionSnapshot, kept: Manifest, decision: ForkDecision, now_ms: int
) -> list[RemovedObject]:
    """All objects of the partition that the kept line does not refer to, markers after their manifests.

    Raises ``Invalid`` if the store lacks objects of the kept line, because the other line has removed them since.
    """
    prefixes = partition_prefixes(state.log.topic_id, state.log.index)
    sizes = {info.key: info.size_bytes for prefix in prefixes async for info in ports.store.list(prefix)}
    live = {entry.key: entry.object_bytes async for entry in ports.source.segments(kept)}
    live.update((ref.key, ref.object_bytes) for ref in kept.pages)
    live.update((ref.key, ref.object_bytes) for ref in kept.tree.pages)
    # A listing may lag behind the last writes.
    unlisted = [key for key, size in live.items() if sizes.get(key) != size]
    found = await bounded_map(partial(_size_of, ports.store), unlisted, _HEADS_AT_ONCE)
    missing = [key for key, size in zip(unlisted, found, strict=True) if size != live[key]]
    if missing:
        raise Invalid(f"the store lacks {len(missing)} objects of this history, first {missing[0]}: keep the other one")
    referenced = with_data_keys(live)
    others = [
        RemovedObject(
            key=key,
            object_bytes=size,
            reason=Reason.FORK,
            removed_at_ms=now_ms,
            policy=f"keep {decision.keep}",
            actor=ports.settings.worker_id,
        )
        for key, size in sizes.items()
        if key not in referenced
    ]
    return sorted(others, key=lambda other: is_marker(other.key))


async def _size_of(store: ObjectStore, key: str) -> int:
    """The size of an object; -1 if there is none."""
    try:
        return (await store.head(key)).size_bytes
    except NoSuchObject:
        return -1


async def _keep_store(ports: WorkerPorts, state: PartitionSnapshot, decision: ForkDecision, kept: Manifest) -> Command:
    """The rest of the commit: drops ledgers that do not continue the line, and forces a takeover of the partition."""
    contained = await _ledgers_of(ports, kept, min((ref.base_offset for ref in state.log.ledgers), default=kept.end_offset))
    key = partition_key(state.log.topic_id, state.log.index)
    (found,) = await ports.metadata.read([key])
    partition = found.record if found is not None and isinstance(found.record, Partition) else None
    epoch = partition.leader_epoch if partition is not None else 0
    ledgers = dropped_ledgers(state, kept.end_offset, contained, epoch, discard_hot=decision.discard_hot)
    dropped = {stored.ledger.ledger_id for stored in ledgers}
    log: Log = msgspec.structs.replace(
        state.log,
        ledgers=tuple(ref for ref in state.log.ledgers if ref.ledger_id not in dropped),
        log_start_offset=max(state.log.log_start_offset, kept.start_offset),
    )
    updates: list[Update] = [Put(record=log), *(Delete(key=ledger_key(ledger_id)) for ledger_id in sorted(dropped))]
    if found is None or partition is None:
        return Command(updates=tuple(updates), requirements=ledgers_unchanged(state))
    # The owner has the end of the other line in memory, so a new epoch must take the partition over.
    taken: Partition = msgspec.structs.replace(
        partition,
        owner=NO_OWNER,
        owner_session=0,
        next_owner=NO_OWNER,
        handed=b"",
        leader_epoch=epoch + 1,
    )
    unchanged = VersionIs(key=key, version=found.version)
    return Command(updates=(*updates, Put(record=taken)), requirements=(unchanged, *ledgers_unchanged(state)))


async def _ledgers_of(ports: WorkerPorts, manifest: Manifest, from_offset: int) -> set[int]:
    """Ids of the ledgers from which the segments beyond ``from_offset`` were made."""
    ledger_ids: set[int] = set()
    async for entry in ports.source.segments(manifest):
        if entry.end_offset > from_offset:
            ledger_ids.update((await ports.source.footer(entry)).ledger_ids)
    return ledger_ids


def dropped_ledgers(
    state: PartitionSnapshot, end_offset: int, contained: Set[int], leader_epoch: int, *, discard_hot: bool
) -> tuple[StoredLedger, ...]:
    """Ledgers to drop from the log when the kept line ends at ``end_offset`` and was made of the ledgers ``contained``.

    These are ledgers without records, and ledgers of the line itself if the log would not end where the line does: it may end
    before, or with entries that were never confirmed, which the line's recovery of a ledger did not find and a later one did.
    Raises ``Invalid`` if other ledgers do not continue the line, unless ``discard_hot`` allows to drop them. Then all must be
    sealed that are of ``leader_epoch``, the present owner's. Bookies may have deleted earlier ones, so that nobody can seal
    them.
    """
    empty = [stored for stored in state.ledgers if is_sealed(stored.ledger) and _is_empty(stored)]
    held = [stored for stored in state.ledgers if stored not in empty]
    below = [stored for stored in held if stored.ledger.base_offset < end_offset]
    above = [stored for stored in held if stored.ledger.base_offset >= end_offset]
    if all(stored.ledger.ledger_id in contained for stored in below):
        others = []
        empty += below if below and below[-1].ledger.end_offset != end_offset else []
    else:
        others = below
    if above and above[0].ledger.base_offset != end_offset:
        others = [*others, *above]
    if others and not discard_hot:
        raise Invalid(
            f"ledgers {_ids(others)} hold records that do not continue the store's history, which ends at offset {end_offset}:"
            " they were written after metadata was restored. Read them with `stratalog ledger read`, then decide with"
            " --discard-hot"
        )
    if not all(is_sealed(stored.ledger) or stored.ledger.leader_epoch < leader_epoch for stored in others):
        raise Invalid(
            f"ledgers {_ids(others)} do not continue the store's history, and one is open: stop its producers, seal it"
            " with `stratalog tier offload`, and decide again"
        )
    return (*empty, *others)


def _is_empty(stored: StoredLedger) -> bool:
    return stored.ledger.end_offset == stored.ledger.base_offset


def _ids(ledgers: Sequence[StoredLedger]) -> str:
    return ", ".join(str(stored.ledger.ledger_id) for stored in ledgers)


def _decided(state: PartitionSnapshot) -> VersionIs:
    assert state.fork_decision is not None
    return VersionIs(key=state.fork_decision.key(), version=state.fork_decision_version)
