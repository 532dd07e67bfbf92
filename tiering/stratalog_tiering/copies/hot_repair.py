"""Writes a damaged segment again from the ledgers that it was made of, while the bookies still have them.

The ledgers make a new segment under a new key. It is read back and verified, and its batches must be the leaves that the
partition's tree has had since the damaged segment was committed, so no other records can take their place. Then a manifest
version replaces the segment. The damaged object stays for the grace period, as every removed object does.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from stratalog_core.errors import Conflict, Corrupt, NotFound
from stratalog_core.object_lock import in_force
from stratalog_tiering.cold.lease import HeldLease
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.core.commands import Guards, commit_segment
from stratalog_tiering.core.offload_job import OffloadJob, offloaded_key
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, is_sealed
from stratalog_tiering.core.planning import following_ledgers
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.locks import entry_lock
from stratalog_tiering.format.manifest import Manifest, Reason, SegmentEntry
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.format.merkle import split_hashes
from stratalog_tiering.format.partition_tree import TreeProofs
from stratalog_tiering.offload.beside_workers import current_partition, unswept
from stratalog_tiering.offload.commit import commit_edit, previous_version, refuse_fork
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.offloading import upload_job
from stratalog_tiering.offload.ports import WorkerPorts


class HotLedgers:
    """The hot copies that a cluster's bookies have, for a command beside running workers (``offload/beside_workers.py``)."""

    def __init__(self, ports: WorkerPorts) -> None:
        self._ports = ports

    async def rewrite(self, topic_id: UUID, partition: int, key: str) -> str:
        """Replace the segment at ``key``; returns the new one's key. Raises as `repair_from_hot`."""
        now = await current_partition(self._ports, topic_id, partition)
        async with unswept(self._ports, topic_id, "the repair") as lease:
            return (await repair_from_hot(self._ports, now.state, key, now.policy, now.guards, lease)).key


async def repair_from_hot(
    ports: WorkerPorts, state: PartitionSnapshot, key: str, policy: TierPolicy, guards: Guards, lease: HeldLease
) -> SegmentEntry:
    """Replace the segment at ``key`` by one made of its hot copy; returns the new segment's entry.

    Raises ``NotFound`` if the manifest has no such segment or the bookies no longer have all of its ledgers, ``Conflict`` if
    the partition has changed (repeat the scrub), ``Corrupt`` if the ledgers do not hold the committed batches,
    ``LeaseExpired``, ``OutcomeUnknown``, ``Unavailable``. The damaged segment stays in the history then.
    """
    previous = await previous_version(ports, state)
    edit = ManifestEdit(previous, writer=ports.settings.worker_id, random_id=ports.random_id)
    damaged = await _segment_at(ports, previous.manifest, key)
    ledgers = covering_ledgers(state.ledgers, damaged)
    await refuse_fork(ports, state)
    entry, leaves = await _write_again(ports, state, ledgers, damaged, policy)
    await require_sound(
        ports.store, ports.source, entry, ports.background,
        reads_at_once=ports.settings.verify_reads_at_once, take=ports.verifying.take,
    )  # fmt: skip
    proofs = TreeProofs(previous.manifest.tree, await ports.source.tree_pages(previous.manifest.tree.pages))
    await ports.background.run(lambda: proofs.check(damaged.first_leaf, list(split_hashes(leaves))))
    edit.replace(entry, await ports.source.pages(edit.pages_for_replace(damaged.base_offset)), Reason.REPAIRED)
    lease.check()
    if not await commit_edit(ports, state, edit, lambda now, pointer: commit_segment(now, pointer, (), guards), [entry.key]):
        raise Conflict(f"{state.topic.name}-{state.log.index} has changed during the repair of {key}: repeat it")
    return entry


async def _segment_at(ports: WorkerPorts, manifest: Manifest, key: str) -> SegmentEntry:
    async for entry in ports.source.segments(manifest):
        if entry.key == key:
            return entry
    raise NotFound(f"the committed manifest has no segment {key}")


def covering_ledgers(ledgers: Sequence[StoredLedger], entry: SegmentEntry) -> tuple[StoredLedger, ...]:
    """The sealed ledgers that hold exactly the offsets of a segment. Raises ``NotFound`` if they are not all there."""
    found = [
        stored
        for stored in ledgers
        if is_sealed(stored.ledger)
        and stored.ledger.end_offset > max(stored.ledger.base_offset, entry.base_offset)
        and stored.ledger.base_offset < entry.end_offset
    ]
    ends = [entry.base_offset, *(stored.ledger.end_offset for stored in found)]
    bases = [*(stored.ledger.base_offset for stored in found), entry.end_offset]
    if not found or ends != bases:
        raise NotFound(
            f"the bookies do not hold offsets {entry.base_offset}..{entry.end_offset - 1} of segment {entry.key} any more"
        )
    return tuple(found)


async def _write_again(
    ports: WorkerPorts,
    state: PartitionSnapshot,
    ledgers: Sequence[StoredLedger],
    damaged: SegmentEntry,
    policy: TierPolicy,
) -> tuple[SegmentEntry, bytes]:
    """Upload the segment; returns its entry and the leaves of its batches. Retention sees the same times as before."""
    sealed = [stored.ledger for stored in ledgers]
    following = [stored.ledger for stored in following_ledgers(state, sealed[-1])]
    key = offloaded_key(state.topic, sealed, ports.random_id())
    encryption = await new_encryption(ports.store, state.topic.topic_id, state.log.index, key, policy.encryption_key)
    job = OffloadJob(
        ports.cluster_id, state.topic, sealed, following, key=key, block_bytes=ports.settings.block_bytes,
        zstd_level=policy.zstd_level, encryption=encryption,
    )  # fmt: skip
    lock = in_force(entry_lock(damaged), ports.clock.wall_ms())
    await upload_job(ports, job, policy.storage_class, lock, damaged.created_at_ms)
    made = await locked_entry(ports.store, job.entry(policy.storage_class), lock)
    counts = (made.base_offset, made.end_offset, made.record_count, made.leaf_count)
    committed = (damaged.base_offset, damaged.end_offset, damaged.record_count, damaged.leaf_count)
    if counts != committed:
        problem = f"the ledgers of segment {damaged.key} hold {counts}, its manifest entry says {committed}"
        raise Corrupt(problem, key=damaged.key)
    entry = msgspec.structs.replace(
        made, kind=damaged.kind, merge_count=damaged.merge_count, sources=damaged.sources, first_leaf=damaged.first_leaf
    )
    return entry, job.written.leaves
