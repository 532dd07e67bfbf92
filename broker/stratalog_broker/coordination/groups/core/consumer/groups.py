"""All consumer groups of one partition of ``__consumer_offsets``. Does no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroup, ConsumerGroupPhase
from stratalog_broker.coordination.groups.core.consumer.group_requests import GroupRequest
from stratalog_broker.coordination.groups.core.consumer.model import ConsumerGroupState, CurrentAssignment, Topics
from stratalog_broker.coordination.groups.core.consumer.records import encode_key, keys_of
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.consumer.turns import GroupTurns, Step
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_broker.coordination.wake_times import Instant

NO_EPOCH: Final = -1
"""The epoch of a client that is not a member."""


class ConsumerGroups:
    """Live groups over the stored ones."""

    def __init__(self, limits: ConsumerLimits, topics: Topics, store: GroupStore, now: Instant) -> None:
        self.limits = limits
        self.topics = topics
        self._store = store
        self._live: dict[str, GroupTurns] = {}
        for group_id in store.consumer_groups:
            self.find_or_create(group_id, now)

    # -- for reading

    def __contains__(self, group_id: str) -> bool:
        """Return whether the group is of the consumer protocol, whatever is still stored of an earlier one."""
        return group_id in self._live

    def ids(self) -> Iterator[str]:
        """Yield the ids of all groups, live or only stored."""
        yield from self._live.keys() | self._store.consumer_groups.keys()

    def __len__(self) -> int:
        return len(self._live)

    def find(self, group_id: str) -> ConsumerGroup | None:
        """Return the live group; its state may be ahead of what is in the log."""
        turns = self._live.get(group_id)
        return None if turns is None else turns.group

    def turns_of(self, group_id: str) -> GroupTurns | None:
        return self._live.get(group_id)

    def phase_of(self, group_id: str) -> ConsumerGroupPhase:
        group = self.find(group_id)
        return ConsumerGroupPhase.EMPTY if group is None else group.phase

    def is_empty(self, group_id: str) -> bool:
        """Return whether the group has no members, and nobody is joining it."""
        turns = self._live.get(group_id)
        return turns is None or (turns.is_idle and not turns.group.state.members)

    def wake_times(self) -> Iterator[tuple[str, int]]:
        return ((group_id, turns.wake_at_ms) for group_id, turns in self._live.items())

    # -- changes

    def find_or_create(self, group_id: str, now: Instant, *, replaces_classic: bool = False) -> GroupTurns:
        """Return the live group. ``replaces_classic``: a group of the classic protocol has just ended, if it is not live."""
        turns = self._live.get(group_id)
        if turns is None:
            turns = self.start(self._as_stored(group_id, now, replaces_classic=replaces_classic))
        return turns

    def upgraded_group(self, group_id: str, state: ConsumerGroupState, now: Instant) -> ConsumerGroup:
        """Return the group that replaces a classic one and begins with its members; it is not started yet."""
        return ConsumerGroup(group_id, state, self.limits, self.topics, now, is_new=True)

    def _as_stored(self, group_id: str, now: Instant, *, replaces_classic: bool) -> ConsumerGroup:
        stored = self._store.consumer_groups.get(group_id)
        return ConsumerGroup(
            group_id, stored or ConsumerGroupState(), self.limits, self.topics, now,
            is_new=stored is None, replaces_classic=replaces_classic,
        )  # fmt: skip

    def start(self, group: ConsumerGroup) -> GroupTurns:
        group_id = group.group_id

        def rebuild(at: Instant) -> ConsumerGroup | None:
            if group_id in self._store.images and group_id not in self._store.consumer_groups:
                return None
            # The write that failed may be the one that was to remove a classic group.
            return self._as_stored(group_id, at, replaces_classic=True)

        turns = self._live[group_id] = GroupTurns(group, rebuild, self.limits)
        return turns

    def topic_id_of(self, name: str) -> UUID | None:
        topic = self.topics.find(name)
        return None if topic is None else topic.topic_id

    def handle(self, group_id: str, request: GroupRequest, now: Instant) -> Step:
        """Handle a request of a group that exists, or that it creates."""
        return self.find_or_create(group_id, now).add(request, now)

    def forget(self, group_id: str) -> None:
        """Remove the live group; what is stored remains until its removal is in the log."""
        self._live.pop(group_id, None)

    def tombstones(self, group_id: str) -> list[CoordinatorRecord]:
        """Return the records that delete what is stored of a group; none if it is not stored."""
        stored = self._store.consumer_groups.get(group_id)
        if stored is None:
            return []
        keys = list(keys_of(group_id, stored))
        return [CoordinatorRecord(encode_key(key), None) for key in reversed(keys)]

    # -- offsets

    def has_consumer_member(self, group_id: str, member_id: str) -> bool:
        """Return whether a member of the consumer protocol has this id."""
        group = self.find(group_id)
        member = None if group is None else group.state.members.get(member_id)
        return member is not None and member.classic is None

    def check_commit(self, group_id: str, member_id: str, epoch: int, commits: Sequence[Commit]) -> ErrorCode:
        """Return the code for a member's commit of offsets of these partitions.

        Clients without an epoch may commit while the group has no members. A member may commit at an earlier epoch, too, if it
        has owned the partitions since then (KIP-1251).
        """
        group = self.find(group_id)
        if group is None or (epoch <= NO_EPOCH and not group.state.members):
            return ErrorCode.none
        if member_id not in group.state.members:
            return ErrorCode.unknown_member_id
        current = group.state.current_of(member_id)
        if epoch == current.member_epoch:
            return ErrorCode.none
        has_owned = epoch < current.member_epoch and all(self._owned_since(current, each, epoch) for each in commits)
        return ErrorCode.none if has_owned else _stale(group, member_id)

    def _owned_since(self, current: CurrentAssignment, commit: Commit, epoch: int) -> bool:
        topic = self.topics.find(commit.topic)
        owned_since = None if topic is None else current.assigned.get((topic.topic_id, commit.partition))
        return owned_since is not None and owned_since <= epoch

    def check_fetch(self, group_id: str, member_id: str | None, epoch: int) -> ErrorCode:
        """Return the code for a member's fetch of offsets. Clients without an epoch may always fetch."""
        group = self.find(group_id)
        if group is None or (not member_id and epoch <= NO_EPOCH):
            return ErrorCode.none
        if member_id not in group.state.members:
            return ErrorCode.unknown_member_id
        current = group.state.current_of(member_id)
        return ErrorCode.none if epoch == current.member_epoch else _stale(group, member_id)


def _stale(group: ConsumerGroup, member_id: str) -> ErrorCode:
    """Return the code for a wrong epoch, which members of the classic protocol know as a generation."""
    is_classic = group.state.members[member_id].classic is not None
    return ErrorCode.illegal_generation if is_classic else ErrorCode.stale_member_epoch
