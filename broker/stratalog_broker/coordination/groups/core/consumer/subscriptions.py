"""The topics to which a group's members subscribe, and the assignment of their partitions."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from stratalog_broker.coordination.groups.core.consumer.assignors import ASSIGNORS, MemberSpec
from stratalog_broker.coordination.groups.core.consumer.model import Partitions, TopicInfo, Topics
from stratalog_broker.coordination.groups.core.consumer.requests import MayDescribe
from stratalog_broker.coordination.groups.core.consumer.tracked_state import TrackedState
from stratalog_broker.coordination.wake_times import NEVER_MS, Instant
from stratalog_core.errors import Invalid

REFRESH_MS: Final = 600_000
"""The topics that match a pattern are found again after this time, in case permissions have changed; Kafka's default."""
_HASH_BYTES: Final = 8
_Subscription = tuple[tuple[str, ...], str]


class Subscriptions:
    """Reads a group's members and the cluster's topics; changes neither."""

    def __init__(self, state: TrackedState, topics: Topics) -> None:
        self._state = state
        self._topics = topics
        self._seen_version = -1
        self._refresh_at_ms = NEVER_MS
        self._hidden: frozenset[str] = frozenset()
        """Topics that match a pattern, but that the member which caused the last ``refresh`` may not describe."""

    def is_current(self, now: Instant) -> bool:
        """Return whether no topic of the cluster has changed since the last ``refresh``, nor may permissions have."""
        return self._topics.version == self._seen_version and now.monotonic_ms < self._refresh_at_ms

    @property
    def have_patterns(self) -> bool:
        return any(member.topic_pattern for member in self._state.members.values())

    def are_resolved(self, now: Instant) -> bool:
        """Return whether the topics of all members are known; those of patterns have to be current."""
        return self.is_current(now) or not self.have_patterns

    def refresh(self, may_describe: MayDescribe | None, now: Instant) -> None:
        """Take notice of all topics of the cluster, of those that match a pattern only if they may be described."""
        self._seen_version = self._topics.version
        self._hidden, self._refresh_at_ms = frozenset(), NEVER_MS
        patterns = self._patterns() if may_describe is not None else ()
        if may_describe is not None and patterns:
            matched = frozenset[str]().union(*map(self._matching, patterns))
            self._hidden, self._refresh_at_ms = matched - may_describe(matched), now.monotonic_ms + REFRESH_MS

    def topics_hash(self) -> int:
        """Return the hash of the topics to which the group subscribes."""
        found = hashlib.blake2b(digest_size=_HASH_BYTES)
        for topic in sorted(self._subscribed()):
            found.update(f"{topic.name}/{topic.topic_id}/{topic.partition_count}\n".encode())
        return int.from_bytes(found.digest(), "big", signed=True)

    def _patterns(self) -> set[str]:
        return {member.topic_pattern for member in self._state.members.values() if member.topic_pattern}

    def _matching(self, pattern: str) -> frozenset[str]:
        """Return the topics that match; none for a stored pattern that is no longer valid, until its member sends another."""
        try:
            return self._topics.matching(pattern)
        except Invalid:
            return frozenset()

    def _subscribed(self) -> set[TopicInfo]:
        different = {(member.topic_names, member.topic_pattern) for member in self._state.members.values()}
        return {topic for subscription in different for topic in self._topics_of(subscription)}

    def _topics_of(self, subscription: _Subscription) -> list[TopicInfo]:
        """Return the existing topics of a subscription."""
        names, pattern = subscription
        matched = self._matching(pattern) - self._hidden if pattern else frozenset[str]()
        found = (self._topics.find(name) for name in {*names, *matched})
        return [topic for topic in found if topic is not None]

    def topic_id_of(self, name: str) -> UUID | None:
        topic = self._topics.find(name)
        return None if topic is None else topic.topic_id

    def names_of(self, member_id: str) -> dict[UUID, str]:
        """Return the names of the existing topics to which a member subscribes, by id."""
        member = self._state.members[member_id]
        return {topic.topic_id: topic.name for topic in self._topics_of((member.topic_names, member.topic_pattern))}

    def topic_ids_of(self, member_id: str) -> frozenset[UUID]:
        member = self._state.members[member_id]
        return frozenset(topic.topic_id for topic in self._topics_of((member.topic_names, member.topic_pattern)))

    def includes(self, topic: str) -> bool:
        """Return whether a member subscribes to the topic by this name, or by a pattern if the topic exists."""
        members = self._state.members.values()
        return any(topic in member.topic_names for member in members) or any(
            topic in self._matching(pattern) for pattern in self._patterns()
        )

    def preferred_assignor(self, allowed: Sequence[str]) -> str:
        """Return the allowed assignor that most members prefer; the first one if nobody prefers one."""
        votes = Counter(member.assignor for member in self._state.members.values() if member.assignor in allowed)
        return min(allowed, key=lambda name: (-votes[name], allowed.index(name)))

    def assignment(self, assignors: Sequence[str]) -> dict[str, Partitions]:
        """Return a target for each member, computed by the preferred assignor."""
        subscriptions = {
            member_id: (member.topic_names, member.topic_pattern) for member_id, member in self._state.members.items()
        }
        topics = {subscription: self._topics_of(subscription) for subscription in set(subscriptions.values())}
        topic_ids = {each: frozenset(topic.topic_id for topic in found) for each, found in topics.items()}
        specs = {
            member_id: MemberSpec(
                topic_ids=topic_ids[subscription], previous=self._state.target_of(member_id),
                instance_id=self._state.members[member_id].instance_id,
            )
            for member_id, subscription in subscriptions.items()
        }  # fmt: skip
        counts = {topic.topic_id: topic.partition_count for found in topics.values() for topic in found}
        return ASSIGNORS[self.preferred_assignor(assignors)](specs, counts)
