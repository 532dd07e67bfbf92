"""Lookup of topics and leaders in the metadata view, whichever broker serves them."""

from __future__ import annotations

from stratalog_broker.protocol.produce import Leader
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Broker, Partition, Topic, TopicPartition, broker_key, partition_key, topic_key


class PartitionDirectory:
    """Keeps an index of topics by id, because the view finds them by name only."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._topics: dict[bytes, Topic] = {}
        self._topics_index = -1

    def topic_by_id(self, topic_id: bytes) -> Topic | None:
        """Return the topic with this id (sixteen bytes), whichever brokers serve it."""
        topic = self._known(topic_id)
        view = self._view
        if topic is None and self._topics_index != view.index:
            self._topics_index = view.index
            self._topics = {record.topic_id.bytes: record for record in view.all(Topic)}
            topic = self._known(topic_id)
        return topic

    def _known(self, topic_id: bytes) -> Topic | None:
        """Return the indexed topic, unless its name is another topic's by now: ``forget`` is not called if the view learns of
        a deletion and the next creation in one change.
        """
        known = self._topics.get(topic_id)
        current = self._view.find(Topic, topic_key(known.name)) if known is not None else None
        return current if current is not None and current.topic_id.bytes == topic_id else None

    def topic_by_name(self, name: bytes) -> Topic | None:
        """Return the topic with this name (UTF-8), whichever brokers serve it."""
        return self._view.find(Topic, topic_key(str(name, "utf-8", "replace")))

    def leader_of(self, topic_partition: TopicPartition, listener: str) -> Leader | None:
        """Return a partition's live owner, with its address for clients of ``listener``; None if there is none."""
        key = partition_key(topic_partition.topic_id, topic_partition.partition)
        partition = self._view.find(Partition, key)
        broker = self._view.find(Broker, broker_key(partition.owner)) if partition is not None else None
        if partition is None or broker is None:
            return None
        return Leader(broker.broker_id, partition.leader_epoch, *broker.address_for(listener), broker.rack)

    def put(self, topic: Topic) -> None:
        """Store a topic's new record."""
        self._topics[topic.topic_id.bytes] = topic

    def forget(self, topic: Topic) -> None:
        """Remove a deleted topic."""
        self._topics.pop(topic.topic_id.bytes, None)
