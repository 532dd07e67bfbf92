"""Topics of a cluster that a test changes by hand, as coordinators of groups see them."""

from __future__ import annotations

from uuid import UUID

from stratalog_broker.configs.linear_pattern import LinearPattern
from stratalog_broker.coordination.groups.core.consumer.model import Partition, TopicInfo, Topics


class KnownTopics:
    """Implements ``Topics``."""

    def __init__(self, **partition_counts: int) -> None:
        self.version = 0
        self._topics: dict[str, TopicInfo] = {}
        self._created = 0
        for name, count in partition_counts.items():
            self.create(name, count)

    def create(self, name: str, partition_count: int) -> UUID:
        """Create a topic, under a new id if it existed; return the id."""
        self._created += 1
        self._topics[name] = TopicInfo(name, UUID(int=self._created), partition_count)
        self.version += 1
        return self._topics[name].topic_id

    def grow(self, name: str, partition_count: int) -> None:
        self._topics[name] = self._topics[name]._replace(partition_count=partition_count)
        self.version += 1

    def delete(self, name: str) -> None:
        del self._topics[name]
        self.version += 1

    def partitions_of(self, *names: str) -> set[Partition]:
        found = [self._topics[name] for name in names]
        return {(topic.topic_id, index) for topic in found for index in range(topic.partition_count)}

    # -- Topics

    def find(self, name: str) -> TopicInfo | None:
        return self._topics.get(name)

    def matching(self, pattern: str) -> frozenset[str]:
        return frozenset(filter(LinearPattern(pattern).matches, self._topics))


NO_TOPICS: Topics = KnownTopics()
