"""The partitions that this broker owns: follows the metadata view, takes over assigned partitions, resigns lost ones.

All changes of one command arrive in one turn, so a dead broker's thousand partitions are taken over together. A failed takeover
is retried while this broker is still the owner. Without a session (``suspend``) no partition is served.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Final

from stratalog_bookies.client import LedgerClient
from stratalog_broker.configs.memory import MemoryShares
from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.metrics import TakeoverMetrics
from stratalog_broker.partitions.core import PartitionCore
from stratalog_broker.partitions.deferred_markers import write_deferred_markers
from stratalog_broker.partitions.deleted_partitions import seal_last
from stratalog_broker.partitions.directory import PartitionDirectory
from stratalog_broker.partitions.failed_takeovers import FailedTakeovers
from stratalog_broker.partitions.handover import OutgoingHandovers
from stratalog_broker.partitions.internal_appends import append_now
from stratalog_broker.partitions.internal_topics import ApplicationFactory, Applications, InternalTopicApplication, or_resigned
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.memory import PartitionMemory, follow_log, follow_pointer
from stratalog_broker.partitions.producer_expiry import ProducerExpiry
from stratalog_broker.partitions.roll_schedule import RollSchedule
from stratalog_broker.partitions.takeover import TakenOver, Takeover, identity_of
from stratalog_broker.partitions.takeover_slots import TakeoverSlots
from stratalog_broker.partitions.tier_requests import answer_tier_request
from stratalog_broker.protocol.produce import Leader
from stratalog_core.errors import NotLeader
from stratalog_core.ports import Clock, Random
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import (
    NO_OWNER,
    TOPIC_DEFAULTS_KEY,
    Ledger,
    Log,
    ManifestPointer,
    Partition,
    Record,
    TierRequest,
    Topic,
    TopicPartition,
    Versioned,
    log_key,
    tier_request_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.topic_rules.topic_configs import TopicConfigs
from stratalog_tiering.cold.reader import ColdReader

_log = logging.getLogger(__name__)
_TICK_S: Final = 1.0


class Partitions:
    """All partitions of this broker. A partition is served only after its takeover has finished."""

    def __init__(
        self,
        *,
        settings: BrokerSettings,
        shares: MemoryShares,
        metadata: MetadataClient,
        ledgers: LedgerClient,
        cold: ColdReader,
        clock: Clock,
        random: Random,
    ) -> None:
        self._settings = settings
        self._metadata, self._view = metadata, metadata.view
        self._ledgers, self.cold = ledgers, cold
        self._clock, self._random = clock, random
        self.is_stopping = False
        """The broker is stopping: a request must not begin to wait for records."""
        self._applications = Applications()
        self._logs: dict[TopicPartition, PartitionLog] = {}
        self._by_name: dict[tuple[bytes, int], PartitionLog] = {}
        self._by_id: dict[tuple[bytes, int], PartitionLog] = {}
        self._directory, self._handovers = PartitionDirectory(metadata.view), OutgoingHandovers(metadata)
        self._wanted: dict[TopicPartition, Partition] = {}
        self._wanting_since_s, self._taken = 0.0, 0
        self._taking: set[TopicPartition] = set()
        self._failed = FailedTakeovers(clock, self._take_over_again)
        self._tasks: set[asyncio.Task[None]] = set()
        self.memory = PartitionMemory(ledgers, shares)
        self.takeover_metrics = TakeoverMetrics()
        self._wanted_since_s: dict[TopicPartition, float] = {}
        self._rolls, self._expiry = RollSchedule(), ProducerExpiry(settings.producer_id_expiration_ms)
        self._takeover = Takeover(
            self._view, ledgers, cold, self.memory.indexes, settings.producers_max, settings.checkpoint_part_bytes
        )
        self._slots = TakeoverSlots(metadata.view)
        self.is_suspended = True
        self._unsubscribe = self._view.subscribe(self._on_changes)
        self._ticker: asyncio.TimerHandle | None = None
        self._scheduled: asyncio.Handle | None = None

    def register_application(self, topic: str, factory: ApplicationFactory) -> None:
        """Set the state machine of an internal topic's partitions. Call before the broker starts."""
        self._applications.register(topic, factory)

    # -- lookup ------------------------------------------------------------------------------------------------------

    def find_by_name(self, name: bytes, index: int) -> PartitionLog | None:
        """Return the partition if it is served here; ``name`` is the topic's, in UTF-8."""
        return self._by_name.get((name, index))

    def find_by_id(self, topic_id: bytes, index: int) -> PartitionLog | None:
        """Return the partition if it is served here; ``topic_id`` has sixteen bytes."""
        return self._by_id.get((topic_id, index))

    def find(self, topic_partition: TopicPartition) -> PartitionLog | None:
        """Return the partition if it is served here."""
        return self._logs.get(topic_partition)

    def is_serving(self, topic_partition: TopicPartition) -> bool:
        """Whether this broker owns the partition, has finished taking it over, and is not just releasing it."""
        return (log := self._logs.get(topic_partition)) is not None and not log.is_releasing

    def all(self) -> Collection[PartitionLog]:
        """Return all partitions served here."""
        return self._logs.values()

    @property
    def takeovers_waiting(self) -> int:
        """Number of partitions that this broker owns and has not taken over yet."""
        return len(self._wanted)

    def topic_by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id (sixteen bytes), whichever brokers serve it."""
        return self._directory.topic_by_id(topic_id)

    def topic_by_name(self, name: bytes) -> Topic | None:
        """Return the topic with this name (UTF-8), whichever brokers serve it."""
        return self._directory.topic_by_name(name)

    def leader_of(self, topic_partition: TopicPartition, listener: str) -> Leader | None:
        """See ``PartitionDirectory``."""
        return self._directory.leader_of(topic_partition, listener)

    def end_waiting(self) -> None:
        """Wake all requests that wait for records; from now on requests do not wait."""
        self.is_stopping = True
        for log in self._logs.values():
            log.notify()

    def append_internal(self, topic_partition: TopicPartition, batch: bytearray) -> asyncio.Future[int]:
        """Append one batch; the result is its base offset, when the quorum has it and the partition's application applied it.

        The base offset is set in place. Call and result raise ``NotLeader`` (not owned, or no longer: the batch may or may not
        be stored), ``Overloaded``, ``Unavailable``, ``OutcomeUnknown``.
        """
        log = self._logs.get(topic_partition)
        if log is None:
            raise NotLeader(f"{topic_partition} is not served by broker {self._settings.broker_id}")
        return append_now(log, batch)

    # -- following the view ------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Take over all partitions that this broker owns in the view, because the broker has a session."""
        self.is_suspended = False
        for partition in self._view.all(Partition):
            self._partition_changed(partition)
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def suspend(self) -> None:
        """Stop serving all partitions at once, because the session has ended."""
        self.is_suspended = True
        self._wanted.clear()
        self._wanted_since_s.clear()
        self._failed.forget_all()
        for log in list(self._logs.values()):
            self._drop(log)

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            record = change.after.record if change.after is not None else None
            before = change.before.record if change.before is not None else None
            if isinstance(record, Partition):
                self._partition_changed(record)
            elif isinstance(before, Partition):
                self._partition_gone(identity_of(before))
            elif isinstance(record, Topic):
                self._topic_changed(record)
            elif isinstance(record, Log):
                follow_log(self._by_id.get((record.topic_id.bytes, record.index)), record)
            elif isinstance(record, ManifestPointer):
                follow_pointer(self._by_id.get((record.topic_id.bytes, record.index)), record)
            elif isinstance(record, TierRequest) and change.after is not None:
                self._tier_requested(record, change.after)
            elif change.key == TOPIC_DEFAULTS_KEY:
                self._defaults_changed()
            elif record is None:
                self._record_gone(before)

    def _partition_changed(self, partition: Partition) -> None:
        identity = identity_of(partition)
        mine = partition.owner == self._settings.broker_id and not self.is_suspended
        log = self._logs.get(identity)
        if log is not None and (not mine or log.core.leader_epoch != partition.leader_epoch):
            self._drop(log)
            log = None
        if not mine:
            self._unwant(identity)
        elif log is None:
            self._want(partition)
        else:
            self._follow_next_owner(log, partition)

    def _partition_gone(self, identity: TopicPartition) -> None:
        self._unwant(identity)
        log = self._logs.get(identity)
        if log is not None:
            self._drop(log)
            self._spawn(seal_last(self._ledgers, self._view, identity))

    def _record_gone(self, record: Record | None) -> None:
        if isinstance(record, Ledger):
            self.memory.indexes.drop(record.ledger_id)
        elif isinstance(record, Topic):
            self._directory.forget(record)

    def _defaults_changed(self) -> None:
        for log in list(self._logs.values()):
            log.update_topic(log.topic)

    def _topic_changed(self, topic: Topic) -> None:
        self._directory.put(topic)
        for index in range(topic.partition_count):
            if (log := self._by_id.get((topic.topic_id.bytes, index))) is not None:
                self._unname(log)
                self._by_name[(topic.name.encode(), index)] = log
                log.update_topic(topic)

    def _drop(self, log: PartitionLog) -> None:
        identity = log.topic_partition
        self._logs.pop(identity, None)
        self._unname(log)
        self._by_id.pop((identity.topic_id.bytes, identity.partition), None)
        log.resign()

    def _unname(self, log: PartitionLog) -> None:
        """Find the partition by its topic's name no more. In an archive, another topic may have that name by now."""
        name = log.topic.name.encode(), log.topic_partition.partition
        if self._by_name.get(name) is log:
            del self._by_name[name]

    # -- taking over -------------------------------------------------------------------------------------------------

    def _want(self, partition: Partition) -> None:
        if not self._wanted:
            self._wanting_since_s, self._taken = self._clock.monotonic(), 0
        self._wanted[identity_of(partition)] = partition
        self._wanted_since_s.setdefault(identity_of(partition), self._clock.monotonic())
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._begin_takeovers)

    def _unwant(self, identity: TopicPartition) -> float:
        """Remove the partition from those to take over; return since when (monotonic seconds) it was one of them."""
        self._wanted.pop(identity, None)
        self._failed.forget(identity)
        return self._wanted_since_s.pop(identity, self._clock.monotonic())

    def _begin_takeovers(self) -> None:
        self._scheduled = None
        ready = [one for key, one in self._wanted.items() if key not in self._taking and not self._failed.is_paused(one)]
        self._taking.update(map(identity_of, ready))
        for partition in ready:
            self._spawn(self._take_over(partition))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("a background task of the partitions failed", exc_info=task.exception())

    async def _take_over(self, partition: Partition) -> None:
        identity = identity_of(partition)
        try:
            await self._take_over_once(partition)
        except Exception as failure:
            self.takeover_metrics.takeover_failures += 1
            self._failed.failed(partition, failure, self.topic_by_id(partition.topic_id.bytes))
        finally:
            self._taking.discard(identity)
        self._take_over_again(identity)

    def _take_over_again(self, identity: TopicPartition) -> None:
        """Take the partition over, unless that is not wanted any more or has to pause."""
        partition = self._wanted.get(identity)
        if partition is None or self.is_suspended:
            self._failed.forget(identity)
        elif not self._failed.is_paused(partition):
            self._want(partition)

    def _is_due(self, partition: Partition) -> bool:
        """Whether this broker still has to take over the partition in this epoch."""
        return self._wanted.get(identity_of(partition)) is partition and not self.is_suspended

    async def _take_over_once(self, partition: Partition) -> None:
        topic = self.topic_by_id(partition.topic_id.bytes)
        if topic is None:
            raise NotLeader(f"the topic of {identity_of(partition)} is not known yet")
        async with self._slots.of(partition, is_internal=topic.name in self._applications):
            # This partition may have been reassigned while it was queued. The metadata quorum would refuse the result, but only
            # after all the work, and a broker that lost its session for lack of time would fall behind further.
            if not self._is_due(partition):
                return
            recovered = await self._takeover.recover(partition, topic)
            if not self._is_due(partition):
                return
            taken = await self._takeover.rebuild(partition, topic, recovered, wants_batches=topic.name in self._applications)
            application = await self._applications.load(
                topic.name, partition, taken.application_state, taken.batches, lambda: self._is_due(partition)
            )
        # Nothing is awaited after the application has started: it may write at once.
        if self._is_due(partition):
            # Its configs may have changed during the takeover.
            with or_resigned(application):
                self._serve(self.topic_by_id(partition.topic_id.bytes) or topic, taken, application)
            seconds = self._clock.monotonic() - self._unwant(identity_of(partition))
            self._taken += 1
            self.takeover_metrics.takeovers += 1
            self.takeover_metrics.takeover_seconds.observe(seconds)
            if not self._wanted:
                _log.info("took over %d partitions in %.3f s", self._taken, self._clock.monotonic() - self._wanting_since_s)

    def _serve(self, topic: Topic, taken: TakenOver, application: InternalTopicApplication | None) -> None:
        identity = identity_of(taken.partition)
        core = PartitionCore(
            state=taken.state,
            leader_epoch=taken.partition.leader_epoch,
            log_start_offset=taken.log_start_offset,
            limits=TopicConfigs.in_force(topic, self._view).roll_limits(self._settings.ledger_idle_ms),
            queue_bytes_max=self._settings.partition_queue_bytes,
        )
        log = PartitionLog(
            settings=self._settings, metadata=self._metadata, ledgers=self._ledgers, clock=self._clock, random=self._random,
            topic=topic, topic_partition=identity, core=core, tails=self.memory.tails, indexes=self.memory.indexes,
            application=application, on_lost=self._on_lost, rolls=self._rolls,
        )  # fmt: skip
        write_deferred_markers(self._metadata, log, self._clock, self._spawn)
        if not log.is_serving:
            raise NotLeader(f"{identity} was lost before it was served")
        self._logs[identity] = log
        self._by_name[(topic.name.encode(), identity.partition)] = log
        self._by_id[(identity.topic_id.bytes, identity.partition)] = log
        follow_log(log, self._view.find(Log, log_key(identity.topic_id, identity.partition)))
        request = self._view.get(tier_request_key(identity.topic_id, identity.partition))
        if request is not None and isinstance(request.record, TierRequest):
            self._tier_requested(request.record, request)
        self._follow_next_owner(log, self._view.find(Partition, taken.partition.key()) or taken.partition)
        if taken.more_is_coming and not log.is_leaving:
            log.open_ahead()
        if not log.is_serving:
            raise NotLeader(f"{identity} was lost when it began to be served")

    def _on_lost(self, log: PartitionLog, error: Exception) -> None:
        """Take over a partition again after its writer failed, if this broker still owns it."""
        self._drop(log)
        partition = self._view.find(Partition, log.requirement.key)
        if partition is not None:
            self._partition_changed(partition)

    # -- handing over ------------------------------------------------------------------------------------------------

    def _follow_next_owner(self, log: PartitionLog, partition: Partition) -> None:
        """Start the handover that the controller asked for; one in progress reads the record again before it ends."""
        if partition.next_owner != NO_OWNER and not log.is_leaving:
            self._spawn(self._handovers.hand_over(log))

    # -- tier requests -----------------------------------------------------------------------------------------------

    def _tier_requested(self, request: TierRequest, versioned: Versioned) -> None:
        log = self._by_id.get((request.topic_id.bytes, request.index))
        if log is not None and request.end_offset < 0:
            self._spawn(answer_tier_request(self._metadata, log, versioned))

    # -- time and the end --------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        now_ms = int(self._clock.monotonic() * 1000)
        self._rolls.run(now_ms)
        self._expiry.run((log.core for log in self._logs.values()), now_ms)

    async def seal_all(self, timeout_s: float) -> None:
        """Seal all open ledgers within ``timeout_s``, so that the next owners have nothing to recover."""
        seals = [asyncio.ensure_future(log.seal_all()) for log in self._logs.values() if log.core.open is not None]
        if seals:
            _, late = await asyncio.wait(seals, timeout=timeout_s)
            for seal in late:
                seal.cancel()
            await asyncio.gather(*seals, return_exceptions=True)

    async def close(self) -> None:
        """Stop serving, cancel all tasks and wait for their end."""
        self._unsubscribe()
        if self._ticker is not None:
            self._ticker.cancel()
        logs = list(self._logs.values())
        self.suspend()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._handovers.close()
        await asyncio.gather(*(log.close() for log in logs))
        await self.memory.indexes.close()
