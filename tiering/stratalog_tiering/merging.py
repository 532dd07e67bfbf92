"""Merges small neighbouring segments into one: fewer objects, larger reads, a smaller manifest.

Ledgers that were sealed early (a change of owner, an idle partition, a request) make small segments. When enough of them stand
side by side at the new end of the manifest, their blocks are read, checked, and written as one segment, which is verified like
any other before the manifest's next version puts it in their place. The old objects stay for the grace period.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from stratalog_core.checkpoint import EpochStart
from stratalog_tiering.commands import Guards, commit_segment
from stratalog_tiering.committing import commit_manifest, own_objects, previous_version
from stratalog_tiering.entry import segment_entry
from stratalog_tiering.footer import AbortedTransaction
from stratalog_tiering.manifest import REMOVED_MAX, Manifest, SegmentEntry
from stratalog_tiering.manifest_edit import ManifestEdit
from stratalog_tiering.object_keys import segment_key
from stratalog_tiering.offload_job import EPOCHS_MAX
from stratalog_tiering.planning import PartitionState
from stratalog_tiering.ports import WorkerPorts
from stratalog_tiering.publish import store_manifest
from stratalog_tiering.segment import SegmentFooter, SegmentIdentity, SegmentWriter, audit_block, iterate_block_batches
from stratalog_tiering.segment_check import require_sound
from stratalog_tiering.upload import StreamedUpload, abort_quietly

RUN_MIN: Final = 8
SMALL_FRACTION: Final = 8
"""A segment is small below this fraction of the wanted size, and a merged one may still be merged again."""


def mergeable_run(manifest: Manifest, segment_bytes: int) -> tuple[SegmentEntry, ...]:
    """The first run of at least ``RUN_MIN`` small inline segments, as long as one segment may be; empty if there is none."""
    if len(manifest.removed) + len(manifest.segments) > REMOVED_MAX:
        return ()
    run: list[SegmentEntry] = []
    for entry in manifest.segments:
        small = entry.object_bytes * SMALL_FRACTION <= segment_bytes
        fits = sum(kept.object_bytes for kept in run) + entry.object_bytes <= segment_bytes
        if small and fits:
            run.append(entry)
        elif len(run) >= RUN_MIN:
            break
        else:
            run = [entry] if small else []
    return tuple(run) if len(run) >= RUN_MIN else ()


async def merge_small(ports: WorkerPorts, state: PartitionState, guards: Guards) -> bool:
    """Merge one run, if there is one. Whether a merged segment was committed. Raises ``Corrupt``, ``OutcomeUnknown`` …"""
    previous = await previous_version(ports, state)
    run = mergeable_run(previous.manifest, ports.settings.segment_bytes)
    if not run:
        return False
    entry = await _write_merged(ports, state, run)
    await require_sound(ports.store, ports.source, entry, ports.background, reads_at_once=ports.settings.verify_reads_at_once)
    edit = ManifestEdit(previous, random_id=ports.random_id)
    edit.replace(entry, ports.clock.wall_ms())
    new = edit.finish(created_at_ms=ports.clock.wall_ms(), writer=ports.settings.worker_id)
    pointer = await store_manifest(ports.store, new)
    command = commit_segment(state, pointer, (), guards)
    return await commit_manifest(ports, state, pointer, command, [entry.key, *own_objects(new)])


async def _write_merged(ports: WorkerPorts, state: PartitionState, run: Sequence[SegmentEntry]) -> SegmentEntry:
    footers = [await ports.source.footer(entry) for entry in run]
    writer = SegmentWriter(_identity(footers), ports.settings.block_bytes)
    key = segment_key(
        state.log.topic_id, state.log.index, run[0].base_offset, run[-1].leader_epochs[-1].epoch, ports.random_id()
    )  # fmt: skip
    upload = StreamedUpload(
        ports.store, key, part_bytes=ports.settings.upload_part_bytes, parts_at_once=ports.settings.upload_parts_at_once
    )
    try:
        for entry, footer in zip(run, footers, strict=True):
            for block in footer.blocks:
                content = await ports.store.get_range(entry.key, block.position, block.length)
                await ports.reading.take(len(content))
                audit_block(content, block)
                for batch, header in iterate_block_batches(content):
                    writer.append(batch, header)
                await upload.write(writer.take_parts())
        footer = writer.finish(
            created_at_ms=ports.clock.wall_ms(), leader_epochs=_epochs(footers),
            aborted_transactions=_aborted(footers), producers=footers[-1].producers,
        )  # fmt: skip
        parts = writer.take_parts()
        await upload.write(parts)
        await upload.finish()
    except BaseException:
        await abort_quietly(upload)
        raise
    return segment_entry(key, footer, parts[-1], writer.leader_epochs)


def _identity(footers: Sequence[SegmentFooter]) -> SegmentIdentity:
    first = footers[0]
    ledger_ids = tuple(ledger_id for footer in footers for ledger_id in footer.ledger_ids)
    return SegmentIdentity(
        topic_id=first.topic_id, topic_name=footers[-1].topic_name, partition=first.partition, base_offset=first.base_offset,
        ledger_ids=ledger_ids,
    )  # fmt: skip


def _epochs(footers: Sequence[SegmentFooter]) -> list[EpochStart]:
    """All that any of them knows, each epoch from where it was first seen to begin."""
    starts: dict[int, int] = {}
    for footer in footers:
        for start in footer.leader_epochs:
            starts.setdefault(start.epoch, start.start_offset)
    return [EpochStart(epoch, offset) for epoch, offset in sorted(starts.items())][-EPOCHS_MAX:]


def _aborted(footers: Sequence[SegmentFooter]) -> list[AbortedTransaction]:
    """Each transaction once, although every segment that it overlaps lists it."""
    found = {aborted for footer in footers for aborted in footer.aborted_transactions}
    return sorted(found, key=lambda aborted: (aborted.last_offset, aborted.producer_id))
