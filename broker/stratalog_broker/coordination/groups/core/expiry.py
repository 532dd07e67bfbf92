"""Expiry of committed offsets (KIP-211): offsets expire when they have been unused for the retention time.

In a group without members the time counts from when it became empty or from the commit, whichever is later; in a group that
never had members, from the commit. In a stable consumer group only offsets of topics without a subscriber expire.

Difference from Apache Kafka: there, in a group of the consumer protocol it counts from the commit even if the last member has
just left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup
from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.groups.core.records import CommittedOffset, subscribed_topics
from stratalog_broker.coordination.groups.core.store import TopicPartitionName

CONSUMER_PROTOCOL: Final = "consumer"


def topics_wanted_by(group: Group) -> frozenset[str] | None:
    """Return the topics to which the members of a consumer group subscribe, or None if a subscription is unreadable."""
    topics: set[str] = set()
    for member in group.membership.members.values():
        for _, metadata in member.protocols:
            wanted = subscribed_topics(metadata)
            if wanted is None:
                return None
            topics |= wanted
    return frozenset(topics)


def expired_offsets(
    group: Group | None, offsets: Mapping[TopicPartitionName, CommittedOffset], horizon_ms: int
) -> list[TopicPartitionName]:
    """Return the offsets of a classic group, or of none, that were last in use at or before ``horizon_ms`` (wall time)."""
    old = [name for name, committed in offsets.items() if committed.committed_at_ms <= horizon_ms]
    if not old or group is None or not group.protocol_type:
        return old
    if group.state is GroupState.EMPTY:
        return old if group.state_since_ms <= horizon_ms else []
    if group.state is not GroupState.STABLE or group.protocol_type != CONSUMER_PROTOCOL:
        return []
    wanted = topics_wanted_by(group)
    return [] if wanted is None else [name for name in old if name[0] not in wanted]


def expired_in_consumer_group(
    group: ConsumerGroup, offsets: Mapping[TopicPartitionName, CommittedOffset], horizon_ms: int
) -> list[TopicPartitionName]:
    """Return the offsets of a group of the consumer protocol that were last in use at or before ``horizon_ms`` (wall time)."""
    if not group.state.members and group.state.assigned_at_ms > horizon_ms:  # its last member left then
        return []
    old = [name for name, committed in offsets.items() if committed.committed_at_ms <= horizon_ms]
    wanted = {topic for topic in {topic for topic, _ in old} if group.is_subscribed_to(topic)}
    return [name for name in old if name[0] not in wanted]
