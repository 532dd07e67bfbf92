"""Finds coordinators: key type → internal topic → partition → owner, and this broker's own coordinators by key.

The errors of coordinators are decided here: INVALID_REQUEST for a key type without a coordinator, COORDINATOR_NOT_AVAILABLE
while the topic or a live owner is missing, NOT_COORDINATOR if another broker owns the partition or may own it by now, because
this one has no session, and COORDINATOR_LOAD_IN_PROGRESS while this broker takes it over. Clients wait for a coordinator that
is loading, and look for another one otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Generic

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.coordinator_partition import (
    ApplicationType,
    CoordinatorKind,
    CoordinatorPartition,
    StateType,
)
from stratalog_broker.coordination.routing import partition_of
from stratalog_broker.partitions.internal_topics import InternalPartitions
from stratalog_broker.protocol.errors import KafkaError
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Broker, Partition, Topic, TopicPartition, broker_key, partition_key, topic_key

CREATE_TIMEOUT_S: Final = 10.0
FOUND_AT_ONCE: Final = 1_000
"""Keys of a request that are looked up in one turn of the event loop."""
EnsureInternalTopic = Callable[[str, int, int, float], Awaitable[Topic]]
"""``(name, partitions, copies, timeout_s)``: returns the internal topic, after creating it if it does not exist."""


class Coordinators(Generic[StateType, ApplicationType]):
    """This broker's coordinators of one kind: one for each partition of the kind's topic that the broker owns."""

    def __init__(
        self,
        kind: CoordinatorKind[StateType, ApplicationType],
        broker_id: int,
        view: MetadataView,
        clock: Clock,
        partitions: InternalPartitions,
    ) -> None:
        self.kind = kind
        self._broker_id = broker_id
        self._view = view
        self._clock = clock
        self._partitions = partitions
        self._owned: dict[int, CoordinatorPartition[StateType, ApplicationType]] = {}
        partitions.register_application(kind.topic, self._make)

    def _make(self, index: int) -> CoordinatorPartition[StateType, ApplicationType]:
        def append(batch: bytearray) -> Awaitable[int]:
            return self._partitions.append_internal(TopicPartition(self._topic().topic_id, index), batch)

        made = self._owned[index] = CoordinatorPartition(self.kind, append, self._clock, f"{self.kind.topic}-{index}")
        return made

    def coordinator_of(self, key: str) -> ApplicationType:
        """Return the key's coordinator, if that is this broker.

        Raises ``KafkaError`` COORDINATOR_NOT_AVAILABLE if the topic does not exist, NOT_COORDINATOR, or
        COORDINATOR_LOAD_IN_PROGRESS while the partition is being taken over.
        """
        topic = self._topic()
        found = self._at(topic, partition_of(key, topic.partition_count))
        if isinstance(found, ErrorCode):
            raise KafkaError(found)
        return found

    def _at(self, topic: Topic, index: int) -> ApplicationType | ErrorCode:
        """Return the partition's application, or the code with which its requests are refused."""
        if self._partitions.is_suspended or not self._is_mine(topic, index):
            return ErrorCode.not_coordinator
        owned = self._owned.get(index)
        is_serving = self._partitions.is_serving(TopicPartition(topic.topic_id, index))
        if owned is None or owned.application is None or not is_serving:
            return ErrorCode.coordinator_load_in_progress
        return owned.application

    def _is_mine(self, topic: Topic, index: int) -> bool:
        """Whether this broker owns the partition in its view."""
        partition = self._view.find(Partition, partition_key(topic.topic_id, index))
        return partition is not None and partition.owner == self._broker_id

    def _topic(self) -> Topic:
        topic = self._view.find(Topic, topic_key(self.kind.topic))
        if topic is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"{self.kind.topic} does not exist: find the coordinator")
        return topic

    def loaded(self) -> Iterator[ApplicationType]:
        """Yield the loaded coordinators."""
        return (owned.application for owned in list(self._owned.values()) if owned.application is not None)

    @property
    def unreadable_records(self) -> int:
        """Number of records that the loaded coordinators skipped because they could not read them."""
        return sum(owned.unreadable_records for owned in self._owned.values() if owned.application is not None)

    @property
    def is_loading(self) -> bool:
        """Whether this broker owns a partition of the topic that it does not serve yet."""
        topic = self._view.find(Topic, topic_key(self.kind.topic))
        if topic is None:
            return False
        mine = (index for index in range(topic.partition_count) if self._is_mine(topic, index))
        return any(isinstance(self._at(topic, index), ErrorCode) for index in mine)


class CoordinatorLocator:
    """Created after ``Partitions`` and before they start. Every kind of coordinator is added to it once."""

    def __init__(
        self,
        broker_id: int,
        view: MetadataView,
        clock: Clock,
        partitions: InternalPartitions,
        ensure_internal_topic: EnsureInternalTopic,
    ) -> None:
        self._broker_id = broker_id
        self._view = view
        self._clock = clock
        self._partitions = partitions
        self._ensure_internal_topic = ensure_internal_topic
        self._kinds: dict[int, CoordinatorKind[Any, Any]] = {}

    def add(self, kind: CoordinatorKind[StateType, ApplicationType]) -> Coordinators[StateType, ApplicationType]:
        """Serve this kind; return its coordinators on this broker."""
        self._kinds[kind.key_type] = kind
        return Coordinators(kind, self._broker_id, self._view, self._clock, self._partitions)

    async def find(self, key_type: int, keys: Sequence[str]) -> list[Broker | KafkaError]:
        """Return for each key the broker that coordinates it. Creates the topic if it does not exist.

        Errors are INVALID_REQUEST for a key type that is not served, as Kafka answers one that it does not know, and
        COORDINATOR_NOT_AVAILABLE while the topic cannot be created or the partition has no live owner.
        """
        try:
            topic = await self._created(self._served(key_type))
        except KafkaError as refused:
            return [refused] * len(keys)
        found = list[Broker | KafkaError]()
        for number, key in enumerate(keys, start=1):
            if number % FOUND_AT_ONCE == 0:
                await asyncio.sleep(0)
            try:
                found.append(self._owner_of(topic, key))
            except KafkaError as refused:
                found.append(refused)
        return found

    def _served(self, key_type: int) -> CoordinatorKind[Any, Any]:
        kind = self._kinds.get(key_type)
        if kind is None:
            served = ", ".join(map(str, sorted(self._kinds)))
            raise KafkaError(ErrorCode.invalid_request, f"coordinators of key type {key_type} are not served; served: {served}")
        return kind

    async def _created(self, kind: CoordinatorKind[Any, Any]) -> Topic:
        """Return the topic of a kind, created if it does not exist. Raises ``KafkaError`` COORDINATOR_NOT_AVAILABLE."""
        try:
            return await self._ensure_internal_topic(kind.topic, kind.partition_count, kind.copies, CREATE_TIMEOUT_S)
        except (KafkaError, StratalogError) as failure:
            # The client must retry, whatever the reason.
            raise KafkaError(ErrorCode.coordinator_not_available, failure.message) from failure

    def owner(self, key_type: int, key: str) -> Broker:
        """Return the broker that coordinates a key of a served type, without creating the topic.

        Raises ``KafkaError`` COORDINATOR_NOT_AVAILABLE while the topic or a live owner of the partition is missing.
        """
        return self._owner_of(self._topic_of(key_type), key)

    def _topic_of(self, key_type: int) -> Topic:
        name = self._kinds[key_type].topic
        topic = self._view.find(Topic, topic_key(name))
        if topic is None:
            raise KafkaError(ErrorCode.coordinator_not_available, f"{name} does not exist: find the coordinator")
        return topic

    def partition(self, key_type: int, key: str) -> tuple[str, int]:
        """Return topic and index of the partition that has a key's state. Raises ``KafkaError`` COORDINATOR_NOT_AVAILABLE."""
        topic = self._topic_of(key_type)
        return topic.name, partition_of(key, topic.partition_count)

    async def created_partition(self, key_type: int, key: str) -> tuple[str, int]:
        """Return what ``partition`` returns. Creates the topic if it does not exist."""
        topic = await self._created(self._kinds[key_type])
        return topic.name, partition_of(key, topic.partition_count)

    def _owner_of(self, topic: Topic, key: str) -> Broker:
        index = partition_of(key, topic.partition_count)
        partition = self._view.find(Partition, partition_key(topic.topic_id, index))
        owner = self._view.find(Broker, broker_key(partition.owner)) if partition is not None else None
        if owner is None or (owner.broker_id == self._broker_id and self._partitions.is_suspended):
            raise KafkaError(ErrorCode.coordinator_not_available, f"partition {index} of {topic.name} has no live owner")
        return owner
