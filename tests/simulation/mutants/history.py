"""Planted faults of manifest forks, retention, merging, sizes of segments and compressed blocks, run in ``history``."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from stratalog_core.errors import StratalogError, Unavailable
from stratalog_metadata.records import ForkDecision, ManifestPointer, Topic
from stratalog_tiering.cold import block_source
from stratalog_tiering.core import commands, forks
from stratalog_tiering.core.forks import Fork
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger, is_sealed
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy
from stratalog_tiering.core.retention import expired_ledgers
from stratalog_tiering.format import manifest_edit, segment
from stratalog_tiering.format.manifest import SegmentEntry
from stratalog_tiering.format.manifest_edit import ManifestEdit
from stratalog_tiering.format.partition_tree import PartitionTree
from stratalog_tiering.format.removed_objects import RemovedObjects
from stratalog_tiering.format.tree_edit import TreeEdit
from stratalog_tiering.maintenance import hot_expiry, merging, orphans, retention
from stratalog_tiering.maintenance.merging import FAN_IN, MergeLimits
from stratalog_tiering.offload import commit, version_objects
from stratalog_tiering.offload.commit_markers import RecentCommits
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.worker import partition_work
from stratalog_tiering.worker.partition_work import PartitionWork
from stratalog_tiering.worker.worker import TieringWorker


async def _refuse_nothing(ports: Any, state: Any) -> None:
    """Replaces ``refuse_fork``."""


def _only_the_sweep_looks() -> None:
    commit.refuse_fork = _refuse_nothing


def forks_are_looked_for_by_the_sweep_at_the_newest_version_only() -> None:
    """An earlier behaviour: after metadata went back, commits continue, and the other history then looks like garbage."""
    _only_the_sweep_looks()
    found: Callable[..., Fork | None] = forks.find_fork

    def newest_only(listed: Any, known: Any, settled_version: int = 0) -> Fork | None:
        fork = found(listed, known, settled_version)
        return fork if fork is not None and fork.store_version >= fork.metadata_version else None

    orphans.find_fork = newest_only  # type: ignore[attr-defined]


def commits_do_not_look_for_forks() -> None:
    """The sweep refuses a fork, commits do not."""
    _only_the_sweep_looks()


def sweep_does_not_look_for_forks() -> None:
    """Commits refuse a fork; the sweep treats the other history's objects as orphans."""
    orphans.find_fork = lambda listed, known, settled_version=0: None  # type: ignore[attr-defined]


def decided_forks_are_deleted_at_once() -> None:
    """The objects of a rejected fork count as removed long ago."""
    settle: Callable[..., None] = ManifestEdit.settle_fork

    def settle_fork(self: ManifestEdit, newest_version: int, others: Sequence[Any], now_ms: int) -> None:
        settle(self, newest_version, [msgspec.structs.replace(other, removed_at_ms=0) for other in others], now_ms)

    ManifestEdit.settle_fork = settle_fork  # type: ignore[method-assign]


def the_kept_line_is_always_metadatas() -> None:
    """A decision for the store's history keeps metadata's instead."""
    ForkDecision.keeps_store = False  # type: ignore[method-assign, assignment]


def removed_objects_have_no_grace_period() -> None:
    """An object is deleted as soon as it is removed from the manifest."""
    forget: Callable[..., tuple[str, ...]] = RemovedObjects.forget_due

    def forget_due(self: RemovedObjects, before_ms: int, limit: int, *rest: Any) -> tuple[str, ...]:
        return forget(self, sys.maxsize, limit, *rest)

    RemovedObjects.forget_due = forget_due  # type: ignore[method-assign, assignment]


def nothing_expires() -> None:
    """Retention by time removes nothing."""
    retention.expiry_reason = lambda *args, **keywords: None  # type: ignore[attr-defined]


def retention_by_size_removes_a_segment_too_many() -> None:
    """The oldest segment expires although less than ``retention.bytes`` remains without it."""
    reason: Callable[..., str | None] = retention.expiry_reason  # type: ignore[attr-defined]

    def one_more(entry: SegmentEntry, policy: TierPolicy, *, total_bytes: int, **others: int) -> str | None:
        return reason(entry, policy, total_bytes=total_bytes + entry.stored_bytes, **others)

    retention.expiry_reason = one_more  # type: ignore[attr-defined]


def retention_by_size_removes_a_hot_ledger_too_many() -> None:
    """While copying is disabled, one more ledger is removed than ``retention.bytes`` allows."""

    def one_more(state: PartitionSnapshot, policy: TierPolicy, newest_ms: Any, now_ms: int) -> tuple[StoredLedger, ...]:
        expired = expired_ledgers(state, policy, newest_ms, now_ms)
        is_by_size = expired and policy.retention_bytes != UNLIMITED
        return state.ledgers[:-1][: len(expired) + 1] if is_by_size else expired

    hot_expiry.expired_ledgers = one_more  # type: ignore[attr-defined]


def deleted_records_stay_on_bookies() -> None:
    """An earlier behaviour: while copying is disabled, ledgers below the log's start stay."""

    def without_start(state: PartitionSnapshot, *others: Any) -> tuple[StoredLedger, ...]:
        return expired_ledgers(replace(state, log=msgspec.structs.replace(state.log, log_start_offset=0)), *others)

    hot_expiry.expired_ledgers = without_start  # type: ignore[attr-defined, assignment]


def records_with_a_hot_copy_are_counted_twice() -> None:
    """Hot copies of cold records count towards ``retention.bytes``, too."""

    def all_of_both(state: PartitionSnapshot, manifest: Any) -> int:
        return int(manifest.cold_bytes) + sum(stored.ledger.payload_bytes for stored in state.ledgers)

    retention.retained_bytes = all_of_both  # type: ignore[attr-defined]


def _with_policy(changed: Callable[[TierPolicy], TierPolicy]) -> None:
    parse: Callable[..., TierPolicy] = partition_work.tier_policy  # type: ignore[attr-defined]
    partition_work.tier_policy = lambda configs: changed(parse(configs))  # type: ignore[attr-defined]


def retention_by_size_removes_nothing() -> None:
    """``retention.bytes`` is ignored."""
    _with_policy(lambda policy: replace(policy, retention_bytes=UNLIMITED))


def segments_ignore_the_size_that_their_topic_sets() -> None:
    """Segments are as large as the worker's own target allows."""
    _with_policy(lambda policy: replace(policy, segment_bytes=None))


def segments_of_topics_that_set_a_size_hold_one_ledger() -> None:
    """A size that a topic sets counts as one byte."""
    _with_policy(lambda policy: replace(policy, segment_bytes=None if policy.segment_bytes is None else 1))


def merging_does_not_look_at_ages() -> None:
    """Segments are merged however long their time span is."""
    limits: Callable[..., MergeLimits] = merging.merge_limits
    merging.merge_limits = lambda *args: MergeLimits(segment_bytes=limits(*args).segment_bytes)


def merged_segments_are_merged_again_and_again() -> None:
    """Any neighbours that are small enough are merged, however often they were merged before."""

    def mergeable_run(segments: Sequence[SegmentEntry], limits: MergeLimits) -> tuple[SegmentEntry, ...]:
        small = [entry for entry in segments if entry.object_bytes * FAN_IN <= limits.segment_bytes]
        is_run = limits.span_ms is None and len(small) == len(segments) >= FAN_IN // 2
        return tuple(segments) if is_run else ()

    merging.mergeable_run = mergeable_run


def manifests_without_a_change_are_committed() -> None:
    """Retention commits on every check."""
    ManifestEdit.is_changed = True  # type: ignore[method-assign, assignment]


def tree_heads_do_not_advance() -> None:
    """A segment is appended to the manifest, its leaves are not appended to the tree's head."""
    finish: Callable[..., PartitionTree] = TreeEdit.finish
    start: Callable[..., None] = TreeEdit.__init__

    def begin(self: TreeEdit, base: PartitionTree, *others: Any) -> None:
        start(self, base, *others)
        self.base = base  # type: ignore[attr-defined]

    def kept_head(self: TreeEdit) -> PartitionTree:
        return msgspec.structs.replace(finish(self), head=self.base.head)  # type: ignore[attr-defined]

    TreeEdit.__init__ = begin  # type: ignore[method-assign, assignment]
    TreeEdit.finish = kept_head  # type: ignore[method-assign]


def the_writer_version_is_ignored() -> None:
    """A worker edits a manifest that requires a newer writer, and drops what it does not know."""
    for module in (manifest_edit, orphans):
        module.check_writer = lambda manifest: None  # type: ignore[attr-defined]


def paused_topics_are_copied() -> None:
    """The policy is ignored when the next step is planned."""
    _with_policy(lambda policy: replace(policy, is_copied=True))


def steps_follow_the_configs_that_the_work_began_with() -> None:
    """An earlier behaviour: a pause is not seen before a partition has nothing left to do."""
    snapshot: Callable[..., PartitionSnapshot | None] = partition_work.partition_snapshot  # type: ignore[attr-defined]

    def with_topic(view: Any, topic: Topic, index: int) -> PartitionSnapshot | None:
        found = snapshot(view, topic, index)
        return None if found is None else replace(found, topic=topic)

    partition_work.partition_snapshot = with_topic  # type: ignore[attr-defined]


def pausing_loses_the_place() -> None:
    """While copying is disabled every sealed ledger but the newest is removed, and the history goes on behind them."""

    def all_but_the_newest(
        state: PartitionSnapshot, policy: TierPolicy, newest_ms: Any, now_ms: int
    ) -> tuple[StoredLedger, ...]:
        if policy.is_copied:
            return expired_ledgers(state, policy, newest_ms, now_ms)
        return tuple(stored for stored in state.ledgers[:-1] if is_sealed(stored.ledger))

    hot_expiry.expired_ledgers = all_but_the_newest  # type: ignore[attr-defined]


def workers_start_only_with_the_store() -> None:
    """An earlier behaviour: a worker claims its bucket before it opens a session."""
    start: Callable[..., Any] = TieringWorker.start

    async def wait_and_start(self: TieringWorker) -> None:
        while True:
            try:
                await self._ports.bucket.ensure()
                break
            except Unavailable:
                await asyncio.sleep(1.0)
        await start(self)

    TieringWorker.start = wait_and_start  # type: ignore[method-assign]


class _Never(StratalogError):
    """Raised by nothing."""


def unknown_outcomes_keep_hot_ledgers() -> None:
    """An earlier behaviour: hot ledgers do not expire while the store leaves the outcome of writes open."""
    partition_work.OutcomeUnknown = _Never  # type: ignore[attr-defined, assignment]


def refusals_stop_retention() -> None:
    """An earlier behaviour: nothing expires, hot or cold, while the store refuses writes or deletions."""
    partition_work.Refused = _Never  # type: ignore[attr-defined, assignment]


def kept_objects_stop_retention() -> None:
    """An earlier behaviour: nothing expires while the store keeps an object that no worker locked."""
    partition_work.Locked = _Never  # type: ignore[attr-defined, assignment]


def failing_maintenance_goes_first() -> None:
    """An earlier behaviour: after each failure a partition begins with maintenance, which may fail again."""
    run: Callable[..., Any] = PartitionWork.run

    async def forget_and_run(self: PartitionWork, topic: Topic) -> float | None:
        self._maintained = False
        return await run(self, topic)  # type: ignore[no-any-return]

    PartitionWork.run = forget_and_run  # type: ignore[method-assign]


def compressed_blocks_are_taken_as_they_are_stored() -> None:
    """The worker's audits and merges take the frame of a compressed block for the block's batches."""
    segment.plain_block = lambda stored, entry, cipher=None: memoryview(stored)


def readers_take_compressed_blocks_as_they_are_stored() -> None:
    """Brokers take the frame of a compressed block for the block's batches."""
    block_source.plain_block = lambda stored, entry, cipher=None: memoryview(stored)  # type: ignore[attr-defined]


def the_sweep_forgets_data_keys() -> None:
    """The sweep takes the data key of a live segment for an orphan."""
    orphans.with_data_keys = lambda keys: frozenset(keys)  # type: ignore[attr-defined]


def manifests_leave_metadata_before_they_are_stored() -> None:
    """A worker removes a manifest from metadata and does not store it."""

    async def forget(ports: WorkerPorts, pointer: ManifestPointer) -> None:
        await version_objects._update(ports, pointer, msgspec.structs.replace(pointer, content=b""))

    version_objects._store = forget


def hot_copies_go_while_their_manifest_is_in_metadata_alone() -> None:
    """Nobody stores committed manifests, and nothing waits for it."""

    async def is_stored(self: PartitionWork, pointer: ManifestPointer) -> bool:
        return False

    async def ensure_in_store(ports: WorkerPorts, pointer: ManifestPointer) -> None:
        """Leave it where it is."""

    PartitionWork._stored = is_stored  # type: ignore[method-assign]
    commit.ensure_in_store = ensure_in_store  # type: ignore[attr-defined]
    commands._assert_droppable = lambda *args: None


def every_version_counts_as_the_workers_own() -> None:
    """Before a hot copy is dropped, no worker looks for a newer version, whoever committed the one in metadata."""
    RecentCommits.is_own_newest = lambda self, pointer: True  # type: ignore[method-assign]


IN_HISTORY: Final = (
    every_version_counts_as_the_workers_own,
    manifests_leave_metadata_before_they_are_stored,
    hot_copies_go_while_their_manifest_is_in_metadata_alone,
    compressed_blocks_are_taken_as_they_are_stored,
    readers_take_compressed_blocks_as_they_are_stored,
    the_sweep_forgets_data_keys,
    tree_heads_do_not_advance,
    the_writer_version_is_ignored,
    paused_topics_are_copied,
    steps_follow_the_configs_that_the_work_began_with,
    pausing_loses_the_place,
    workers_start_only_with_the_store,
    unknown_outcomes_keep_hot_ledgers,
    refusals_stop_retention,
    kept_objects_stop_retention,
    failing_maintenance_goes_first,
    forks_are_looked_for_by_the_sweep_at_the_newest_version_only,
    commits_do_not_look_for_forks,
    sweep_does_not_look_for_forks,
    decided_forks_are_deleted_at_once,
    the_kept_line_is_always_metadatas,
    removed_objects_have_no_grace_period,
    nothing_expires,
    retention_by_size_removes_a_segment_too_many,
    retention_by_size_removes_a_hot_ledger_too_many,
    deleted_records_stay_on_bookies,
    records_with_a_hot_copy_are_counted_twice,
    retention_by_size_removes_nothing,
    segments_ignore_the_size_that_their_topic_sets,
    segments_of_topics_that_set_a_size_hold_one_ledger,
    merging_does_not_look_at_ages,
    merged_segments_are_merged_again_and_again,
    manifests_without_a_change_are_committed,
)
