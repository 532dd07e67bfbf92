"""One session of a tiering worker: turns metadata changes into due work and runs a few pieces of it at once.

Everything stops when the session expires, because every lease of the worker belongs to its session. Which partition needs
what is decided in ``partition_work.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from typing import Final
from uuid import UUID

from stratalog_core.errors import Invalid, Refused, StratalogError
from stratalog_core.restarting import restarting
from stratalog_metadata.records import (
    TOPIC_DEFAULTS_KEY,
    Bookie,
    DeletedTopic,
    Lease,
    Ledger,
    LedgerState,
    Log,
    PendingTopic,
    RestoredTopic,
    TieringWorker,
    Topic,
    Versioned,
)
from stratalog_metadata.state.changes import Change
from stratalog_tiering.copies.second import SecondCopy
from stratalog_tiering.core.partition import PartitionId, partition_of
from stratalog_tiering.core.schedule import BurstPacer, Schedule
from stratalog_tiering.format.descriptor import LEASE_MS_MAX
from stratalog_tiering.maintenance.deletion import (
    LateMarkers,
    abort_stale_uploads,
    collect_deleted_topic,
    collect_pending_topic,
    show_restored_topic,
)
from stratalog_tiering.maintenance.earlier_deletions import learn_earlier_deletions
from stratalog_tiering.metrics import ScrubMetrics, TieringMetrics
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.reader_leases import delete_expired_leases
from stratalog_tiering.worker.copying import DELETIONS_LEASE, CopyWork
from stratalog_tiering.worker.leases import BUCKET_LEASE, WorkerLeases, deletion_lease, partition_lease
from stratalog_tiering.worker.partition_work import PartitionWork
from stratalog_tiering.worker.scrubbing import ScrubWork

BUCKET_INTERVAL_S: Final = 3600.0
_FAILED_PAUSE_S: Final = 10.0
_SEALED_BURST: Final = 10
_SEALED_PER_S: Final = 5.0
_SEALED_WAIT_MAX_S: Final = 30.0
"""Sealed ledgers of a burst are started at this pace; none waits longer than this."""
_FIRST_MAINTENANCE_PER_S: Final = 10
"""Rate of first maintenance runs in a new session, so that sealed ledgers do not queue behind thousands of them."""
_log = logging.getLogger(__name__)


class WorkerSession:
    """``run`` works until ``expire`` is called; after that no task of the session runs."""

    def __init__(self, ports: WorkerPorts, second: SecondCopy | None, scrubbed: ScrubMetrics) -> None:
        self._ports = ports
        self._leases = WorkerLeases(ports.metadata, ports.settings.worker_id)
        self._late_markers = LateMarkers(ports)
        self._copying = CopyWork(ports, second, self._leases) if second is not None else None
        self._scrubbing = ScrubWork(ports, self._leases, scrubbed) if ports.settings.scrub_interval_ms else None
        self._schedule = Schedule()
        self._pacer = BurstPacer(_SEALED_BURST, _SEALED_PER_S, _SEALED_WAIT_MAX_S)
        self._wake = asyncio.Event()
        self._expired = False
        self._session_id = 0
        self._topics: dict[UUID, Topic] = {}
        self._partitions: dict[str, PartitionWork] = {}
        self._names: dict[str, PartitionId] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def expire(self) -> None:
        """End the session: cancel all of its work at once."""
        self._expired = True
        if self._copying is not None:
            self._copying.cancel()
        for task in self._tasks:
            task.cancel()
        self._wake.set()

    def metrics(self) -> TieringMetrics:
        """For a scrape."""
        if self._copying is not None:
            self._copying.count_lag()
        if self._scrubbing is not None:
            self._scrubbing.count_lag()
        return TieringMetrics(work_in_progress=self._schedule.at_work_count, work_scheduled=self._schedule.due_count)

    async def run(self, session_id: int) -> None:
        """Work under this session until :meth:`expire`."""
        self._session_id = session_id
        self._leases.begin(session_id)
        stop_watching = self._ports.metadata.view.subscribe(self._on_changes)
        beside = [work for work in (self._copying, self._scrubbing) if work is not None]
        running = [asyncio.ensure_future(restarting(work.run, type(work).__name__)) for work in beside]
        try:
            self._schedule_all()
            while not self._expired:
                self._wake.clear()
                self._start_due()
                await self._sleep()
        finally:
            stop_watching()
            ending = [*self._tasks, *running]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            for name in list(self._partitions):
                self._close_partition(name)

    async def _sleep(self) -> None:
        next_at = self._schedule.next_at()
        full = self._schedule.at_work_count >= self._ports.settings.partitions_at_once
        pause_s = None if next_at is None or full else max(0.0, next_at - self._ports.clock.monotonic())
        try:
            # Not wait_for: before Python 3.12 it loses a cancellation that arrives together with the event.
            async with asyncio.timeout(pause_s):
                await self._wake.wait()
        except TimeoutError:
            return

    def _schedule_all(self) -> None:
        """Make all work due now."""
        view, now = self._ports.metadata.view, self._ports.clock.monotonic()
        for topic in view.all(Topic):
            self._schedule_topic(topic)
        for topic_id in self._topics.keys() - {topic.topic_id for topic in view.all(Topic)}:
            self._forget_topic(topic_id)
        self._schedule.set_all_due((deletion_lease(record.topic_id) for record in self._topics_in_transition()), now)
        self._schedule.set_due(BUCKET_LEASE, now)

    def _schedule_topic(self, topic: Topic) -> None:
        """Make all partitions of a topic due now: the topic is new, has changed, or is now another worker's."""
        if topic.internal:
            return
        self._topics[topic.topic_id] = topic
        names = {partition_lease(topic.topic_id, index): (topic.topic_id, index) for index in range(topic.partition_count)}
        self._names.update(names)
        self._schedule.set_all_due(names, self._ports.clock.monotonic())

    def _forget_topic(self, topic_id: UUID) -> None:
        """Forget a deleted topic. Its partitions are due once more, to release their leases."""
        topic = self._topics.pop(topic_id, None)
        names = [partition_lease(topic_id, index) for index in range(topic.partition_count if topic is not None else 0)]
        for name in names:
            self._names.pop(name, None)
        self._schedule.set_all_due(names, self._ports.clock.monotonic())

    def _on_changes(self, changes: Sequence[Change]) -> None:
        now, all_due = self._ports.clock.monotonic(), False
        for change in changes:
            versioned = change.after or change.before
            record = versioned.record if versioned is not None else None
            if isinstance(record, Topic):
                self._on_topic(record, is_gone=change.after is None)
            elif isinstance(record, DeletedTopic | PendingTopic | RestoredTopic):
                self._schedule.set_due(deletion_lease(record.topic_id), now)
            concerns_all = isinstance(record, TieringWorker) or change.key == TOPIC_DEFAULTS_KEY
            all_due = all_due or concerns_all or _runs_low(change)
            # A lease that this session released is not due again: it would be acquired and released in a loop.
            if isinstance(record, Lease) and record.name != DELETIONS_LEASE:
                released = change.after is None and record.session_id != self._session_id
                if released or (change.after is not None and self._leases.is_misplaced(record)):
                    self._schedule.set_due(record.name, now)
            partition = partition_of(record)
            if partition is not None and partition[0] in self._topics and not _is_opening(change):
                at = self._pacer.next_at(now) if change.after is not None and isinstance(record, Ledger) else now
                self._schedule.set_due(partition_lease(*partition), at)
        if all_due:
            self._schedule_all()
        self._wake.set()

    def _on_topic(self, topic: Topic, *, is_gone: bool) -> None:
        if is_gone:
            self._forget_topic(topic.topic_id)
        else:
            self._schedule_topic(topic)

    def _start_due(self) -> None:
        for name in self._schedule.take_due(self._ports.clock.monotonic(), self._ports.settings.partitions_at_once):
            task = asyncio.ensure_future(self._run_one(name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run_one(self, name: str) -> None:
        again_s: float | None = _FAILED_PAUSE_S
        try:
            if self._leases.is_ours(name):
                again_s = await self._work(name)
            else:
                self._close_partition(name)
                await self._leases.release(name)
                again_s = None
        except StratalogError as failure:
            self._ports.counters.failures += 1
            _log.warning("%s: %s: %s", name, type(failure).__name__, failure)
        except Exception:
            self._ports.counters.failures += 1
            _log.exception("%s failed with an unexpected error; it will be retried", name)
        finally:
            self._schedule.ended(name, None if again_s is None else self._ports.clock.monotonic() + again_s)
            self._wake.set()

    def _close_partition(self, name: str) -> None:
        """Forget a partition, from its own run: nothing else of it is under way then."""
        work = self._partitions.pop(name, None)
        if work is not None:
            work.close()

    async def _work(self, name: str) -> float | None:
        if name == BUCKET_LEASE:
            return await self._work_on_bucket()
        partition = self._names.get(name)
        if partition is None:
            self._close_partition(name)
            return await self._collect_topic(name)
        topic = self._topics[partition[0]]
        work = self._partitions.get(name)
        if work is None:
            work = self._partitions[name] = PartitionWork(
                self._ports, self._leases, self._late_markers, topic, partition[1], len(self._names) / _FIRST_MAINTENANCE_PER_S
            )
        return await work.run(topic)

    async def _work_on_bucket(self) -> float | None:
        await self._ports.bucket.ensure()
        guards = await self._leases.hold(BUCKET_LEASE)
        if guards is not None:
            await self._ports.bucket.confirm()
            now_ms = self._ports.clock.wall_ms()
            ended = delete_expired_leases(self._ports.store, now_ms, LEASE_MS_MAX)
            await self._attempt("readers' leases that have ended are not deleted", ended)
            await self._attempt("stale uploads are not aborted", abort_stale_uploads(self._ports))
            learning = learn_earlier_deletions(self._ports, guards)
            await self._attempt("deletions by earlier owners of the bucket are not learned", learning)
            await self._leases.release(BUCKET_LEASE)
        return BUCKET_INTERVAL_S

    async def _attempt(self, failing: str, work: Awaitable[object]) -> None:
        """Do ``work``, or log what fails if the store refuses or does not offer it: other work does not wait for that.

        Raises ``Invalid`` if the bucket is no longer this cluster's.
        """
        try:
            await work
        except (Invalid, Refused) as refused:
            await self._ports.bucket.confirm()
            self._ports.counters.failures += 1
            _log.warning("%s: %s", failing, refused)

    async def _collect_topic(self, name: str) -> float | None:
        """Work on the pending, deleted or restored topic that the lease ``name`` is on."""
        guards = await self._leases.hold(name) if self._topic_in_transition(name) is not None else None
        # Another worker may have restored it until the lease was free: its deletion is not marked once more.
        found = self._topic_in_transition(name)
        if found is None or guards is None:
            await self._leases.release(name)
            return None
        await self._ports.bucket.confirm()
        again_ms = None
        if isinstance(found.record, DeletedTopic):
            again_ms = await collect_deleted_topic(self._ports, found.record, found.version, guards)
        elif isinstance(found.record, PendingTopic):
            again_ms = await collect_pending_topic(self._ports, found.record, found.version, guards)
        elif isinstance(found.record, RestoredTopic):
            await show_restored_topic(self._ports, found.record, found.version, guards)
        if again_ms is not None:
            return max(0.0, (again_ms - self._ports.clock.wall_ms()) / 1000)
        await self._leases.release(name)
        return None

    def _topic_in_transition(self, name: str) -> Versioned | None:
        records = (record for record in self._topics_in_transition() if deletion_lease(record.topic_id) == name)
        return next((self._ports.metadata.view.get(record.key()) for record in records), None)

    def _topics_in_transition(self) -> list[DeletedTopic | PendingTopic | RestoredTopic]:
        """The records of topics that are pending, deleted or restored."""
        view = self._ports.metadata.view
        return [*view.all(DeletedTopic), *view.all(PendingTopic), *view.all(RestoredTopic)]


def _runs_low(change: Change) -> bool:
    """Whether the space of a bookie has become short."""
    before = change.before.record if change.before is not None else None
    after = change.after.record if change.after is not None else None
    was_low = isinstance(before, Bookie) and before.low_on_space
    return isinstance(after, Bookie) and after.low_on_space and not was_low


def _is_opening(change: Change) -> bool:
    """Whether the change opens a ledger or begins its recovery: tiering has nothing to do until the ledger is sealed."""
    before = change.before.record if change.before is not None else None
    after = change.after.record if change.after is not None else None
    if isinstance(after, Ledger):
        return after.state is not LedgerState.CLOSED
    if isinstance(before, Log) and isinstance(after, Log):
        return before.log_start_offset == after.log_start_offset and len(after.ledgers) > len(before.ledgers)
    return False
