"""Keeps the second copy of a worker's partitions up to date, beside its other work, for the length of one session.

A partition is due when its committed version changes, and once for each interval of the sweep. Copying has limits of its own:
it never waits for offloads, nor they for it. It changes nothing in metadata and needs no lease: two workers that copy the same
partition write the same objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import Conflict, Invalid, Refused, StratalogError
from stratalog_metadata.records import DeletedTopic, Lease, ManifestPointer, RestoredTopic, TieringWorker, Topic
from stratalog_metadata.state.changes import Change
from stratalog_tiering.copies.deletions import abort_stale_copies, apply_deletions
from stratalog_tiering.copies.detached import copy_detached_topics
from stratalog_tiering.copies.replication import copy_partition, sweep_partition
from stratalog_tiering.copies.second import SecondCopy
from stratalog_tiering.core.partition import PartitionId, partition_snapshot
from stratalog_tiering.core.schedule import Schedule
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.worker.leases import WorkerLeases, partition_lease

DELETIONS_LEASE: Final = "tiering/second-copy/deletions"
DETACHED: Final = "tiering/second-copy/detached"
"""Name of the work on detached topics; no lease, as for partitions."""
_SPREAD_PER_S: Final = 50
"""Rate at which partitions are compared with their copies after a session has begun."""
_log = logging.getLogger(__name__)


class CopyWork:
    """``run`` works until it is cancelled."""

    def __init__(self, ports: WorkerPorts, second: SecondCopy, leases: WorkerLeases) -> None:
        self._ports = ports
        self._second = second
        self._leases = leases
        self._schedule = Schedule()
        self._wake = asyncio.Event()
        self._names: dict[str, PartitionId] = {}
        self._behind_since: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._swept_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def count_lag(self) -> None:
        """Set the gauges of the copy's lag."""
        counters, now = self._second.counters, self._ports.clock.monotonic()
        counters.lag_partitions = len(self._behind_since)
        counters.lag_seconds = now - min(self._behind_since.values(), default=now)

    def cancel(self) -> None:
        """Stop what is being copied, because the session has ended."""
        for task in self._tasks:
            task.cancel()

    async def run(self) -> None:
        """Copy and sweep, partition by partition."""
        stop_watching = self._ports.metadata.view.subscribe(self._on_changes)
        try:
            self._schedule_all()
            while True:
                self._wake.clear()
                for name in self._schedule.take_due(self._now(), self._ports.settings.copies_at_once):
                    task = asyncio.ensure_future(self._run_one(name))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                await self._sleep()
        finally:
            stop_watching()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _now(self) -> float:
        return self._ports.clock.monotonic()

    async def _sleep(self) -> None:
        next_at = self._schedule.next_at()
        full = self._schedule.at_work_count >= self._ports.settings.copies_at_once
        pause_s = None if next_at is None or full else max(0.0, next_at - self._now())
        try:
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _schedule_all(self) -> None:
        now, names = self._now(), list[str]()
        for topic in self._ports.metadata.view.all(Topic):
            names += [] if topic.internal else [self._named(topic, index) for index in range(topic.partition_count)]
        for position, name in enumerate(names):
            self._schedule.set_due(name, now + position / _SPREAD_PER_S)
        self._schedule.set_all_due([DELETIONS_LEASE, DETACHED], now)

    def _named(self, topic: Topic, index: int) -> str:
        name = partition_lease(topic.topic_id, index)
        self._names[name] = (topic.topic_id, index)
        return name

    def _on_changes(self, changes: Sequence[Change]) -> None:
        now = self._now()
        for change in changes:
            record = change.after.record if change.after is not None else None
            if isinstance(record, ManifestPointer):
                name = partition_lease(record.topic_id, record.index)
                self._names[name] = (record.topic_id, record.index)
                self._schedule.set_due(name, now)
            elif isinstance(record, Topic) and not record.internal:
                self._schedule.set_all_due([self._named(record, index) for index in range(record.partition_count)], now)
            elif isinstance(record, DeletedTopic | RestoredTopic) or self._is_misplaced(record):
                self._schedule.set_due(DELETIONS_LEASE, now)
            elif record is None and change.before is not None:
                before = change.before.record
                if isinstance(before, TieringWorker):
                    self._schedule_all()
                elif isinstance(before, Topic) and not before.internal:
                    # Once more, to be forgotten.
                    self._schedule.set_all_due([self._named(before, index) for index in range(before.partition_count)], now)
                    self._schedule.set_due(DETACHED, now)
        self._wake.set()

    def _is_misplaced(self, record: object) -> bool:
        return isinstance(record, Lease) and record.name == DELETIONS_LEASE and self._leases.is_misplaced(record)

    async def _run_one(self, name: str) -> None:
        settings = self._ports.settings
        again_s: float | None = settings.retry_ms_max / 1000
        try:
            topic, is_of_partition = self._topic(name), name not in (DELETIONS_LEASE, DETACHED)
            if topic is None and is_of_partition:
                self._forget(name)
                again_s = None
            elif self._leases.is_ours(name):
                if topic is not None:
                    await self._copy(name, topic)
                elif name == DETACHED:
                    await copy_detached_topics(self._ports, self._second)
                else:
                    await self._delete_topics()
                again_s = settings.sweep_interval_ms / 1000
            else:
                self._behind_since.pop(name, None)
                if name == DELETIONS_LEASE:  # Acquired late, or its release failed.
                    await self._leases.release(name)
                again_s = None
            self._failures.pop(name, None)
        except Conflict as changed:
            _log.debug("%s changed while it was copied: %s", name, changed)
            again_s = self._pause_s(name)
        except StratalogError as failure:
            again_s = self._pause_s(name)
            self._second.counters.failures += 1
            _log.warning("second copy of %s: %s: %s", name, type(failure).__name__, failure)
        except Exception:
            self._second.counters.failures += 1
            _log.exception("second copy of %s failed with an unexpected error; it will be retried", name)
        finally:
            self._schedule.ended(name, None if again_s is None else self._now() + again_s)
            self._wake.set()

    def _pause_s(self, name: str) -> float:
        self._failures[name] = failures = self._failures.get(name, 0) + 1
        longest_s = self._ports.settings.retry_ms_max / 1000
        return float(min(longest_s, 0.1 * 2 ** min(failures, 20))) * (0.5 + self._ports.random.random() / 2)

    def _topic(self, name: str) -> Topic | None:
        """The topic of a partition; None if it is deleted."""
        topic_id = self._names[name][0] if name in self._names else None
        return next((each for each in self._ports.metadata.view.all(Topic) if each.topic_id == topic_id), None)

    def _forget(self, name: str) -> None:
        """Forget a partition of a deleted topic."""
        for known in (self._names, self._behind_since, self._failures, self._swept_at):
            known.pop(name, None)

    async def _copy(self, name: str, topic: Topic) -> None:
        state = partition_snapshot(self._ports.metadata.view, topic, self._names[name][1])
        if state is None or state.pointer is None:
            self._behind_since.pop(name, None)
            return
        if self._second.known.get(state.pointer.key()) != state.pointer.object_key:
            self._behind_since.setdefault(name, self._now())
        await copy_partition(self._ports, self._second, state)
        self._behind_since.pop(name, None)
        interval_s = self._ports.settings.sweep_interval_ms / 1000
        if self._now() >= self._swept_at.get(name, float("-inf")) + interval_s:
            await sweep_partition(self._ports, self._second, state)
            self._swept_at[name] = self._now()

    async def _delete_topics(self) -> None:
        if await self._leases.hold(DELETIONS_LEASE) is None:
            raise Conflict("another worker holds the lease")  # It may work by a view from before the last change.
        try:
            await self._abort_stale_copies()
            await apply_deletions(self._ports, self._second)
        finally:
            await self._leases.release(DELETIONS_LEASE)

    async def _abort_stale_copies(self) -> None:
        try:
            await abort_stale_copies(self._ports, self._second)
        except (Invalid, Refused) as refused:  # or not offered
            self._second.counters.failures += 1
            _log.warning("uploads to the second copy that were never completed are not aborted: %s", refused)
