"""Replaces segments of cold history by rewritten ones beside running workers, for an erasure or ``stratalog job compact``.

A commit requires the manifest and the topic from which it began. A worker's commit in between makes the command look again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar
from uuid import UUID

from stratalog_core.errors import Conflict
from stratalog_tiering.cold.lease import HeldLease
from stratalog_tiering.core.commands import commit_segment
from stratalog_tiering.format.manifest import Manifest, SegmentEntry
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.offload.beside_workers import CurrentPartition, current_partition
from stratalog_tiering.offload.commit import ATTEMPTS_MAX, commit_edit, previous_version
from stratalog_tiering.offload.ports import WorkerPorts

_Replaced = TypeVar("_Replaced")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentKept:
    """Why a segment was not replaced. ``lock_until_ms`` is the end of its lock if that is the reason."""

    entry: SegmentEntry
    reason: str
    lock_until_ms: int = 0


async def replacements(
    ports: WorkerPorts,
    topic_id: UUID,
    partition: int,
    next_offset: Callable[[int], int | None],
    replace: Callable[[CurrentPartition, Manifest, SegmentEntry], Awaitable[_Replaced | None]],
) -> AsyncIterator[_Replaced]:
    """Call ``replace`` with one segment after the other, and yield its results.

    ``next_offset`` returns the lowest offset of interest from the given one on, at first 0; None: it is done. Raises
    ``Conflict`` if ``replace`` raises it ``ATTEMPTS_MAX`` times for one segment.
    """
    position, attempts = 0, 0
    while (offset := next_offset(position)) is not None:
        now = await current_partition(ports, topic_id, partition)
        manifest = (await previous_version(ports, now.state)).manifest
        entry = await ports.source.segment_at(manifest, max(offset, manifest.start_offset))
        if entry is None:
            return
        try:
            done = await replace(now, manifest, entry)
        except Conflict:
            attempts += 1
            if attempts == ATTEMPTS_MAX:
                raise
            continue
        if done is not None:
            yield done
        position, attempts = entry.end_offset, 0


async def commit_replacement(
    ports: WorkerPorts, now: CurrentPartition, edit: ManifestEdit, entry: SegmentEntry, reason: str, lease: HeldLease
) -> None:
    """Commit ``entry`` in place of the segment with its offsets. ``reason`` is one of `Reason`.

    Raises ``Conflict``, ``LeaseExpired``, ``OutcomeUnknown``.
    """
    state = now.state
    edit.replace(entry, await ports.source.pages(edit.pages_for_replace(entry.base_offset)), reason)
    lease.check()
    if not await commit_edit(ports, state, edit, lambda at, pointer: commit_segment(at, pointer, (), now.guards), [entry.key]):
        raise Conflict(f"{state.topic.name}-{state.log.index} has changed before a segment of it was replaced")
