"""Refusals of administrative commands: one class for each thing that the caller must correct. They name no Kafka code.

Other failures are errors of ``stratalog_core.errors``: ``NotFound`` for a topic that does not exist, failures of the quorum.
"""

from __future__ import annotations

from stratalog_core.errors import Invalid, OutcomeUnknown
from stratalog_core.moments import utc_text


class InvalidTopic(Invalid):
    """The name breaks Kafka's rule, or the command is not for internal topics."""


class TopicExists(Invalid):
    """Another topic has the name."""


class InvalidPartitions(Invalid):
    """The number of partitions is out of bounds."""


class InvalidReplicationFactor(Invalid):
    """The number of copies is out of bounds."""


class InvalidAssignment(Invalid):
    """A replica assignment does not fit the partitions or the live brokers."""


class InvalidConfig(Invalid):
    """A config's name or value is refused."""


class InvalidFeatureLevel(Invalid):
    """A feature does not exist, or does not have the level."""


class NoReassignment(Invalid):
    """The partition is not being reassigned."""


class ElectionNotNeeded(Invalid):
    """The partition's leader is the one that an election would choose."""


class PreferredLeaderUnavailable(Invalid):
    """The preferred leader is dead, leaves, or did not get the partition."""


class NoEligibleLeader(Invalid):
    """No broker can lead the partition now."""


class BrokerNotRegistered(Invalid):
    """The metadata has no broker with the id."""


class LimitExceeded(Invalid):
    """The cluster would have too many topics or partitions, or one request creates too many."""


class Protected(Invalid):
    """The topic is protected against deletion."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"topic {name!r} is protected against deletion; lift it with"
            f" `stratalog topic config {name} --set stratalog.deletion.protection=false`"
        )


class ObjectsLocked(Invalid):
    """Objects of the topic's history are locked in the object store. ``until_ms`` is the wall time of the last lock's end."""

    def __init__(self, what: str, mode: str, until_ms: int) -> None:
        super().__init__(f"{what} in the object store until {utc_text(until_ms)} ({mode}): delete them after that")


class OnlyCompacted(Invalid):
    """Records of the topic are deleted by compaction alone."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"topic {name!r} has cleanup.policy=compact: delete a record by a tombstone, or set cleanup.policy=compact,delete"
        )


class OffsetOutOfRange(Invalid):
    """The offset is not within the partition's readable records."""


class NotServedYet(OutcomeUnknown):
    """The change is committed, but this broker's view does not show it, or shows partitions without an owner."""
