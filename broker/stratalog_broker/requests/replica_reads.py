"""Fetches from the closest replica (KIP-392), for history that is only in the object store.

The owner names a reported replica in the client's rack. That broker reads the history through the manifest, with its own
cache and its own limits, and owns nothing. Outside the history it answers NOT_LEADER_OR_FOLLOWER, and clients return to the
owner, which decides. It never answers OFFSET_OUT_OF_RANGE: librdkafka then resets its position, unless the offset is above
the high watermark in the response.

Only clients that send the owner's epoch take part. The epoch proves that they know who the owner is: a client that takes this
broker for the owner must not be served history and then be refused. Clients without a rack never get here.

The metadata view says what is history and what was deleted. It is usually a round trip behind. Before a read it is refreshed
if that was last done ``FRESH_S`` ago, so that a broker whose view stands still serves nothing that was deleted before.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.cluster.replicas import replicas_of
from stratalog_broker.metrics import ReplicaReadMetrics
from stratalog_broker.partitions.log import PartitionLog
from stratalog_broker.partitions.ownership import Partitions
from stratalog_broker.protocol.fetch_request import FetchWanted
from stratalog_broker.reads.readable_log import ColdHistory, cold_history
from stratalog_core.ports import Clock
from stratalog_core.single_flight import SingleFlight
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Broker, Partition, Topic, TopicPartition, partition_key

FRESH_S: Final = 2.0
_NO_REPLICA: Final = -1


class ReplicaReads:
    """One instance per broker."""

    def __init__(self, broker_id: int, rack: str, metadata: MetadataClient, partitions: Partitions, clock: Clock) -> None:
        self._broker_id = broker_id
        self._rack = rack.encode()
        self._metadata, self._view = metadata, metadata.view
        self._partitions = partitions
        self._clock = clock
        self._brokers: dict[int, Broker] = {}
        self._brokers_index = -1
        self._refreshes: SingleFlight[None, None] = SingleFlight()
        self._fresh_until_s = -1.0
        self.metrics = ReplicaReadMetrics()

    # -- as the owner ----------------------------------------------------------------------------------------------------

    def preferred_replica(self, one: FetchWanted, log: PartitionLog, rack: bytes) -> int:
        """Return the broker that should serve ``one`` to a client in ``rack``; -1: the owner itself."""
        if rack == self._rack or not _takes_part(one) or log.topic.internal:
            return _NO_REPLICA
        history = cold_history(self._view, log.topic_partition)
        if history is None or not history.core.log_start_offset <= one.offset < history.core.end_offset:
            return _NO_REPLICA
        return self._replica_in(rack, log)

    def _replica_in(self, rack: bytes, log: PartitionLog) -> int:
        brokers = self._live_brokers()
        partition = self._partition(log.topic_partition)
        assigned = partition.replicas if partition is not None else ()
        replicas = replicas_of(self._broker_id, assigned, list(brokers), log.topic.replication_factor)
        near = [replica for replica in replicas if replica in brokers and brokers[replica].rack.encode() == rack]
        if not near:
            return _NO_REPLICA
        # Several brokers of one rack share the partitions; those who read one partition share a cache.
        return near[log.topic_partition.partition % len(near)]

    def _live_brokers(self) -> dict[int, Broker]:
        """Return the brokers that run and are not about to stop, by id, sorted."""
        if self._brokers_index != self._view.index:
            self._brokers_index = self._view.index
            live = (broker for broker in self._view.all(Broker) if not broker.stopping)
            self._brokers = {broker.broker_id: broker for broker in sorted(live, key=lambda broker: broker.broker_id)}
        return self._brokers

    def _partition(self, topic_partition: TopicPartition) -> Partition | None:
        return self._view.find(Partition, partition_key(topic_partition.topic_id, topic_partition.partition))

    # -- as a replica ----------------------------------------------------------------------------------------------------

    def history_for(self, one: FetchWanted, topic: Topic) -> tuple[ErrorCode, ColdHistory | None]:
        """Return the history that serves ``one``, or the error code for a client that has to ask the owner."""
        elsewhere = ErrorCode.not_leader_or_follower, None
        if not _takes_part(one) or topic.internal or self._partitions.is_suspended:
            return elsewhere
        topic_partition = TopicPartition(topic.topic_id, one.index)
        partition, history = self._partition(topic_partition), cold_history(self._view, topic_partition)
        if partition is None or history is None or partition.owner == self._broker_id:
            return elsewhere
        if one.leader_epoch != partition.leader_epoch:
            is_old = one.leader_epoch < partition.leader_epoch
            return ErrorCode.fenced_leader_epoch if is_old else ErrorCode.unknown_leader_epoch, None
        if not history.core.log_start_offset <= one.offset < history.core.end_offset:
            return elsewhere
        return ErrorCode.none, history

    @property
    def is_fresh(self) -> bool:
        """Whether the view was refreshed lately."""
        return self._clock.monotonic() < self._fresh_until_s

    async def refresh(self, timeout_s: float) -> None:
        """Refresh the view, for all fetches that wait for it. Raises ``Unavailable``."""
        await self._refreshes.get(None, self._refresh, timeout_s)

    async def _refresh(self) -> None:
        asked_s = self._clock.monotonic()
        await self._metadata.refresh()
        self._fresh_until_s = asked_s + FRESH_S

    async def close(self) -> None:
        """Cancel a refresh in progress."""
        await self._refreshes.close()


def _takes_part(one: FetchWanted) -> bool:
    """Whether the client knows the owner's epoch. Epochs of its last record are compared by the owner only."""
    return one.leader_epoch >= 0 and one.last_epoch < 0
