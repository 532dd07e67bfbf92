"""Moves sealed ledgers to the object store: read, upload, read back and verify, commit; later drop the hot copy.

A hot copy is dropped only while the committed manifest covers it and the cold copy still verifies. Decides nothing itself:
``core/planning.py`` chooses the ledgers, ``core/offload_job.py`` makes the segment, ``commit.py`` commits it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from stratalog_core.errors import Corrupt, StratalogError
from stratalog_core.object_lock import ObjectLock
from stratalog_metadata.records import ManifestPointer, TierStatus, tier_status_key
from stratalog_metadata.state.commands import ABSENT, VersionIs
from stratalog_tiering.cold.segment_check import check_presence
from stratalog_tiering.core.commands import Guards, commit_segment, drop_ledgers
from stratalog_tiering.core.damage import may_be_damaged
from stratalog_tiering.core.locks import new_lock
from stratalog_tiering.core.offload_job import OffloadJob, offloaded_key
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, is_cold
from stratalog_tiering.core.planning import Offload
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.manifest import Manifest, Reason, SegmentEntry
from stratalog_tiering.format.manifest_edit import ManifestEdit, Removal
from stratalog_tiering.offload.commit import (
    commit_edit,
    committed_manifest,
    previous_version,
    refuse_fork_before_commit,
    refuse_fork_before_deletion,
)
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.upload import StreamedUpload, finishing
from stratalog_tiering.offload.verification import BY_CHECKSUM, verify_new

_log = logging.getLogger(__name__)


async def offload(ports: WorkerPorts, state: PartitionSnapshot, step: Offload, guards: Guards, policy: TierPolicy) -> bool:
    """Make one segment of a step's ledgers and commit it. False: another command changed the partition first; plan again.

    Raises ``Undecided`` (a transaction is open; nothing was committed), ``Corrupt`` (a ledger or the uploaded copy is damaged;
    nothing was committed), ``OutcomeUnknown``, ``Unavailable``.
    """
    began_at_s = ports.clock.monotonic()
    await refuse_fork_before_commit(ports, state)  # before an upload that could not be committed
    # Before the upload, because it refuses a manifest that requires a newer writer.
    edit = ManifestEdit(await previous_version(ports, state), writer=ports.settings.worker_id, random_id=ports.random_id)
    await ports.topics.ensure(state.topic, state.topic_version)
    ledgers = step.ledgers
    sealed, following = [stored.ledger for stored in ledgers], [stored.ledger for stored in step.following]
    key = offloaded_key(state.topic, sealed, ports.random_id())
    encryption = await new_encryption(ports.store, state.topic.topic_id, state.log.index, key, policy.encryption_key)
    job = OffloadJob(
        ports.cluster_id, state.topic, sealed, following, key=key, block_bytes=ports.settings.block_bytes,
        zstd_level=policy.zstd_level, encryption=encryption,
    )  # fmt: skip
    lock = new_lock(policy, ports.clock.wall_ms())
    crc32c = await upload_job(ports, job, policy.storage_class, lock)
    entry = await locked_entry(ports.store, job.entry(policy.storage_class), lock)
    await verify_new(ports, entry, crc32c)
    await _skip_expired(ports, edit, entry.base_offset)
    await ports.background.run(lambda: edit.append(entry, job.written.leaves))
    if not await commit_edit(
        ports, state, edit, lambda now, pointer: commit_segment(now, pointer, ledgers, guards), [entry.key]
    ):
        return False
    ports.counters.segments_offloaded += 1
    ports.counters.offloaded_bytes += sum(stored.ledger.payload_bytes for stored in ledgers)
    ports.counters.offload_seconds.observe(ports.clock.monotonic() - began_at_s)
    return True


async def _skip_expired(ports: WorkerPorts, edit: ManifestEdit, offset: int) -> None:
    """Let history continue at ``offset`` if retention has removed everything before it, hot ledgers included."""
    if edit.end_offset < offset:
        below = edit.end_offset
        removal = Removal(reason=Reason.LOG_START, policy=f"log start {offset}")
        edit.drop_below(below, lambda _: removal, await ports.source.pages(edit.pages_for_drop(below)))
        edit.restart_at(offset)


async def upload_job(
    ports: WorkerPorts, job: OffloadJob, storage_class: str, lock: ObjectLock | None, created_at_ms: int | None = None
) -> str:
    """Read the ledgers of ``job`` and upload its segment, which says that it was made at ``created_at_ms`` (None: now).

    Returns the checksum of what was sent, if the segment is to be verified by it.
    """
    settings = ports.settings
    upload = StreamedUpload(
        ports.store, job.key, part_bytes=settings.upload_part_bytes, parts_at_once=settings.upload_parts_at_once,
        storage_class=storage_class, lock=lock, wants_checksum=settings.verify == BY_CHECKSUM,
    )  # fmt: skip
    async with finishing(upload):
        while (wanted := job.next_read) is not None:
            entries = await ports.ledgers.read(wanted.ledger, wanted.first, wanted.last, settings.read_chunk_bytes)
            await ports.background.run(lambda entries=entries: job.add_entries(entries))  # type: ignore[misc]
            await ports.reading.take(sum(len(entry.payload) for entry in entries))
            await upload.write(job.take_parts())
        made_at_ms = ports.clock.wall_ms() if created_at_ms is None else created_at_ms
        await upload.write(await ports.background.run(lambda: job.finish(made_at_ms)))
    return upload.crc32c


async def drop_hot(ports: WorkerPorts, state: PartitionSnapshot, ledgers: Sequence[StoredLedger], guards: Guards) -> None:
    """Drop the hot copies of ``ledgers``, after checking size, footer and data key of their cold copies.

    The records are not checked, so none is dropped while the scrub knows of damage that the hot copy may repair, or when it
    has just found some.

    A newer version is not looked for if this worker committed the newest one that metadata knows, and has held the partition
    since: the version's key was free, so whatever was committed meanwhile continues from it and refers to its cold copies.
    Raises ``Corrupt`` if a cold copy is damaged or history has forked (the hot copies stay), ``Conflict`` (plan again),
    ``OutcomeUnknown``.
    """
    pointer = state.pointer
    assert pointer is not None, "only ledgers that a committed manifest covers are dropped"
    if not ports.commits.is_own_newest(pointer):
        await refuse_fork_before_deletion(ports, state)
    manifest, checked_to = await ports.source.manifest(pointer), pointer.start_offset
    damaged, is_all = _known_damage(ports, pointer)
    for stored in ledgers:
        # One segment may hold several of the ledgers.
        base_offset = max(stored.ledger.base_offset, checked_to)
        checked_to = await _check_cold_copy(ports, manifest, base_offset, stored.ledger.end_offset, damaged)
    await drop(ports, state, ledgers, (*guards, *is_all))


def _known_damage(ports: WorkerPorts, pointer: ManifestPointer) -> tuple[Sequence[str], Guards]:
    """Keys of damage that the continuous scrub has not repaired yet, as in the status, and guards against more of it.

    Without a scrub nobody corrects the status.
    """
    if not ports.settings.scrub_interval_ms:
        return (), ()
    view, key = ports.metadata.view, tier_status_key(pointer.topic_id, pointer.index)
    status, found = view.find(TierStatus, key), view.get(key)
    unchanged = VersionIs(key=key, version=found.version if found is not None else ABSENT)
    return status.unrepaired if status is not None else (), (unchanged,)


async def _check_cold_copy(ports: WorkerPorts, manifest: Manifest, offset: int, end_offset: int, damaged: Sequence[str]) -> int:
    """Check the segments from ``offset`` to ``end_offset`` or beyond; returns the end of the last one."""
    while offset < end_offset:
        entry = await ports.source.segment_at(manifest, offset)
        if entry is None:
            raise Corrupt(f"version {manifest.version} of the manifest does not cover offset {offset}: the hot copy stays")
        if may_be_damaged(entry.key, damaged):
            problem = "is damaged" if entry.key in damaged else "may be one of the partition's many objects that are damaged"
            raise Corrupt(f"{entry.key} {problem}, and not repaired yet: the hot copy stays", key=entry.key)
        footer, _ = await check_presence(ports.store, ports.source, entry)
        await ports.source.check_data_key(footer)
        offset = entry.end_offset
    return offset


async def drop(
    ports: WorkerPorts,
    state: PartitionSnapshot,
    ledgers: Sequence[StoredLedger],
    guards: Guards,
    log_start_offset: int | None = None,
) -> None:
    """Remove ledgers from metadata (:func:`drop_ledgers`), then tell the bookies."""
    await ports.metadata.propose(drop_ledgers(state, ledgers, guards, log_start_offset))
    ports.counters.ledgers_dropped += len(ledgers)
    try:
        await ports.ledgers.delete([stored.ledger.ledger_id for stored in ledgers])
    except StratalogError as failure:
        _log.info("bookies were not notified of deleted ledgers and will find them by themselves: %s", failure)


async def cold_since(ports: WorkerPorts, state: PartitionSnapshot) -> Mapping[int, int]:
    """Wall time (ms) at which each cold ledger's segment was made, by ledger id; 0 if retention has removed the segment.

    Ledgers from a damaged page on are left out.
    """
    if state.pointer is None or not any(is_cold(state, stored.ledger) for stored in state.ledgers):
        return {}
    manifest = await committed_manifest(ports, state, state.pointer)
    since: dict[int, int] = {}
    for ledger in (stored.ledger for stored in state.ledgers if is_cold(state, stored.ledger)):
        try:
            entry = await ports.source.segment_at(manifest, ledger.end_offset - 1)
        except Corrupt as damaged:
            _log.warning("hot copies from offset %d on stay: %s", ledger.base_offset, damaged.message)
            break
        since[ledger.ledger_id] = _covered_since_ms(entry, manifest, ports.settings.grace_ms) if entry is not None else 0
    return since


def _covered_since_ms(entry: SegmentEntry, manifest: Manifest, grace_ms: int) -> int:
    """A fork that was resolved later may have replaced the offloaded copy by another one."""
    is_settled_later = entry.created_at_ms < manifest.settled_at_ms
    return manifest.settled_at_ms + grace_ms if is_settled_later else entry.created_at_ms
