"""Compacts one partition's cold history, step by step, between the partition's other work.

A pass reads the dirty segments into a map of keys (``core/compaction.py``), one segment a step; then it rewrites the history
from its start up to the map's end, one group of segments a step: read, filter, upload, read back, verify, compare with the
records that must have survived, commit. A segment that would be written again as it is, is left. Groups are committed in offset
order, so the history is correct after each commit, and the part that a pass has not reached stays dirty. A pass lives in
memory: if the worker dies, another one begins a new pass, and the groups that were committed are clean. An upload that was not
committed is an orphan.

One partition of a worker holds a map at a time (``MapSlot``), so ``compaction_map_bytes`` bounds the memory.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from stratalog_core.batches.batch import BatchHeader
from stratalog_core.batches.checkpoint import EpochStart
from stratalog_core.errors import Corrupt
from stratalog_tiering.core.commands import Guards, commit_segment
from stratalog_tiering.core.compaction_plan import Cleanable, cleanable, next_group
from stratalog_tiering.core.partition import PartitionSnapshot
from stratalog_tiering.core.policy import CompactionPolicy, TierPolicy
from stratalog_tiering.format.block_cipher import BlockCipher
from stratalog_tiering.format.footer import BlockEntry
from stratalog_tiering.format.lookup import live_segments
from stratalog_tiering.format.manifest import (
    Manifest,
    PresentBatches,
    Reason,
    SegmentEntry,
    SegmentKind,
    SegmentOptions,
    segment_entry,
)
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.format.segment import audit_block, iterate_block_batches
from stratalog_tiering.maintenance.joined_segments import source_of
from stratalog_tiering.maintenance.rewriting import (
    CheckedRules,
    Rewritten,
    epochs_in_effect,
    read_back,
    stored_blocks,
    write_filtered,
)
from stratalog_tiering.offload.commit import commit_edit, previous_version, refuse_fork_before_commit
from stratalog_tiering.offload.locks import locked_entry
from stratalog_tiering.offload.ports import WorkerPorts

if TYPE_CHECKING:
    from stratalog_tiering.core.compaction import BatchFilter, MapBuilder

KEY_BYTES: Final = 40
"""Memory of one key in the map: an entry of 24 bytes, a quarter of them empty, and a fifth of that again while it grows."""
_SLOT_RETRY_MS: Final = 5_000
_SECRET_BITS: Final = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """The last versions after which records may be missing that superseded others: a fork was resolved, records were erased."""

    settled_version: int
    erased_version: int


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass. ``filter`` is None while the map is being filled; ``position``: everything below it is done.

    ``changes`` are those of the history whose keys the map holds. A history with others is not what was read.
    """

    range: Cleanable
    builder: MapBuilder
    position: int
    filter: BatchFilter | None = None
    now_ms: int
    changes: _Changes


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionState:
    """For the partition's status. Offsets: a pass that is in progress has done what is below ``offset`` of ``end_offset``."""

    phase: str = ""
    offset: int = 0
    end_offset: int = 0


class Compaction:
    """The compaction of one partition, for the length of one session. Steps are not called at once."""

    def __init__(self) -> None:
        self._pass: _Pass | None = None
        self._due_at_ms: int | None = None
        self.is_waiting = False
        """Whether a pass is due and another partition of the worker has the map."""
        self.last_done_ms = 0
        """Wall time at which a pass of this session ended, 0 if none has."""

    @property
    def state(self) -> CompactionState:
        current = self._pass
        if current is None:
            return CompactionState()
        if current.filter is None:
            return CompactionState(phase="map", offset=current.position, end_offset=current.range.end_offset)
        return CompactionState(phase="rewrite", offset=current.position, end_offset=current.builder.end_offset)

    @property
    def is_running(self) -> bool:
        return self._pass is not None

    @property
    def due_at_ms(self) -> int | None:
        """Wall time from which a pass is due, as found by the last step that did nothing; None: when something changes."""
        return self._due_at_ms

    async def step(
        self, ports: WorkerPorts, state: PartitionSnapshot, policy: TierPolicy, guards: Guards, *, is_asked: bool = False
    ) -> bool:
        """Do one step; False if there was nothing to do. ``is_asked``: begin a pass however little is dirty.

        Raises ``Corrupt`` if a segment is damaged or records would be lost, ``Forked``, ``Unavailable``, ``OutcomeUnknown``;
        the pass ends then, and the segments that it has not replaced stay.
        """
        self._due_at_ms, self.is_waiting = None, False
        if policy.compaction is None or state.pointer is None:
            self.end(ports)
            return False
        try:
            if self._pass is not None and self._pass.changes != _changes_of((await previous_version(ports, state)).manifest):
                _log.info(
                    "%s-%d: records were erased, or a fork was resolved, during a compaction, which begins again",
                    state.topic.name, state.log.index,
                )  # fmt: skip
                self.end(ports)
            if self._pass is None:
                return await self._begin(ports, state, policy.compaction, is_asked=is_asked)
            if self._pass.filter is None:
                await self._fill(ports, state, self._pass, policy.compaction)
            else:
                await self._rewrite(ports, state, self._pass, self._pass.filter, policy, guards)
        except BaseException:
            self.end(ports)
            raise
        return True

    def end(self, ports: WorkerPorts) -> None:
        """Give up the pass, if there is one, and its map: another partition of the worker may be waiting for it."""
        self._pass = None
        ports.map_slot.free(self)

    async def _begin(self, ports: WorkerPorts, state: PartitionSnapshot, policy: CompactionPolicy, *, is_asked: bool) -> bool:
        manifest, now_ms = (await previous_version(ports, state)).manifest, ports.clock.wall_ms()
        found = cleanable(await _all_segments(ports, manifest), policy, state.hot_offset, now_ms)
        is_due = found.due_at_ms is not None and found.due_at_ms <= now_ms
        if found.dirty_from == found.end_offset or not (is_due or is_asked):
            self._due_at_ms = found.due_at_ms if found.due_at_ms is not None and not is_due else None
            return False
        if not ports.map_slot.take(self):
            self._due_at_ms, self.is_waiting = now_ms + _SLOT_RETRY_MS, True
            return False
        keys_max = max(1, ports.settings.compaction_map_bytes // KEY_BYTES)
        secret = ports.random.getrandbits(_SECRET_BITS).to_bytes(_SECRET_BITS // 8, "big")
        builder = await ports.background.run(partial(_new_map, keys_max, secret, found.dirty_from))
        self._pass = _Pass(
            range=found, builder=builder, position=found.dirty_from, now_ms=now_ms, changes=_changes_of(manifest)
        )
        return True

    async def _fill(self, ports: WorkerPorts, state: PartitionSnapshot, current: _Pass, policy: CompactionPolicy) -> None:
        """Read one dirty segment into the map; at its end, or the range's, begin to rewrite."""
        manifest, builder = (await previous_version(ports, state)).manifest, current.builder
        entry = await ports.source.segment_at(manifest, max(current.position, manifest.start_offset))
        is_full = False
        if entry is None or entry.base_offset >= current.range.end_offset:
            current.position = current.range.end_offset  # Retention has removed what was left of the range.
        else:
            builder.transactions.add((await ports.source.footer(entry)).aborted_transactions)
            async for content, block, cipher in stored_blocks(ports, entry):
                if not await ports.background.run(partial(_note_keys, builder, content, block, cipher, entry)):
                    is_full = True
                    break
            current.position = entry.end_offset
        if is_full or current.position >= current.range.end_offset:
            if not is_full:
                builder.end_offset = max(builder.end_offset, current.range.end_offset)
            producers = await ports.source.producers(manifest.segments[-1]) if manifest.segments else ()
            current.filter = builder.filter(
                current.now_ms, policy.delete_retention_ms, producers, policy.expiry_header.encode()
            )
            current.position = manifest.start_offset

    async def _rewrite(
        self,
        ports: WorkerPorts,
        state: PartitionSnapshot,
        current: _Pass,
        batch_filter: BatchFilter,
        policy: TierPolicy,
        guards: Guards,
    ) -> None:
        """Replace one group of segments; after the last one, end the pass."""
        previous, end_offset = await previous_version(ports, state), current.builder.end_offset
        group: tuple[SegmentEntry, ...] = ()
        async for listed in _places(ports, previous.manifest):
            group = next_group(
                listed, current.position, end_offset, policy.segment_bytes_max(ports.settings.segment_bytes),
                policy.segment_span_ms,
            )  # fmt: skip
            if group:
                break
        if not group:
            self._done(ports, state, batch_filter)
            return
        unchanged = await _unchanged(ports, group, batch_filter)
        if unchanged is not None:
            current.filter, current.position = unchanged, group[-1].end_offset
            return
        edit = ManifestEdit(previous, writer=ports.settings.worker_id, random_id=ports.random_id)
        await refuse_fork_before_commit(ports, state)
        entry = await write_compacted(ports, state, group, batch_filter, end_offset, policy)
        pages = await ports.source.pages(edit.pages_for_replace(entry.base_offset))
        edit.replace(entry, pages, Reason.COMPACTED)
        if await commit_edit(ports, state, edit, lambda now, pointer: commit_segment(now, pointer, (), guards), [entry.key]):
            counters = ports.counters
            counters.segments_compacted += len(group)
            counters.compaction_read_bytes += sum(each.stored_bytes for each in group)
            counters.compaction_written_bytes += entry.stored_bytes
            current.position = entry.end_offset
        else:
            self.end(ports)

    def _done(self, ports: WorkerPorts, state: PartitionSnapshot, batch_filter: BatchFilter) -> None:
        counts, counters = batch_filter.counts, ports.counters
        counters.compaction_passes += 1
        counters.records_compacted += counts.records_read - counts.records_kept
        counters.tombstones_deleted += counts.tombstones_deleted
        if counts.batches_unreadable:
            counters.batches_not_compacted += counts.batches_unreadable
            _log.warning(
                "%s-%d: compaction left %d batches as they are, whose records cannot be read; the first: %s",
                state.topic.name, state.log.index, counts.batches_unreadable, counts.first_unreadable,
            )  # fmt: skip
        self.last_done_ms = ports.clock.wall_ms()
        self.end(ports)


def _new_map(keys_max: int, secret: bytes, dirty_from: int) -> MapBuilder:
    """For a thread: numba and the kernels are loaded by the first pass of a process, which takes seconds."""
    from stratalog_tiering.core.compaction import MapBuilder
    from stratalog_tiering.core.offset_map import OffsetMap

    return MapBuilder(OffsetMap(keys_max, secret), dirty_from)


def _changes_of(manifest: Manifest) -> _Changes:
    return _Changes(settled_version=manifest.settled_version, erased_version=manifest.erased_version)


async def _all_segments(ports: WorkerPorts, manifest: Manifest) -> list[SegmentEntry]:
    return [entry async for entry in ports.source.segments(manifest)]


async def _places(ports: WorkerPorts, manifest: Manifest) -> AsyncIterator[Sequence[SegmentEntry]]:
    """The live segments of each page, then those of the root."""
    for ref in manifest.pages:
        yield live_segments(manifest, await ports.source.page(ref))
    yield manifest.segments


def _note_keys(
    builder: MapBuilder, stored: memoryview, block: BlockEntry, cipher: BlockCipher | None, entry: SegmentEntry
) -> bool:
    plain = audit_block(stored, block, cipher=cipher, is_compacted=entry.is_compacted)
    return all(builder.add(batch, header) for batch, header in iterate_block_batches(plain))


async def _unchanged(ports: WorkerPorts, group: Sequence[SegmentEntry], batch_filter: BatchFilter) -> BatchFilter | None:
    """The filter after a clean segment in which it changes nothing; None if the group must be written.

    A segment that lists aborted transactions is written: they must leave its footer before their markers go.
    """
    entry = group[0]
    footer = await ports.source.footer(entry)
    is_clean = entry.is_compacted and entry.options.dirty_from is None and not footer.aborted_transactions
    if len(group) > 1 or not is_clean:
        return None
    trial = batch_filter.trial()
    async for content, block, cipher in stored_blocks(ports, entry):
        if not await ports.background.run(partial(_keeps_all, trial, content, block, cipher, entry)):
            return None
    return trial


def _keeps_all(
    batch_filter: BatchFilter, stored: memoryview, block: BlockEntry, cipher: BlockCipher | None, entry: SegmentEntry
) -> bool:
    plain = audit_block(stored, block, cipher=cipher, is_compacted=entry.is_compacted)
    return all(
        batch_filter.filter(batch, header, is_last=header.next_offset == entry.end_offset).batch is batch
        for batch, header in iterate_block_batches(plain)
    )


async def write_compacted(
    ports: WorkerPorts,
    state: PartitionSnapshot,
    group: Sequence[SegmentEntry],
    rules: CheckedRules,
    map_end: int,
    policy: TierPolicy,
) -> SegmentEntry:
    """Upload the segment that replaces ``group``, and verify it; returns its entry.

    Each key occurs once below ``map_end``; the segment is dirty from there on. Raises ``Corrupt``, ``Unavailable``.
    """
    made = await write_filtered(ports, state, group, rules, policy, is_compacted=True)
    entry = _entry(made, group, map_end, policy)
    await _require_survivors(ports, entry, rules, made.fingerprint)
    return await locked_entry(ports.store, entry, made.lock)


def _entry(made: Rewritten, group: Sequence[SegmentEntry], map_end: int, policy: TierPolicy) -> SegmentEntry:
    entry = segment_entry(made.key, made.segment, SegmentKind.COMPACTED)
    batches = made.segment.footer.batch_count
    present = PresentBatches(base_offset=made.first_batch, end_offset=entry.end_offset, batch_count=batches)
    dirty_from = map_end if map_end < entry.end_offset else None
    options = SegmentOptions(storage_class=policy.storage_class, present=present, dirty_from=dirty_from)
    return msgspec.structs.replace(
        entry,
        options=options,
        leaf_count=sum(each.leaf_count for each in group),
        leader_epochs=_epochs_left(made, group),
        merge_count=max(each.merge_count for each in group),
        sources=tuple(source_of(each) for each in group),
    )


def _epochs_left(made: Rewritten, group: Sequence[SegmentEntry]) -> tuple[EpochStart, ...]:
    """The leader epochs of which batches are left, and the first: otherwise each takeover would make the manifest longer."""
    first, *later = epochs_in_effect(group)
    left = {start.epoch for start in made.segment.leader_epochs}
    return (first, *(start for start in later if start.epoch in left))


async def _require_survivors(ports: WorkerPorts, entry: SegmentEntry, rules: CheckedRules, fingerprint: int) -> None:
    """Read the new segment back, verify it, and compare its records with those that must have survived. Raises ``Corrupt``."""
    found = 0

    def add(batch: memoryview, header: BatchHeader) -> None:
        nonlocal found
        found += rules.fingerprint(batch, header)

    await read_back(ports, entry, add)
    if found != fingerprint:
        raise Corrupt(f"compacted segment {entry.key} does not hold exactly the records that it must", key=entry.key)
