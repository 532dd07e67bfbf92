"""Cuts the history of a partition that is restored up to a point: the next manifest version ends there.

The cut is at the last record batch that ends at or before the point and leaves no transaction open, also none that began in an
earlier segment (``open_transactions.py``); so it may be some segments before the point. The segment in which it is is written
again up to it; a compacted segment is left out whole. Nothing is deleted: all that is left out becomes a removed object, which
stays for the grace period, and the earlier versions stay as long. The caller commits the version in metadata and writes its
marker; until then the bucket shows the whole history.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.checkpoint import Checkpoint, OngoingTransaction
from stratalog_core.object_lock import in_force
from stratalog_core.partition_state.replay_state import ReplayState
from stratalog_core.ports import Background, Clock
from stratalog_metadata.records import ManifestPointer
from stratalog_tiering.cold.block_source import ColdReaderSettings
from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.reader import ColdReader
from stratalog_tiering.cold.segment_check import require_sound
from stratalog_tiering.cold.verifier import READS_AT_ONCE
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.format.erased_leaves import restore_leaves
from stratalog_tiering.format.footer import PRODUCERS
from stratalog_tiering.format.locks import entry_lock
from stratalog_tiering.format.manifest import (
    Manifest,
    PageRef,
    Reason,
    RemovedObject,
    SegmentEntry,
    SegmentOptions,
    segment_entry,
)
from stratalog_tiering.format.manifest_cut import CutManifest, cut_manifest, pages_for_cut
from stratalog_tiering.format.manifest_edit import ManifestEdit, Previous
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.partition_tree import TreePageRef
from stratalog_tiering.format.removed_objects import UNFINISHED_MS
from stratalog_tiering.format.segment import SegmentIdentity, SegmentWriter, iterate_block_batches
from stratalog_tiering.maintenance.open_transactions import OpenTransactions, blocks_from, is_restored_between
from stratalog_tiering.offload.commit import mergeable, readable, store_manifest
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.upload import StreamedUpload, finishing
from stratalog_tiering.store import ObjectStore

WRITER = "restore"
_PART_BYTES = 8 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """Keep the records below ``offset``, or those before the first one at ``timestamp_ms`` or later."""

    offset: int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPorts:
    store: ObjectStore
    clock: Clock
    background: Background
    random_id: Callable[[], int]
    cluster_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CutHistory:
    """``pointer`` names the stored version, which is not committed yet. The counts are of records that are left out."""

    pointer: ManifestPointer
    record_count: int
    left_out_records: int
    left_out_end_offset: int


async def point_offset(store: ObjectStore, clock: Clock, pointer: ManifestPointer, point: CutPoint) -> int:
    """The offset of the first record beyond the point; the end of the history if there is none. Raises ``Corrupt``."""
    if point.offset is not None:
        return max(pointer.start_offset, min(point.offset, pointer.end_offset))
    assert point.timestamp_ms is not None, "a point is an offset or a time"
    reader = ColdReader(store, ColdReaderSettings(), clock)
    try:
        found = await reader.offset_for_timestamp(pointer, point.timestamp_ms)
    finally:
        await reader.close()
    return found.offset if found is not None else pointer.end_offset


async def cut_end(ports: CutPorts, pointer: ManifestPointer, offset: int) -> int:
    """Where `cut_history` would end the history; changes nothing. Raises as it does."""
    source = ManifestSource(ports.store, background=ports.background)
    return (await _find_cut(ports, source, await source.manifest(pointer), offset)).end_offset


async def cut_history(ports: CutPorts, pointer: ManifestPointer, offset: int, policy: TierPolicy) -> CutHistory:
    """Store the version of the history that ends at or before ``offset``, which must be below the end of ``pointer``'s.

    Raises ``Corrupt`` if a segment, a page or the tree cannot be read, ``Invalid`` if this release must not edit the manifest.
    """
    source = ManifestSource(ports.store, background=ports.background)
    manifest = await source.manifest(pointer)
    place = await _find_cut(ports, source, manifest, offset)
    base_offset = place.entry.base_offset
    pages = await source.pages(pages_for_cut(manifest, base_offset))
    tree_pages = await source.tree_pages(manifest.tree.pages)
    cut = cut_manifest(manifest, base_offset, pages, tree_pages)
    previous = Previous(manifest=cut.kept, key=pointer.object_key, sha256=bytes.fromhex(pointer.sha256))
    edit = ManifestEdit(previous, writer=WRITER, random_id=ports.random_id)
    kept_records = 0
    if place.end_offset > base_offset:
        kept = await _write_part(ports, source, manifest, place, policy)
        edit.append(*kept)
        kept_records = kept[0].record_count
    edit.settle_cut(_left_out(cut), ports.clock.wall_ms())
    edit.move_to_pages(await readable(edit.pages_to_merge(), source.page))
    lists = await mergeable(edit.lists_to_merge, source.removed_list)
    merged = await mergeable(edit.tree_pages_to_merge, source.tree_page)
    new = edit.finish(created_at_ms=ports.clock.wall_ms(), lists=lists, tree_pages=merged)
    return CutHistory(
        pointer=await store_manifest(ports.store, source, new),
        record_count=new.manifest.record_count,
        left_out_records=cut.record_count - kept_records,
        left_out_end_offset=manifest.end_offset,
    )


def _left_out(cut: CutManifest) -> list[RemovedObject]:
    return [_removed(entry, Reason.CUT) for entry in cut.segments] + [_removed(ref, Reason.SUPERSEDED) for ref in cut.pages]


def _removed(what: SegmentEntry | PageRef | TreePageRef, reason: str) -> RemovedObject:
    return RemovedObject(
        key=what.key, object_bytes=what.object_bytes, reason=reason, removed_at_ms=UNFINISHED_MS,
        policy="restore up to a point", actor=WRITER,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The cut is at ``end_offset``, in ``entry`` or where it begins; ``begin`` is the state there."""

    entry: SegmentEntry
    begin: Checkpoint
    end_offset: int


async def _find_cut(ports: CutPorts, source: ManifestSource, manifest: Manifest, offset: int) -> _Place:
    """The last end of a batch at or below ``offset`` at which no transaction is open; segment by segment back."""
    opened = OpenTransactions(ports.store, source, ports.background, manifest)
    while True:
        entry = await source.segment_at(manifest, offset)
        assert entry is not None, f"offset {offset} is in the history"
        begin = await _state_before(source, entry, opened)
        end = entry.base_offset if begin.transactions == () else None
        if offset > entry.base_offset and not entry.is_compacted:
            end = await _last_end(ports, source, entry, begin, offset) or end
        if end is not None:
            return _Place(entry=entry, begin=begin, end_offset=end)
        offset = entry.base_offset - 1


async def _write_part(
    ports: CutPorts, source: ManifestSource, manifest: Manifest, place: _Place, policy: TierPolicy
) -> tuple[SegmentEntry, bytes]:
    """Write the segment up to the cut; returns its entry and leaves."""
    entry, begin, end = place.entry, place.begin, place.end_offset
    footer = await source.footer(entry)
    key = segment_key(
        manifest.topic_id, manifest.partition, entry.base_offset, entry.leader_epochs[-1].epoch, ports.random_id()
    )
    encryption = await new_encryption(ports.store, manifest.topic_id, manifest.partition, key, policy.encryption_key)
    identity = SegmentIdentity(
        cluster_id=ports.cluster_id, topic_id=footer.topic_id, topic_name=footer.topic_name, partition=footer.partition,
        base_offset=footer.base_offset, ledger_ids=footer.ledger_ids,
    )  # fmt: skip
    writer = SegmentWriter(identity, _BLOCK_BYTES, policy.zstd_level, encryption)
    lock, state = in_force(entry_lock(entry), ports.clock.wall_ms()), ReplayState(entry.base_offset)
    erased, batches = await source.erased_leaves(entry), 0
    state.load(begin)
    upload = StreamedUpload(
        ports.store, key, part_bytes=_PART_BYTES, parts_at_once=2, storage_class=policy.storage_class, lock=lock
    )  # fmt: skip
    async with finishing(upload):
        async for batch, header in _batches(ports, source, entry):
            if header.next_offset > end:
                break
            writer.append(batch, header)
            state.replay(header, batch)
            batches += 1
            await upload.write(writer.take_parts())
        erased = tuple(each for each in erased if each.index < batches)
        finish = partial(
            writer.finish, created_at_ms=footer.created_at_ms, erased=erased,
            leader_epochs=[start for start in footer.leader_epochs if start.start_offset < end],
            aborted_transactions=[each for each in footer.aborted_transactions if each.last_offset < end],
            producers=state.producers.snapshot(),
        )  # fmt: skip
        written = await ports.background.run(finish)
        await upload.write(writer.take_parts())
    made = msgspec.structs.replace(
        segment_entry(key, written, entry.kind), options=SegmentOptions(storage_class=policy.storage_class),
        merge_count=entry.merge_count,
    )  # fmt: skip
    made = await locked_entry(ports.store, made, lock)
    await require_sound(ports.store, source, made, ports.background, reads_at_once=READS_AT_ONCE)
    leaves = bytearray(written.leaves)
    restore_leaves(leaves, erased)
    return made, bytes(leaves)


async def _state_before(source: ManifestSource, entry: SegmentEntry, opened: OpenTransactions) -> Checkpoint:
    """The state where the segment begins."""
    footer, before = await source.footer(entry), await opened.before(entry)
    return Checkpoint(
        offset=entry.base_offset,
        producers=await source.producers(before) if before is not None and footer.section(PRODUCERS) is not None else (),
        transactions=tuple(OngoingTransaction(producer_id, entry.base_offset) for producer_id in await opened.at(entry)),
    )


async def _last_end(ports: CutPorts, source: ManifestSource, entry: SegmentEntry, begin: Checkpoint, offset: int) -> int | None:
    """The end of the last batch at or below ``offset`` after which no transaction is open; None if there is none."""
    state, end, epoch = ReplayState(entry.base_offset), None, entry.leader_epochs[0].epoch
    state.load(begin)
    async for batch, header in _batches(ports, source, entry):
        if is_restored_between(epoch, header.leader_epoch):
            state.transactions.load((), header.base_offset)
            end = header.base_offset
        if header.next_offset > offset:
            break
        epoch = header.leader_epoch
        state.replay(header, batch)
        if not state.transactions.first_offsets:
            end = header.next_offset
    return end


async def _batches(
    ports: CutPorts, source: ManifestSource, entry: SegmentEntry
) -> AsyncIterator[tuple[memoryview, BatchHeader]]:
    """The segment's batches, block by block, each verified."""
    async for _, content in blocks_from(ports.store, source, ports.background, entry, entry.base_offset):
        for found in iterate_block_batches(content):
            yield found
