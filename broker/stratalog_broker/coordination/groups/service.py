"""Consumer groups of one broker: finds a group's coordinator, on this broker or another, and creates the applications.

A group belongs to one partition of ``__consumer_offsets``; its coordinator is that partition's owner. The topic is created
by the first request for a coordinator.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.configs.settings import BrokerSettings
from stratalog_broker.coordination.groups.application import GroupApplication
from stratalog_broker.coordination.groups.core.group_table import CoordinatorLimits
from stratalog_broker.coordination.groups.core.messages import GroupLimits
from stratalog_broker.coordination.routing import partition_of
from stratalog_broker.partitions.internal_topics import CONSUMER_OFFSETS
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Broker, Partition, Topic, TopicPartition, broker_key, partition_key, topic_key
from stratalog_metadata.state.changes import Change

CREATE_TIMEOUT_S: Final = 10.0
SWEEP_INTERVAL_S: Final = 600.0
_log = logging.getLogger(__name__)
EnsureInternalTopic = Callable[[str, int, int, float], Awaitable[Topic]]
"""``(name, partitions, copies, timeout_s)``: returns the internal topic, after creating it if it does not exist."""


def limits_of(settings: BrokerSettings) -> CoordinatorLimits:
    """Return the bounds of groups from the broker's settings."""
    return CoordinatorLimits(
        group=GroupLimits(
            members_max=settings.group_members_max,
            session_timeout_ms_min=settings.group_session_timeout_min_ms,
            session_timeout_ms_max=settings.group_session_timeout_max_ms,
            initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
        ),
        groups_max=settings.groups_max,
        offsets_max=settings.group_offsets_max,
        offsets_retention_ms=settings.offsets_retention_ms,
    )


class GroupService:
    """One per broker, created after ``Partitions`` and before they start; registers itself for ``__consumer_offsets``."""

    def __init__(
        self,
        settings: BrokerSettings,
        metadata: MetadataClient,
        clock: Clock,
        partitions: Partitions,
        ensure_internal_topic: EnsureInternalTopic,
    ) -> None:
        self._settings = settings
        self._metadata = metadata
        self._view = metadata.view
        self._clock = clock
        self._partitions = partitions
        self._ensure_internal_topic = ensure_internal_topic
        self._limits = limits_of(settings)
        self._applications: dict[int, GroupApplication] = {}
        partitions.register_application(CONSUMER_OFFSETS, self._make_application)
        self._unsubscribe = metadata.view.subscribe(self._on_changes)
        self._sweeping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a periodic search for offsets of topics that were deleted while the group had no coordinator."""
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep_for_ever())

    def close(self) -> None:
        self._unsubscribe()
        if self._sweeping is not None:
            self._sweeping.cancel()

    def _make_application(self, index: int) -> GroupApplication:
        async def append(batch: bytearray) -> int:
            return await self._partitions.append_internal(self._topic_partition(index), batch)

        application = GroupApplication(append, self._clock, self._limits, f"{CONSUMER_OFFSETS}-{index}")
        self._applications[index] = application
        return application

    def _topic_partition(self, index: int) -> TopicPartition:
        return TopicPartition(self._topic().topic_id, index)

    def _topic(self) -> Topic:
        topic = self._view.find(Topic, topic_key(CONSUMER_OFFSETS))
        if topic is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"{CONSUMER_OFFSETS} does not exist: find the coordinator")
        return topic

    def coordinator_of(self, group_id: str) -> GroupApplication:
        """Return the group's coordinator, if that is this broker.

        Raises ``KafkaError`` COORDINATOR_NOT_AVAILABLE if ``__consumer_offsets`` does not exist, NOT_COORDINATOR, or
        COORDINATOR_LOAD_IN_PROGRESS while the partition is being taken over.
        """
        return self._coordinator_at(partition_of(group_id, self._topic().partition_count))

    def _coordinator_at(self, index: int) -> GroupApplication:
        topic = self._topic()
        partition = self._view.find(Partition, partition_key(topic.topic_id, index))
        if partition is None or partition.owner != self._settings.broker_id:
            raise KafkaError(ErrorCode.not_coordinator)
        application = self._applications.get(index)
        is_serving = self._partitions.is_serving(TopicPartition(topic.topic_id, index))
        if application is None or not application.is_loaded or not is_serving:
            raise KafkaError(ErrorCode.coordinator_load_in_progress)
        return application

    def coordinators(self) -> Iterator[GroupApplication]:
        """Yield the loaded coordinators of this broker."""
        return (application for application in list(self._applications.values()) if application.is_loaded)

    @property
    def unreadable_records(self) -> int:
        """Number of unreadable records of ``__consumer_offsets`` that this broker's coordinators skipped."""
        return sum(application.unreadable_records for application in self.coordinators())

    @property
    def is_loading(self) -> bool:
        """Whether this broker owns a coordinator partition that it does not serve yet."""
        topic = self._view.find(Topic, topic_key(CONSUMER_OFFSETS))
        for index in range(topic.partition_count if topic is not None else 0):
            try:
                self._coordinator_at(index)
            except KafkaError as refused:
                if refused.code is ErrorCode.coordinator_load_in_progress:
                    return True
        return False

    async def find(self, group_id: str) -> Broker:
        """Return the broker that coordinates a group. Creates ``__consumer_offsets`` if it does not exist.

        Raises ``KafkaError`` COORDINATOR_NOT_AVAILABLE while the partition has no live owner.
        """
        settings = self._settings
        topic = await self._ensure_internal_topic(
            CONSUMER_OFFSETS, settings.offsets_topic_partitions, settings.offsets_topic_replication_factor, CREATE_TIMEOUT_S
        )
        index = partition_of(group_id, topic.partition_count)
        partition = self._view.find(Partition, partition_key(topic.topic_id, index))
        owner = self._view.find(Broker, broker_key(partition.owner)) if partition is not None else None
        if owner is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"partition {index} of {CONSUMER_OFFSETS} has no live owner")
        return owner

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            try:
                await self.sweep()
            except StratalogError as failure:
                _log.info("offsets of deleted topics were not looked for: %s", failure)

    async def sweep(self) -> None:
        """Remove offsets of topics that do not exist, by a linearizable read, because the view may be stale.

        Only names and ids that had offsets before the read are checked: a topic may be created, and offsets committed for it,
        after the read.
        """
        committed = {application: application.topics() for application in self.coordinators()}
        names = sorted({name for topics in committed.values() for name, _ in topics})
        stored = await self._metadata.read([topic_key(name) for name in names]) if names else []
        topics = {name: found.record for name, found in zip(names, stored, strict=True) if found is not None}
        for application, found_here in committed.items():
            for name, topic_id in found_here:
                topic = topics.get(name)
                if not isinstance(topic, Topic) or topic_id not in (None, topic.topic_id):
                    application.forget_topic(name, (topic_id,))

    def _on_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if change.after is None and change.before is not None and isinstance(change.before.record, Topic):
                topic = change.before.record
                for application in self.coordinators():
                    application.forget_topic(topic.name, (topic.topic_id, None))
