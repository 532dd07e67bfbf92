"""Replaces a cold segment by one without certain records, for data-protection requests, beside running workers.

The segment is written as compaction writes one (``rewriting.py``), read back and checked. Every batch of which nothing was to
be erased has the leaf that it had, so it is byte-identical. Of every other batch exactly the right records are left, decided a
second time by another decoder. The leaves are those that the partition's tree has had since the offload. Then a manifest
version replaces the segment by compare-and-set. The old object stays for the grace period, as every removed object does.

It needs no partition's lease: a commit requires the manifest and the topic from which it began. A reader's lease keeps the new
segment from being swept before that. After a failure at any step the history is as it was, and what was uploaded is an orphan;
the same request can be made again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from uuid import UUID

import msgspec

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.records import iterate_records
from stratalog_core.errors import Corrupt
from stratalog_tiering.cold.lease import HeldLease
from stratalog_tiering.core.erasure import EraseFilter, Selection, selected_or_unreadable
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.erased_leaves import ErasedLeaf, restore_leaves
from stratalog_tiering.format.footer import BlockEntry
from stratalog_tiering.format.manifest import (
    Manifest,
    PresentBatches,
    Reason,
    SegmentEntry,
    SegmentKind,
    SegmentOptions,
    segment_entry,
)
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.format.merkle import batch_leaf, split_hashes
from stratalog_tiering.format.partition_tree import TreeProofs
from stratalog_tiering.format.segment import audit_block, iterate_block_batches
from stratalog_tiering.maintenance.joined_segments import source_of
from stratalog_tiering.maintenance.rewriting import Rewritten, epochs_in_effect, read_back, stored_blocks, write_filtered
from stratalog_tiering.maintenance.segment_replacements import SegmentKept, commit_replacement, replacements
from stratalog_tiering.offload.beside_workers import CurrentPartition, unswept
from stratalog_tiering.offload.commit import previous_version, refuse_fork
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.ports import WorkerPorts


@dataclass(frozen=True, slots=True, kw_only=True)
class Erased:
    """The erasure of records from one segment: ``entry`` has replaced ``source``. The other batches are byte-identical.

    So are ``unreadable_batches``, which may have records that should go: a client wrote them so that nobody can say.
    """

    source: SegmentEntry
    entry: SegmentEntry
    records: int
    altered_batches: int
    identical_batches: int
    unreadable_batches: int


async def erase_range(
    ports: WorkerPorts, topic_id: UUID, partition: int, offsets: tuple[int, int], selection: Selection
) -> AsyncIterator[Erased | SegmentKept]:
    """Erase the selected records of the segments that hold ``offsets`` (end exclusive), one commit after the other.

    Yields each segment that was replaced, and each that cannot be. A worker's commit in between only makes it look again.
    Raises ``Conflict`` if that happens ``ATTEMPTS_MAX`` times for one segment, and as :func:`erase_segment`.
    """
    async with unswept(ports, topic_id, "the erasure") as lease:

        async def erase(now: CurrentPartition, manifest: Manifest, entry: SegmentEntry) -> Erased | SegmentKept | None:
            if entry.base_offset >= offsets[1]:
                return None
            kept = reason_to_keep(entry, now.state.hot_offset, ports.clock.wall_ms())
            if kept is None:
                return await erase_segment(ports, now, entry, selection, lease)
            return kept if await selected_in(ports, entry, selection) else None

        def next_offset(position: int) -> int | None:
            return max(position, offsets[0]) if position < offsets[1] else None

        found: AsyncIterator[Erased | SegmentKept] = replacements(ports, topic_id, partition, next_offset, erase)
        async for each in found:
            yield each


async def erase_segment(
    ports: WorkerPorts, now: CurrentPartition, source: SegmentEntry, selection: Selection, lease: HeldLease
) -> Erased | None:
    """Replace ``source``, a segment of the committed manifest, by one without the selected records; None if it has none.

    Raises ``Conflict`` if the partition has changed meanwhile, ``Corrupt`` if the segment is damaged or the new one is not what
    it must be, ``LeaseExpired``, ``Unavailable``, ``Forked``; the segment stays in the history then. After ``OutcomeUnknown``
    either may be.
    """
    state, policy = now.state, now.policy
    if not await selected_in(ports, source, selection):
        return None
    previous = await previous_version(ports, state)
    edit = ManifestEdit(previous, writer=ports.settings.worker_id, random_id=ports.random_id)
    await refuse_fork(ports, state)
    known = {each.index: each.leaf for each in await ports.source.erased_leaves(source)}
    rules = EraseFilter(selection=selection, known=known)
    made = await write_filtered(
        ports, state, [source], rules, policy, is_compacted=source.is_compacted, erased=lambda: _leaves_to_keep(rules, source)
    )  # fmt: skip
    entry = _entry(made, source, policy)
    await _require_rest(ports, entry, previous, rules)
    entry = await locked_entry(ports.store, entry, made.lock)
    await commit_replacement(ports, now, edit, entry, Reason.ERASED, lease)
    return Erased(
        source=source, entry=entry, records=rules.records_erased, altered_batches=len(rules.altered),
        identical_batches=len(rules.leaves) - len(rules.altered), unreadable_batches=rules.unreadable_batches,
    )  # fmt: skip


def reason_to_keep(entry: SegmentEntry, hot_offset: int, now_ms: int) -> SegmentKept | None:
    """Why nothing can be erased of a segment at ``now_ms`` (wall time); None if it can."""
    if entry.end_offset > hot_offset:
        return SegmentKept(entry=entry, reason=f"offsets from {max(entry.base_offset, hot_offset)} on still have hot copies")
    if entry.options.lock_until_ms > now_ms:
        return SegmentKept(entry=entry, reason="it is locked", lock_until_ms=entry.options.lock_until_ms)
    if entry.stored_bytes != entry.object_bytes:
        return SegmentKept(entry=entry, reason="its object holds other segments, too, and would stay")
    return None


async def selected_in(ports: WorkerPorts, entry: SegmentEntry, selection: Selection) -> bool:
    """Whether a readable batch of a segment has a selected record; reads up to it. Raises ``Corrupt``, ``Unavailable``."""
    async for count in _counts(ports, entry, selection):
        if count:
            return True
    return False


async def _counts(ports: WorkerPorts, entry: SegmentEntry, selection: Selection) -> AsyncIterator[int]:
    async for content, block, cipher in stored_blocks(ports, entry):
        yield await ports.background.run(partial(_count, content, block, cipher, entry, selection))


def _count(stored: memoryview, block: BlockEntry, cipher: BlockCipher | None, entry: SegmentEntry, selection: Selection) -> int:
    plain = audit_block(stored, block, cipher=cipher, is_compacted=entry.is_compacted)
    found = (selected_or_unreadable(batch, header, selection) for batch, header in iterate_block_batches(plain))
    return sum(records for records in found if not isinstance(records, Corrupt))


def _leaves_to_keep(rules: EraseFilter, source: SegmentEntry) -> tuple[ErasedLeaf, ...]:
    """A compacted segment has lost leaves, so none of it is compared with the tree, and it keeps none."""
    return () if source.is_compacted else tuple(rules.erased_leaves())


def _entry(made: Rewritten, source: SegmentEntry, policy: TierPolicy) -> SegmentEntry:
    entry = segment_entry(made.key, made.segment, SegmentKind.ERASED)
    present = source.options.present
    if present is not None:
        batches = made.segment.footer.batch_count
        present = PresentBatches(base_offset=made.first_batch, end_offset=entry.end_offset, batch_count=batches)
    return msgspec.structs.replace(
        entry,
        options=SegmentOptions(storage_class=policy.storage_class, present=present, dirty_from=source.options.dirty_from),
        first_leaf=source.first_leaf,
        leaf_count=source.leaf_count,
        leader_epochs=epochs_in_effect([source]),
        created_at_ms=source.created_at_ms,
        merge_count=source.merge_count,
        sources=(source_of(source),),
    )


async def _require_rest(ports: WorkerPorts, entry: SegmentEntry, previous: Previous, rules: EraseFilter) -> None:
    """Read the new segment back; raise ``Corrupt`` unless each batch is what it must be, and its leaves those of the tree."""
    index, leaves = 0, bytearray()

    def check(batch: memoryview, header: BatchHeader) -> None:
        nonlocal index
        leaf, rest = batch_leaf(batch), rules.altered.get(index)
        is_right = rules.leaves[index : index + 1] == [leaf] if rest is None else [*iterate_records(batch, header)] == rest
        if not is_right:
            raise Corrupt(f"batch {index} of the erased segment {entry.key} is not what it must be", key=entry.key)
        leaves.extend(leaf)
        index += 1

    await read_back(ports, entry, check)
    if index != len(rules.leaves):
        raise Corrupt(f"the erased segment {entry.key} has {index} batches; expected {len(rules.leaves)}", key=entry.key)
    if not entry.is_compacted:
        tree = previous.manifest.tree
        restore_leaves(leaves, await ports.source.erased_leaves(entry))
        proofs = TreeProofs(tree, await ports.source.tree_pages(tree.pages))
        await ports.background.run(lambda: proofs.check(entry.first_leaf, list(split_hashes(leaves))))
