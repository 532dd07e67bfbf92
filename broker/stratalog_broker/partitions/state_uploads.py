"""Stores the states of this broker's coordinators in the bucket, so that positions of groups survive the loss of all else.

A round looks at the partitions of internal topics that this broker serves. One whose high watermark has moved since its state
was stored last costs one write; any other costs nothing. After a takeover the first round in which a partition has any state
lists what is stored, so that what an earlier owner did not come to store is stored now.

A state holds confirmed batches only, so everything stored was durable, and no later owner's log contradicts it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from stratalog_broker.metrics import StateUploadMetrics
from stratalog_broker.partitions.log import PartitionLog
from stratalog_core.errors import Invalid, Refused, StratalogError, Unavailable
from stratalog_core.ports import Clock
from stratalog_core.restarting import restarting
from stratalog_tiering.format.coordinator_state import CoordinatorState
from stratalog_tiering.format.object_keys import StateKey
from stratalog_tiering.offload.coordinator_states import CoordinatorStates

_log = logging.getLogger(__name__)


class _Stored(NamedTuple):
    """The bucket's content of a partition: everything below ``offset``, in these places, the newest first."""

    offset: int
    places: Sequence[StateKey]


class StateUploads:
    """``served`` are the partitions that this broker serves, those of ordinary topics included."""

    def __init__(
        self, served: Callable[[], Collection[PartitionLog]], states: CoordinatorStates, clock: Clock, interval_ms: int
    ) -> None:
        self._served = served
        self._states = states
        self._clock = clock
        self._interval_ms = interval_ms
        self._stored: dict[PartitionLog, _Stored] = {}
        self._running: asyncio.Task[None] | None = None
        self.uploaded = StateUploadMetrics()

    def metrics(self) -> list[StateUploadMetrics]:
        """For a scrape."""
        self.uploaded.partitions_waiting = sum(self._is_due(log) for log in self._coordinators())
        return [self.uploaded]

    def start(self) -> None:
        """Run a round after each interval."""
        self._running = asyncio.get_running_loop().create_task(restarting(self._run, "the upload of coordinators' states"))

    async def close(self) -> None:
        """Stop, and wait for the end of a running round."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_ms / 1000)
            await self.run_round()

    async def run_round(self) -> None:
        """Store each state that has changed. A failure is logged and counted; the next round tries again."""
        serving = self._coordinators()
        self._stored = {log: self._stored[log] for log in serving if log in self._stored}
        for log in serving:
            try:
                if self._is_due(log):
                    await self._store(log)
            except StratalogError as failure:
                self.uploaded.failures += 1
                name = f"{log.topic.name}-{log.topic_partition.partition}"
                _log.warning("the state of %s is not in the bucket: %s", name, failure)
                self._stored.pop(log, None)  # a write may have taken effect: list again
                if isinstance(failure, Invalid | Refused | Unavailable):
                    return  # it concerns all of them
            except Exception:
                self.uploaded.failures += 1
                _log.exception("the state of %s-%d is not in the bucket", log.topic.name, log.topic_partition.partition)
                self._stored.pop(log, None)

    def _coordinators(self) -> list[PartitionLog]:
        return [log for log in self._served() if log.application is not None and log.is_serving]

    def _is_due(self, log: PartitionLog) -> bool:
        stored = self._stored.get(log)
        return log.core.high_watermark > (stored.offset if stored is not None else 0)

    async def _store(self, log: PartitionLog) -> None:
        topic, partition = log.topic.name, log.topic_partition.partition
        cluster_id, owner_number = await self._states.owner()
        stored = self._stored.get(log)
        if stored is None:
            stored = _Stored(0, await self._states.stored(topic, partition))
            mine = StateKey(topic, partition, owner_number, log.core.leader_epoch, log.core.high_watermark)
            if stored.places and _covers(stored.places[0], mine):
                self._stored[log] = stored._replace(offset=stored.places[0].offset)
                return
        if not log.is_serving:
            return
        state = CoordinatorState(
            cluster_id=cluster_id, owner_number=owner_number, topic=topic, topic_id=log.topic_partition.topic_id,
            partition=partition, partition_count=log.topic.partition_count, replication_factor=log.topic.replication_factor,
            configs=log.topic.configs, leader_epoch=log.core.leader_epoch, taken_at_ms=self._clock.wall_ms(),
            checkpoint=log.completed(log.core.checkpoint()),
        )  # fmt: skip
        places = await self._states.put(state, stored.places)
        self.uploaded.uploads += 1
        self._stored[log] = _Stored(state.checkpoint.offset, places)


def _covers(newest: StateKey, mine: StateKey) -> bool:
    """Whether the newest stored state is a later owner's, or what this owner would store."""
    return newest >= mine or (newest.owner_number, newest.offset) == (mine.owner_number, mine.offset)
