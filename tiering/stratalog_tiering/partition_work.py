"""All that tiering does for one partition, one step after the other, under the partition's lease."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

from stratalog_core.errors import Conflict, StratalogError
from stratalog_metadata.commands import Command, Put, VersionIs
from stratalog_metadata.records import TierStatus, Topic, log_key, tier_status_key
from stratalog_metadata.topic_defaults import configs_in_force, topic_defaults
from stratalog_tiering.claims import Claims, partition_work
from stratalog_tiering.commands import Guards, fulfil_request
from stratalog_tiering.merging import merge_small
from stratalog_tiering.offloading import cold_since, drop, drop_hot, offload
from stratalog_tiering.partition_state import partition_state
from stratalog_tiering.planning import DropEmpty, DropHot, Fulfil, Idle, Offload, PartitionState, PlanLimits, Step, next_step
from stratalog_tiering.policy import TierPolicy, tier_policy
from stratalog_tiering.ports import WorkerPorts
from stratalog_tiering.publish import mark_committed
from stratalog_tiering.upkeep import apply_retention, sweep_orphans

STEPS_AT_ONCE_MAX: Final = 100
"""Steps after which a partition lets the others have their turn."""

_STATUS_INTERVAL_S: Final = 2.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Timers:
    """Monotonic times at which something is due again; 0 is at once."""

    retention: float = 0.0
    sweep: float = 0.0
    status: float = 0.0


class PartitionWork:
    """One partition, for the length of one session. ``run`` is never called twice at once."""

    def __init__(self, ports: WorkerPorts, claims: Claims, topic: Topic, index: int) -> None:
        self._ports = ports
        self._claims = claims
        self._topic_name = topic.name
        self._topic_id = topic.topic_id
        self._index = index
        self._lease = partition_work(topic.topic_id, index)
        self._timers = _Timers()
        self._marked = ""
        self._failures = 0
        self._offloaded_at_ms = 0
        now = ports.clock.monotonic()
        self._timers.sweep = now + ports.settings.sweep_interval_ms / 1000 * ports.random.random()

    async def run(self, topic: Topic) -> float | None:
        """Work until there is nothing to do now. Seconds after which to come again; None: when metadata changes."""
        try:
            pause_s = await self._work(topic)
        except Conflict as changed:
            _log.debug("%s changed under our hands: %s", self._lease, changed)
            return self._pause_s()
        except StratalogError as failure:
            _log.warning("%s: %s: %s", self._lease, type(failure).__name__, failure)
            await self._report(failure)
            return self._pause_s()
        self._failures = 0
        return pause_s

    async def _work(self, topic: Topic) -> float | None:
        for _ in range(STEPS_AT_ONCE_MAX):
            state = partition_state(self._ports.metadata.view, topic, self._index)
            if state is None or not (state.ledgers or state.pointer or state.request):
                return None
            step = await self._plan(state)
            if isinstance(step, Idle) and not self._upkeep_due(state):
                return self._until(step, state)
            guards = await self._claims.hold(self._lease)
            if guards is None:
                return None
            await self._ensure_marked(state)
            await self._do(step, state, guards)
        return 0.0

    async def _plan(self, state: PartitionState) -> Step:
        settings = self._ports.settings
        limits = PlanLimits(segment_bytes=settings.segment_bytes, deletion_lag_ms=settings.deletion_lag_ms)
        since_ms = await cold_since(self._ports, state)
        return next_step(state, self._policy(state), limits, since_ms, self._ports.clock.wall_ms())

    def _policy(self, state: PartitionState) -> TierPolicy:
        return tier_policy(configs_in_force(state.topic, topic_defaults(self._ports.metadata.view)))

    async def _do(self, step: Step, state: PartitionState, guards: Guards) -> None:
        if isinstance(step, Offload):
            if await offload(self._ports, state, step.ledgers, guards):
                self._offloaded_at_ms = self._ports.clock.wall_ms()
                await self._report(None)
        elif isinstance(step, DropHot):
            await drop_hot(self._ports, state, step.ledgers, guards)
        elif isinstance(step, DropEmpty):
            await drop(self._ports, state, step.ledgers, guards)
        elif isinstance(step, Fulfil):
            await self._ports.metadata.propose(fulfil_request(state, guards))
        else:
            await self._upkeep(state, guards)

    async def _ensure_marked(self, state: PartitionState) -> None:
        """Repair what a worker left that died between commit and marker."""
        pointer = state.pointer
        if pointer is not None and pointer.object_key != self._marked:
            await mark_committed(self._ports.store, pointer)
            self._marked = pointer.object_key

    def _upkeep_due(self, state: PartitionState) -> bool:
        now = self._ports.clock.monotonic()
        return now >= self._timers.sweep or (now >= self._timers.retention and state.pointer is not None)

    async def _upkeep(self, state: PartitionState, guards: Guards) -> None:
        now, settings = self._ports.clock.monotonic(), self._ports.settings
        if now >= self._timers.sweep:
            self._timers.sweep = now + settings.sweep_interval_ms / 1000
            await sweep_orphans(self._ports, state)
        elif now >= self._timers.retention:
            self._timers.retention = now + settings.retention_interval_ms / 1000
            policy = self._policy(state)
            if await apply_retention(self._ports, state, policy, guards) or await self._merge(state, policy, guards):
                self._timers.retention = 0.0  # until there is nothing left to do

    async def _merge(self, state: PartitionState, policy: TierPolicy, guards: Guards) -> bool:
        return state.pointer is not None and await merge_small(self._ports, state, policy, guards)

    def _until(self, idle: Idle, state: PartitionState) -> float:
        upkeep_at = self._timers.sweep if state.pointer is None else min(self._timers.retention, self._timers.sweep)
        upkeep_s = max(0.0, upkeep_at - self._ports.clock.monotonic())
        if idle.until_ms is None:
            return upkeep_s
        return min(upkeep_s, max(0.0, (idle.until_ms - self._ports.clock.wall_ms()) / 1000))

    def _pause_s(self) -> float:
        self._failures += 1
        longest_s = self._ports.settings.retry_ms_max / 1000
        return float(min(longest_s, 0.1 * 2 ** min(self._failures, 20))) * (0.5 + self._ports.random.random() / 2)

    async def _report(self, failure: StratalogError | None) -> None:
        """Say in metadata how it went, at a bounded rate, but never miss that an error is over."""
        now, key = self._ports.clock.monotonic(), tier_status_key(self._topic_id, self._index)
        last = self._ports.metadata.view.find(TierStatus, key)
        text = "" if failure is None else f"{type(failure).__name__}: {failure.message}"
        if last is not None and text == last.last_error and now < self._timers.status:
            return
        self._timers.status = now + _STATUS_INTERVAL_S
        status = TierStatus(
            topic_id=self._topic_id,
            index=self._index,
            worker_id=self._ports.settings.worker_id,
            offloaded_at_ms=self._offloaded_at_ms or (last.offloaded_at_ms if last else 0),
            last_error=text,
            last_error_at_ms=self._ports.clock.wall_ms() if text else 0,
        )
        log = self._ports.metadata.view.get(log_key(self._topic_id, self._index))
        if log is None:
            return
        try:
            still_there = VersionIs(key=log_key(self._topic_id, self._index), version=log.version)
            await self._ports.metadata.propose(Command(updates=(Put(record=status),), requirements=(still_there,)))
        except StratalogError as unreported:
            _log.info("the status of %s was not written: %s", self._lease, unreported)
