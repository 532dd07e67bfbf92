"""The groups of a coordinator: live state machines and stored groups, within the coordinator's bounds. Does no I/O.

A group exists while it has members, pending members, stored metadata or offsets. Commits that are being written to the log
are pending. The store does not contain them yet, so expiry and topic deletion, which use the store, skip their partitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.messages import GroupLimits, Instant
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.groups.core.store import GroupStore, TopicPartitionName


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorLimits:
    """Bounds of one coordinator partition. Names longer than ``name_bytes_max`` are refused."""

    group: GroupLimits = field(default_factory=GroupLimits)
    groups_max: int = 100_000
    offsets_max: int = 1_000_000
    offset_metadata_bytes_max: int = 4_096
    offsets_retention_ms: int = 7 * 86_400_000
    name_bytes_max: int = 4_096


class GroupTable:
    """Groups by id. A group that never had members and has only offsets has no state machine."""

    def __init__(self, limits: CoordinatorLimits, store: GroupStore, now: Instant) -> None:
        self.limits = limits
        self.store = store
        self.groups = {group_id: Group.from_image(image, limits.group, now) for group_id, image in store.images.items()}
        self._pending: dict[str, dict[int, Sequence[Commit]]] = {}

    @contextmanager
    def pending(self, group_id: str, commits: Sequence[Commit]) -> Iterator[None]:
        """Mark commits as pending, from planning until the outcome is known, so that expiry and topic deletion skip them."""
        self._pending.setdefault(group_id, {})[id(commits)] = commits
        try:
            yield
        finally:
            of_group = self._pending[group_id]
            del of_group[id(commits)]
            if not of_group:
                del self._pending[group_id]

    def pending_of(self, group_id: str) -> set[TopicPartitionName]:
        """Return the partitions for which the group has pending commits."""
        in_flight = self._pending.get(group_id, {})
        return {(commit.topic, commit.partition) for commits in in_flight.values() for commit in commits}

    def group_ids(self) -> list[str]:
        """Return the sorted ids of all groups, live or only stored, except groups that have only pending members."""
        live = {name for name, group in self.groups.items() if len(group.membership) or group.generation}
        return sorted({*live, *self.store.offsets, *self.store.images})

    def state_of(self, group_id: str) -> GroupState:
        """Return the group's state; ``DEAD`` if it does not exist."""
        group = self.groups.get(group_id)
        if group is not None:
            return group.state
        return GroupState.EMPTY if group_id in self.store.offsets else GroupState.DEAD

    def _exists(self, group_id: str) -> bool:
        return group_id in self.groups or group_id in self.store.offsets or group_id in self.store.images

    def _is_empty(self, group_id: str) -> bool:
        group = self.groups.get(group_id)
        return group is None or (group.state is GroupState.EMPTY and not group.pending_members)

    def _has_room(self) -> bool:
        return len(self.groups) + len(self.store.offsets) < self.limits.groups_max

    def _is_name(self, group_id: str, *, empty: bool = False) -> bool:
        return (empty or bool(group_id)) and len(group_id.encode()) <= self.limits.name_bytes_max

    def _group(self, group_id: str, now: Instant) -> Group:
        group = self.groups.get(group_id)
        if group is None:
            image = self.store.images.get(group_id)
            fresh = Group(group_id, self.limits.group, now.wall_ms)
            group = self.groups[group_id] = fresh if image is None else Group.from_image(image, self.limits.group, now)
        return group

    def _forget_if_unused(self, group_id: str) -> None:
        group = self.groups[group_id]
        if group.generation == 0 and group.state is GroupState.EMPTY and not group.pending_members:
            del self.groups[group_id]
