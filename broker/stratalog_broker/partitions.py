"""The partitions that this broker owns (skeleton; grows into the registry)."""

from __future__ import annotations

from stratalog_broker.internal_topics import ApplicationFactory
from stratalog_core.ids import TopicPartition


class Partitions:
    """Partitions by id. An owner serves only once takeover has finished."""

    def __init__(self) -> None:
        self._applications: dict[str, ApplicationFactory] = {}

    def register_application(self, topic: str, factory: ApplicationFactory) -> None:
        """Say which state machine partitions of an internal topic feed; before the broker starts."""
        self._applications[topic] = factory

    def is_serving(self, topic_partition: TopicPartition) -> bool:
        """Whether this broker owns the partition and has finished taking it over."""
        raise NotImplementedError

    async def append_internal(self, topic_partition: TopicPartition, batch: bytearray) -> int:
        """Append one batch (its base offset is set in place) and return its base offset once the quorum has it and the
        partition's application has applied it.

        Raises ``NotLeader`` (not ours, or not any more: nothing is known of the batch), ``Overloaded``, ``Unavailable``,
        ``OutcomeUnknown``.
        """
        raise NotImplementedError
