"""The work on one partition, one step after the other, under the partition's lease.

Planned steps (``core/planning.py``) and maintenance (``core/maintenance_times.py``) take turns. Failures are reported in the
partition's ``TierStatus`` and retried with back-off; a ``Conflict`` means that the partition changed, and the step is planned
again. While the store does nothing, or the topic's policy keeps its records out of it, expired hot ledgers are removed
without it (``maintenance/hot_expiry.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Final

from stratalog_core.errors import Conflict, Corrupt, OutcomeUnknown, Refused, StorageFailed, StratalogError, Unavailable
from stratalog_metadata.client.topic_defaults import topic_defaults
from stratalog_metadata.records import (
    ManifestPointer,
    TierStatus,
    Topic,
    configs_in_force,
    log_key,
    manifest_pointer_key,
    tier_status_key,
    topic_key,
)
from stratalog_metadata.state.commands import ABSENT, Command, Put, VersionIs
from stratalog_tiering.core.commands import Guards, fulfil_request
from stratalog_tiering.core.forks import Forked
from stratalog_tiering.core.maintenance_times import MaintenanceTask, MaintenanceTimes
from stratalog_tiering.core.offload_job import Undecided
from stratalog_tiering.core.partition import PartitionSnapshot, is_cold, is_sealed, low_on_space, partition_snapshot
from stratalog_tiering.core.planning import DropEmpty, DropHot, Fulfil, Idle, Offload, PlanLimits, ResolveFork, Step, next_step
from stratalog_tiering.core.policy import UNLIMITED, TierPolicy, tier_policy
from stratalog_tiering.format.object_keys import is_version_object
from stratalog_tiering.maintenance.compaction import Compaction
from stratalog_tiering.maintenance.deletion import LateMarkers
from stratalog_tiering.maintenance.fork_resolution import resolve_fork
from stratalog_tiering.maintenance.hot_expiry import HotExpiry
from stratalog_tiering.maintenance.merging import merge_small
from stratalog_tiering.maintenance.orphans import sweep_orphans
from stratalog_tiering.maintenance.retention import apply_retention, next_expiry_ms
from stratalog_tiering.offload.offloading import cold_since, drop, drop_hot, offload
from stratalog_tiering.offload.ports import WorkerPorts
from stratalog_tiering.offload.version_objects import ensure_in_store
from stratalog_tiering.store import Locked
from stratalog_tiering.worker.leases import WorkerLeases, partition_lease

STEPS_AT_ONCE_MAX: Final = 100
"""Steps after which the partition yields to the others."""

_STATUS_INTERVAL_S: Final = 2.0
_REPORT_AGAIN_S: Final = 10.0
"""Pause before a status that could not be written is written again."""
_log = logging.getLogger(__name__)


class PartitionWork:
    """One partition, for the length of one session. ``run`` is never called twice at once."""

    def __init__(
        self, ports: WorkerPorts, leases: WorkerLeases, late_markers: LateMarkers, topic: Topic, index: int, spread_s: float
    ) -> None:
        """Maintenance first runs at a random time within ``spread_s``, or within its interval if that is longer."""
        self._ports = ports
        self._leases = leases
        self._late_markers = late_markers
        self._topic_name = topic.name
        self._topic_id = topic.topic_id
        self._index = index
        self._lease = partition_lease(topic.topic_id, index)
        self._failures = 0
        self._maintained = False
        """Whether the last thing that was done, or failed, was maintenance."""
        self._offloaded_at_ms = 0
        self._hot_expiry = HotExpiry()
        self._compaction = Compaction()
        self._next_report = 0.0
        self._times = MaintenanceTimes(
            ports.settings,
            ports.clock.monotonic(),
            spread=ports.random.random(),
            spread_s=spread_s,
            recheck=bool(self._reported_error()),
        )
        self._cold_since: tuple[Hashable, Mapping[int, int]] = (None, {})
        """When each cold ledger became cold, and the state that this was computed from."""
        self._open_since: tuple[tuple[int, ...], int | None] = (), None
        """The sealed ledgers, and the first offset of a transaction that is open after them, as an attempt to offload found."""
        ports.commits.released(manifest_pointer_key(topic.topic_id, index))

    async def run(self, topic: Topic) -> float | None:
        """Work until nothing is left to do; returns the seconds until the next call, None: when metadata changes."""
        try:
            pause_s = await self._work(topic)
        except Conflict as changed:
            _log.debug("%s changed during a step: %s", self._lease, changed)
            return self._pause_s()
        except StratalogError as failure:
            self._ports.counters.failures += 1
            _log.warning("%s: %s: %s", self._lease, type(failure).__name__, failure)
            await self._report(failure)
            if isinstance(failure, OutcomeUnknown | Refused | StorageFailed | Unavailable):
                await self._expire_hot(topic)
            return self._pause_s()
        self._failures = 0
        return pause_s

    def close(self) -> None:
        """Free and forget what the worker remembers of the partition: the session has ended, or it is another worker's."""
        self._ports.commits.released(manifest_pointer_key(self._topic_id, self._index))
        self._compaction.end(self._ports)

    async def _work(self, topic: Topic) -> float | None:
        for _ in range(STEPS_AT_ONCE_MAX):
            state = partition_snapshot(self._ports.metadata.view, topic, self._index)
            if state is None or not (state.ledgers or state.pointer or state.request or state.pending_decision):
                return await self._settled(None, None)
            with self._blocking_compaction():
                step = await self._plan(state)
            task = self._times.due(self._retained(state), self._ports.clock.monotonic(), self._ports.clock.wall_ms())
            if isinstance(step, Idle) and task is None:
                return await self._settled(self._until(step, state), state)
            guards = await self._hold(state)
            if guards is None:
                return None
            await self._ports.bucket.ensure()
            with self._blocking_compaction():
                if state.pointer is not None and await self._stored(state.pointer):
                    continue
            # Alternate, also after a failure: there may always be something to offload, and maintenance may fail each time.
            is_idle, is_first = isinstance(step, Idle), isinstance(step, ResolveFork)
            self._maintained = task is not None and (is_idle or not (self._maintained or is_first))
            if self._maintained and task is not None:
                await self._maintain(task, state, guards)
            else:
                await self._do(step, state, guards)
                self._failures = 0
        return 0.0

    async def _stored(self, pointer: ManifestPointer) -> bool:
        """Store the manifest of a worker that ended after its commit; True if the pointer has changed by that."""
        await ensure_in_store(self._ports, pointer)
        if pointer.content and not is_version_object(pointer.object_key):
            self._times.sweep_at_once(self._ports.clock.monotonic())  # The key of its version was taken: a fork.
        return bool(pointer.content)

    async def _hold(self, state: PartitionSnapshot) -> Guards | None:
        """Acquire the lease; return the guards of a step, so that it changes nothing once the topic is deleted."""
        guards = await self._leases.hold(self._lease)
        return None if guards is None else (*guards, VersionIs(key=topic_key(state.topic.name), version=state.topic_version))

    async def _settled(self, pause_s: float | None, state: PartitionSnapshot | None) -> float | None:
        """Clear the reported error, now that nothing is left to do, unless a maintenance task still fails."""
        if self._reported_error() != self._unresolved(state):
            await self._report(None, state)
            if self._reported_error():
                return _REPORT_AGAIN_S if pause_s is None else min(pause_s, _REPORT_AGAIN_S)
        return pause_s

    def _retained(self, state: PartitionSnapshot) -> Hashable:
        """Everything but time that retention and merging depend on; None if neither can have anything to do."""
        policy, hot_bytes = self._policy(state), 0
        uncopied = () if policy.is_copied else tuple(stored.version for stored in state.ledgers)
        if state.pointer is None and len(uncopied) < 2:
            return None
        if policy.retention_bytes != UNLIMITED:
            hot_bytes = sum(stored.ledger.payload_bytes for stored in state.ledgers if not is_cold(state, stored.ledger))
        # What has a hot copy is not compacted.
        hot_start = state.ledgers[0].ledger.base_offset if policy.compaction is not None and state.ledgers else None
        return state.pointer_version, state.log.log_start_offset, policy, hot_bytes, uncopied, hot_start

    def _unresolved(self, state: PartitionSnapshot | None) -> str:
        """The reported error if a maintenance task still fails, else an empty string."""
        depends_on = self._retained(state) if state is not None else None
        return self._reported_error() if self._times.has_failed(depends_on) else ""

    def _reported_error(self) -> str:
        status = self._ports.metadata.view.find(TierStatus, tier_status_key(self._topic_id, self._index))
        return "" if status is None else status.last_error

    async def _plan(self, state: PartitionSnapshot) -> Step:
        if state.pending_decision is not None:
            return ResolveFork()
        settings = self._ports.settings
        limits = PlanLimits(
            segment_bytes=settings.segment_bytes,
            deletion_lag_ms=settings.deletion_lag_ms,
            bookies_low_on_space=low_on_space(self._ports.metadata.view),
        )
        cold = tuple(stored.ledger.ledger_id for stored in state.ledgers if is_cold(state, stored.ledger))
        depends_on = (state.pointer_version, cold)
        if depends_on != self._cold_since[0]:
            since = await cold_since(self._ports, state)
            # Ask again as long as a damaged page hides the rest.
            self._cold_since = depends_on if len(since) == len(cold) else None, since
        sealed = tuple(stored.ledger.ledger_id for stored in state.ledgers if is_sealed(stored.ledger))
        if sealed != self._open_since[0]:
            self._open_since = sealed, None
        now_ms = self._ports.clock.wall_ms()
        return next_step(state, self._policy(state), limits, self._cold_since[1], now_ms, self._open_since[1])

    def _policy(self, state: PartitionSnapshot) -> TierPolicy:
        return tier_policy(configs_in_force(state.topic, topic_defaults(self._ports.metadata.view)))

    async def _do(self, step: Step, state: PartitionSnapshot, guards: Guards) -> None:
        if isinstance(step, Offload):
            await self._offload(step, state, guards)
        elif isinstance(step, ResolveFork):
            with self._blocking_compaction():
                await resolve_fork(self._ports, state, guards)
        elif isinstance(step, DropHot):
            await drop_hot(self._ports, state, step.ledgers, guards)
        elif isinstance(step, DropEmpty):
            await drop(self._ports, state, step.ledgers, guards)
        elif isinstance(step, Fulfil):
            await self._fulfil(state, guards)

    async def _fulfil(self, state: PartitionSnapshot, guards: Guards) -> None:
        """Delete the request, after a request to compact has been carried out."""
        if state.request is not None and state.request.compact:
            if await self._compact(state, self._policy(state), guards, is_asked=True):
                return
            if self._compaction.is_waiting:
                raise Conflict("another partition of the worker is being compacted")
        await self._ports.metadata.propose(fulfil_request(state, guards))

    async def _compact(self, state: PartitionSnapshot, policy: TierPolicy, guards: Guards, *, is_asked: bool = False) -> bool:
        was_running = self._compaction.is_running
        is_done = await self._compaction.step(self._ports, state, policy, guards, is_asked=is_asked)
        if was_running or self._compaction.is_running:
            await self._report(None, state)
        return is_done

    async def _offload(self, step: Offload, state: PartitionSnapshot, guards: Guards) -> None:
        try:
            is_done = await offload(self._ports, state, step, guards, self._policy(state))
        except Undecided as waits:
            _log.info("%s: %s", self._lease, waits)
            self._open_since = self._open_since[0], waits.open_since
            return
        if is_done:
            self._offloaded_at_ms = self._ports.clock.wall_ms()
            await self._report(None, state)

    async def _expire_hot(self, topic: Topic) -> None:
        """Remove expired hot ledgers without the store, so that a long outage of the store does not fill the bookies."""
        try:
            state = partition_snapshot(self._ports.metadata.view, topic, self._index)
            guards = await self._hold(state) if state is not None and len(state.ledgers) > 1 else None
            if state is None or guards is None:
                return
            await self._drop_expired_hot(state, self._policy(state), guards)
        except StratalogError as failure:
            _log.info("%s: expired hot ledgers were not removed: %s", self._lease, failure)

    async def _drop_expired_hot(self, state: PartitionSnapshot, policy: TierPolicy, guards: Guards) -> bool:
        expired = await self._hot_expiry.drop_expired(self._ports, state, policy, guards)
        if expired:
            what = f"{len(expired)} ledgers up to offset {expired[-1].ledger.end_offset}"
            _log.warning("%s: removed %s that were not offloaded: they are past retention or deleted", self._lease, what)
        return bool(expired)

    async def _maintain(self, task: MaintenanceTask, state: PartitionSnapshot, guards: Guards) -> None:
        """Run one maintenance task and note when it is due again. Raises the task's own error."""
        try:
            if task is MaintenanceTask.SWEEP:
                await self._late_markers.find(state.topic, guards)
                await sweep_orphans(self._ports, state)
                self._times.swept(self._ports.clock.monotonic())
            else:
                is_asked = state.request is not None and state.request.compact
                with nullcontext() if is_asked else self._blocking_compaction():
                    await self._retain(state, self._policy(state), guards)
        except StratalogError:
            self._times.failed(task, self._ports.clock.monotonic())
            raise

    @contextmanager
    def _blocking_compaction(self) -> Iterator[None]:
        """Give up a compaction that waits for a step that fails: the worker's other partitions could not use the map."""
        try:
            yield
        except Conflict:
            raise
        except StratalogError:
            self._compaction.end(self._ports)
            raise

    async def _retain(self, state: PartitionSnapshot, policy: TierPolicy, guards: Guards) -> None:
        """Apply retention, else compact a step or merge one run of small segments, else compute when retention is due next."""
        held: Corrupt | Locked | Refused | None = None
        try:
            changed = await apply_retention(self._ports, state, policy, guards)
        except Forked:
            raise
        except (Corrupt, Locked, Refused) as kept:
            # A list of removed objects is damaged, or the store keeps an object that no worker locked, or refuses deletions.
            # It is reported when all else is done.
            held, changed = kept, await apply_retention(self._ports, state, policy, guards, deletes=False)
        if not changed and not policy.is_copied:
            changed = await self._drop_expired_hot(state, policy, guards)
        # Compaction joins small segments itself, and a pass relies on the segments that it has found.
        if changed or await self._compact(state, policy, guards) or await merge_small(self._ports, state, policy, guards):
            self._times.changed(self._ports.clock.monotonic())
        elif held is not None:
            raise held
        else:
            cold_ms = await next_expiry_ms(self._ports, state, policy)
            hot_ms = None if policy.is_copied else self._hot_expiry.next_ms(state, policy)
            times_ms = (cold_ms, hot_ms, self._compaction.due_at_ms)
            expires_at_ms = min((each for each in times_ms if each is not None), default=None)
            self._times.nothing_due_before(self._retained(state), expires_at_ms, self._ports.clock.monotonic())

    def _until(self, idle: Idle, state: PartitionSnapshot) -> float:
        clock = self._ports.clock
        maintenance_s = self._times.next_s(self._retained(state), clock.monotonic(), clock.wall_ms())
        if idle.until_ms is None:
            return maintenance_s
        return min(maintenance_s, max(0.0, (idle.until_ms - clock.wall_ms()) / 1000))

    def _pause_s(self) -> float:
        self._failures += 1
        longest_s = self._ports.settings.retry_ms_max / 1000
        return float(min(longest_s, 0.1 * 2 ** min(self._failures, 20))) * (0.5 + self._ports.random.random() / 2)

    async def _report(self, failure: StratalogError | None, state: PartitionSnapshot | None = None) -> None:
        """Write the partition's status to metadata, rate-limited, but always when the error changes."""
        now, key = self._ports.clock.monotonic(), tier_status_key(self._topic_id, self._index)
        found = self._ports.metadata.view.get(key)
        last = self._ports.metadata.view.find(TierStatus, key)
        text = f"{type(failure).__name__}: {failure.message}" if failure is not None else self._unresolved(state)
        compaction = self._compaction.state
        is_news = last is None or text != last.last_error or bool(last.compacting) != bool(compaction.phase)
        if not is_news and now < self._next_report:
            return
        self._next_report = now + _STATUS_INTERVAL_S
        status = TierStatus(
            topic_id=self._topic_id,
            index=self._index,
            worker_id=self._ports.settings.worker_id,
            offloaded_at_ms=self._offloaded_at_ms or (last.offloaded_at_ms if last else 0),
            last_error=text,
            last_error_at_ms=self._ports.clock.wall_ms() if text else 0,
            compacted_at_ms=self._compaction.last_done_ms or (last.compacted_at_ms if last else 0),
            compacting=compaction.phase,
            compacting_offset=compaction.offset,
            compacting_end=compaction.end_offset,
            unrepaired=last.unrepaired if last else (),
        )
        log = self._ports.metadata.view.get(log_key(self._topic_id, self._index))
        if log is None:
            return
        try:
            still_there = VersionIs(key=log_key(self._topic_id, self._index), version=log.version)
            unchanged = VersionIs(key=key, version=found.version if found is not None else ABSENT)
            await self._ports.metadata.propose(Command(updates=(Put(record=status),), requirements=(still_there, unchanged)))
        except StratalogError as unreported:
            _log.info("the status of %s was not written: %s", self._lease, unreported)
