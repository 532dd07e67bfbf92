"""Merges small neighbouring segments into one, for fewer objects, larger reads and a smaller manifest.

Ledgers that were sealed early (a change of owner, an idle partition, a request) make small segments. Merging is tiered:
``FAN_IN`` segments that were never merged become one, and ``FAN_IN`` of those become another, which is not merged again. So a
record is written at most three times, including its offload. Blocks are read, verified and written as one segment, which is
verified before the manifest's next version replaces the old segments by it. The old objects stay for the grace period. The
merged segment is compressed, encrypted and stored as the topic asks for now, however its sources were; it is locked until the
latest date of theirs.

Retention drops whole segments by their newest record. A merged segment therefore spans no more time and is no larger than
:func:`merge_limits` allows, and a merge never renews a timestamp that retention uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from stratalog_tiering.cold.manifest_source import ManifestSource
from stratalog_tiering.cold.whole_objects import has_own_object, read_whole
from stratalog_tiering.core.commands import Guards, commit_segment
from stratalog_tiering.core.locks import merged_lock
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.core.retention import newest_ms, oldest_ms
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import AbortedTransaction, BlockEntry
from stratalog_tiering.format.manifest import SegmentEntry, SegmentKind, SegmentOptions, segment_entry
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.format.object_keys import segment_key
from stratalog_tiering.format.segment import SegmentFooter, SegmentWriter, audit_block, iterate_block_batches
from stratalog_tiering.maintenance.joined_segments import joined_epochs, joined_identity, source_of
from stratalog_tiering.offload.commit import commit_edit, previous_version, refuse_fork_before_commit
from stratalog_tiering.offload.data_keys import new_encryption
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.upload import StreamedUpload, finishing
from stratalog_tiering.offload.verification import BY_CHECKSUM, verify_new

FAN_IN: Final = 16
"""Neighbours that become one segment. A segment of at least this fraction of the target size is not merged."""
MERGES_MAX: Final = 2
READ_WHOLE_BYTES_MAX: Final = 256 * 1024
"""A source of at most this size is read with one request, and is in memory until the merged segment is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLimits:
    """Limits of a merged segment: object size, and time between its oldest and newest record (None: unlimited)."""

    segment_bytes: int
    span_ms: int | None = None


def merge_limits(policy: TierPolicy, segment_bytes: int) -> MergeLimits:
    """The limits under a retention policy: a merged segment holds at most an eighth of what retention keeps."""
    return MergeLimits(segment_bytes=policy.segment_bytes_max(segment_bytes), span_ms=policy.segment_span_ms)


def mergeable_run(segments: Sequence[SegmentEntry], limits: MergeLimits) -> tuple[SegmentEntry, ...]:
    """The first run to merge, empty if there is none.

    It holds ``FAN_IN`` segments with the same merge count, and any between them with a lower one.
    """
    for merges in range(MERGES_MAX):
        for first in range(len(segments)):
            run = _run_from(segments[first:], merges, limits)
            if run:
                return run
    return ()


def _run_from(segments: Sequence[SegmentEntry], merges: int, limits: MergeLimits) -> tuple[SegmentEntry, ...]:
    """The shortest run that begins with the first segment; empty if a limit ends it too early."""
    total_bytes = equals = 0
    oldest, newest = oldest_ms(segments[0]), newest_ms(segments[0])
    for position, entry in enumerate(segments):
        total_bytes += entry.stored_bytes
        oldest, newest = min(oldest, oldest_ms(entry)), max(newest, newest_ms(entry))
        is_small = entry.stored_bytes * FAN_IN <= limits.segment_bytes and entry.merge_count <= merges
        if (
            entry.is_compacted or entry.is_erased
        ):  # Compaction merges by itself; a merged segment has no place for erased leaves.
            return ()
        is_in_span = limits.span_ms is None or newest - oldest <= limits.span_ms
        if not (is_small and is_in_span and total_bytes <= limits.segment_bytes):
            return ()
        equals += entry.merge_count == merges
        if equals == FAN_IN:
            return tuple(segments[: position + 1])
    return ()


async def merge_small(ports: WorkerPorts, state: PartitionSnapshot, policy: TierPolicy, guards: Guards) -> bool:
    """Merge one run, if there is one; True if a merged segment was committed.

    Raises ``Corrupt`` if a segment is damaged, ``Forked``, ``Unavailable``, ``OutcomeUnknown``; the old segments stay then.
    """
    previous = await previous_version(ports, state)
    run = mergeable_run(previous.manifest.segments, merge_limits(policy, ports.settings.segment_bytes))
    if not run:
        return False
    # Both before an upload that could not be committed.
    edit = ManifestEdit(previous, writer=ports.settings.worker_id, random_id=ports.random_id)
    await refuse_fork_before_commit(ports, state)
    entry, crc32c = await _write_merged(ports, state, run, policy)
    await verify_new(ports, entry, crc32c)
    edit.replace(entry)
    if not await commit_edit(ports, state, edit, lambda now, pointer: commit_segment(now, pointer, (), guards), [entry.key]):
        return False
    ports.counters.segments_merged += len(run)
    return True


async def _write_merged(
    ports: WorkerPorts, state: PartitionSnapshot, run: Sequence[SegmentEntry], policy: TierPolicy
) -> tuple[SegmentEntry, str]:
    """The merged segment, and the checksum of what was sent, if it is to be verified by it."""
    small = [entry for entry in run if has_own_object(entry) and entry.object_bytes <= READ_WHOLE_BYTES_MAX]
    store = await read_whole(ports.store, small)
    sources = ManifestSource(store, background=ports.background)
    footers = [await sources.footer(entry) for entry in run]
    key = segment_key(
        state.log.topic_id, state.log.index, run[0].base_offset, run[-1].leader_epochs[-1].epoch, ports.random_id()
    )  # fmt: skip
    encryption = await new_encryption(ports.store, state.log.topic_id, state.log.index, key, policy.encryption_key)
    writer = SegmentWriter(
        joined_identity(ports.cluster_id, footers), ports.settings.block_bytes, policy.zstd_level, encryption
    )
    lock = merged_lock(run, ports.clock.wall_ms())
    upload = StreamedUpload(
        ports.store, key, part_bytes=ports.settings.upload_part_bytes, parts_at_once=ports.settings.upload_parts_at_once,
        storage_class=policy.storage_class, lock=lock, wants_checksum=ports.settings.verify == BY_CHECKSUM,
    )  # fmt: skip
    async with finishing(upload):
        for entry, footer in zip(run, footers, strict=True):
            cipher = await ports.source.cipher(footer)
            for block in footer.blocks:
                content = await store.get_range(entry.key, entry.data_position + block.position, block.length)
                await ports.reading.take(len(content))
                await ports.background.run(partial(_append_block, writer, content, block, cipher))
                await upload.write(writer.take_parts())
        finish = partial(
            writer.finish, created_at_ms=max(footer.created_at_ms for footer in footers), leader_epochs=joined_epochs(footers),
            aborted_transactions=_aborted(footers), producers=await sources.producers(run[-1]),
        )  # fmt: skip
        written = await ports.background.run(finish)
        await upload.write(writer.take_parts())
    merged = msgspec.structs.replace(
        segment_entry(key, written, SegmentKind.MERGED),
        options=SegmentOptions(storage_class=policy.storage_class),
        merge_count=1 + max(entry.merge_count for entry in run),
        sources=tuple(source_of(entry) for entry in run),
    )
    return await locked_entry(ports.store, merged, lock), upload.crc32c


def _append_block(writer: SegmentWriter, stored: memoryview, block: BlockEntry, cipher: BlockCipher | None) -> None:
    for batch, header in iterate_block_batches(audit_block(stored, block, cipher=cipher)):
        writer.append(batch, header)


def _aborted(footers: Sequence[SegmentFooter]) -> list[AbortedTransaction]:
    """Each aborted transaction once, although every segment that it overlaps lists it."""
    found = {aborted for footer in footers for aborted in footer.aborted_transactions}
    return sorted(found, key=lambda aborted: (aborted.last_offset, aborted.producer_id))
