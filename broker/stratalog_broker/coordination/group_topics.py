"""Resolves the topics of group requests: named in older versions, identified by id in newer ones. Groups store names."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.partitions.ownership import Partitions
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import Topic, topic_key


@dataclass(frozen=True, slots=True)
class TopicName:
    """A topic of a request, with its id if it has one; ``error`` is set if the topic does not exist."""

    name: str
    topic_id: UUID | None
    error: ErrorCode = ErrorCode.none
    partition_count: int = 0

    def error_of(self, partition: int) -> ErrorCode:
        """Return the topic's error, or whether the partition does not exist."""
        if self.error is not ErrorCode.none or 0 <= partition < self.partition_count:
            return self.error
        return ErrorCode.unknown_topic_or_partition


def resolve_topic(view: MetadataView, partitions: Partitions, topic: Any, *, by_id: bool) -> TopicName:
    """Return the topic to which an element of a request refers."""
    if by_id:
        known = topic_by_id(partitions, topic.topic_id)
        if known is None:
            return TopicName("", topic.topic_id, ErrorCode.unknown_topic_id)
        return TopicName(known.name, topic.topic_id, partition_count=known.partition_count)
    known = view.find(Topic, topic_key(topic.name))
    if known is None:
        return TopicName(topic.name, None, ErrorCode.unknown_topic_or_partition)
    return TopicName(topic.name, known.topic_id, partition_count=known.partition_count)


def refuse_topics(topics: Iterable[TopicName], denied: Container[str]) -> list[TopicName]:
    """Return the topics; those whose names are ``denied`` have TOPIC_AUTHORIZATION_FAILED."""
    return [replace(topic, error=ErrorCode.topic_authorization_failed) if topic.name in denied else topic for topic in topics]


def topic_by_id(partitions: Partitions, topic_id: UUID | None) -> Topic | None:
    """Return the topic with this id, whichever broker owns it; None if it is unknown or the id is None."""
    return partitions.topic_by_id(topic_id.bytes) if topic_id is not None else None
