"""The groups of a coordinator: live state machines and stored groups, within the coordinator's bounds. Does no I/O.

A group exists while it has members, pending members, stored metadata or offsets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroupPhase
from stratalog_broker.coordination.groups.core.consumer.groups import ConsumerGroups
from stratalog_broker.coordination.groups.core.consumer.model import Topics
from stratalog_broker.coordination.groups.core.consumer.settings import ConsumerLimits
from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.messages import GroupImage, GroupLimits
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.wake_times import Instant


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Bounds of one coordinator partition. Names longer than ``name_bytes_max`` are refused."""

    group: GroupLimits = field(default_factory=GroupLimits)
    consumer: ConsumerLimits = field(default_factory=ConsumerLimits)
    groups_max: int = 100_000
    offsets_max: int = 1_000_000
    offset_metadata_bytes_max: int = 4_096
    offsets_retention_ms: int = 7 * 86_400_000
    name_bytes_max: int = 4_096


class GroupTable:
    """Groups by id. A group that never had members and has only offsets has no state machine.

    ``live`` are the groups of the classic protocol; a group is never both there and in ``consumers``.
    """

    def __init__(self, limits: CoordinatorLimits, store: GroupStore, topics: Topics, now: Instant) -> None:
        self.limits = limits
        self.store = store
        self.consumers = ConsumerGroups(limits.consumer, topics, store, now)
        self.live = {
            group_id: Group.from_image(image, limits.group, now)
            for group_id, image in store.images.items()
            if group_id not in self.consumers
        }

    def find(self, group_id: str) -> Group | None:
        """Return the group's state machine; None if the group does not exist or has only offsets."""
        return self.live.get(group_id)

    def group_ids(self) -> list[str]:
        """Return the sorted ids of all groups, live or only stored, except groups that have only pending members."""
        live = {name for name, group in self.live.items() if len(group.membership) or group.generation}
        return sorted({*live, *self.store.offsets, *self.store.images, *self.consumers.ids()})

    def state_of(self, group_id: str) -> GroupState | ConsumerGroupPhase:
        """Return the group's state; ``DEAD`` if it does not exist."""
        if group_id in self.consumers:
            return self.consumers.phase_of(group_id)
        group = self.find(group_id)
        if group is not None:
            return group.state
        return GroupState.EMPTY if group_id in self.store.offsets else GroupState.DEAD

    def all_ids(self) -> list[str]:
        """Return the sorted ids of all groups, those with only pending members included."""
        return sorted({*self.live, *self.store.offsets, *self.store.images, *self.consumers.ids()})

    def exists(self, group_id: str) -> bool:
        stored = self.store
        return (
            group_id in self.live
            or group_id in stored.offsets
            or group_id in stored.images
            or group_id in stored.consumer_groups
            or group_id in self.consumers
            or stored.pending.has_group(group_id)
        )

    def is_empty(self, group_id: str) -> bool:
        """Return whether the group has neither members nor pending members."""
        group = self.find(group_id)
        is_empty = group is None or (group.state is GroupState.EMPTY and not group.pending_members)
        return is_empty and self.consumers.is_empty(group_id)

    def has_room(self) -> bool:
        """Return whether one more group may be created."""
        return len(self.live) + len(self.consumers) + len(self.store.offsets) < self.limits.groups_max

    def is_name(self, group_id: str, *, empty: bool = False) -> bool:
        """Return whether a group may have this id; ``empty`` allows the empty id."""
        return (empty or bool(group_id)) and len(group_id.encode()) <= self.limits.name_bytes_max

    def find_or_create(self, group_id: str, now: Instant) -> Group:
        group = self.find(group_id)
        if group is None:
            stored = self.store.images.get(group_id)
            if stored is None:
                group = Group(group_id, self.limits.group, now.wall_ms)
            else:
                # It was deleted, which is not in the log yet. Nor need it be there that its members had left before.
                without_members: GroupImage = msgspec.structs.replace(stored, members=(), leader=None)
                group = Group.from_image(without_members, self.limits.group, now)
            self.live[group_id] = group
        return group

    def forget_if_unused(self, group_id: str) -> None:
        """Remove a state machine that never had a member and expects none."""
        group = self.live[group_id]
        if group.generation == 0 and group.state is GroupState.EMPTY and not group.pending_members:
            del self.live[group_id]

    def end_turns(self, group_id: str, now: Instant) -> Group | None:
        """Replace a consumer group that has ended, or never began, by the stored classic group; None if there is none."""
        self.consumers.forget(group_id)
        image = self.store.images.get(group_id)
        if image is None:
            return None
        group = self.live[group_id] = Group.from_image(image, self.limits.group, now)
        return group

    def forget(self, group_id: str) -> None:
        """Remove the group's state machine, if there is one; what is stored remains until its removal is in the log."""
        self.live.pop(group_id, None)
        self.consumers.forget(group_id)
