"""A consumer group's state while it is changed: with indexes, and with the records that its changes have to write.

The stored state changes only when records are in the log. This is a copy that runs ahead of it by one batch of records.
Invariant: a partition has at most one owner, which is the member that has it assigned or has not yet revoked it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

from stratalog_broker.coordination.groups.core.consumer.model import (
    ConsumerGroupState,
    CurrentAssignment,
    MemberMetadata,
    MemberState,
    Partition,
    Partitions,
)
from stratalog_broker.coordination.groups.core.consumer.records import (
    ConsumerKey,
    ConsumerRecord,
    encode_key,
    encode_value,
    keys_of,
)
from stratalog_broker.coordination.groups.core.records import encode_group_key
from stratalog_broker.coordination.replay import CoordinatorRecord

Value = TypeVar("Value")
_NOTHING = CurrentAssignment()


class ClassicMembers:
    """How many members speak the classic protocol, and which of its assignment protocols they support."""

    def __init__(self) -> None:
        self.count = 0
        self._supporters: Counter[str] = Counter()

    def add(self, member: MemberMetadata, change: int = 1) -> None:
        """Count a member if it speaks the classic protocol; ``change`` is -1 to remove it."""
        if member.classic is not None:
            self.count += change
            for name, _ in member.classic.protocols:
                self._supporters[name] += change

    def can_work_with(self, protocols: Iterable[tuple[str, bytes]]) -> bool:
        """Return whether all classic members support one of these protocols."""
        return any(self._supporters[name] == self.count for name, _ in protocols)

    def supported_by_all(self) -> set[str]:
        return {name for name, count in self._supporters.items() if count == self.count}


class TrackedState:
    """All changes of a group go through its methods. ``is_new``: nothing of the group is stored in this protocol.

    ``replaces_classic``: a group of the classic protocol may be stored, or its record may be on its way to the log.
    """

    def __init__(
        self, group_id: str, stored: ConsumerGroupState, *, is_new: bool = False, replaces_classic: bool = False
    ) -> None:
        self.group_id = group_id
        self._state = stored.copy()
        self._owners: dict[Partition, str] = {}
        self.instances: dict[str, str] = {}
        """Member ids by group instance id."""
        self.classic = ClassicMembers()
        self._removes_classic = is_new or replaces_classic
        self._changed: dict[ConsumerKey, None] = {}
        if is_new and stored.members:
            self._changed = dict.fromkeys(keys_of(group_id, stored))
        self.subscription_bytes = 0
        """The size of all members' subscriptions."""
        self.is_reset = not stored.is_consistent
        """Whether the stored state contradicts itself, so that all members are removed and have to join again."""
        if self.is_reset:
            self._reset()
        for member_id, member in self._state.members.items():
            self.subscription_bytes += member.subscription_bytes
            self.classic.add(member)
            if member.instance_id is not None:
                self.instances[member.instance_id] = member_id
        for member_id, current in self._state.current.items():
            self._own(member_id, current)

    def _reset(self) -> None:
        """Remove all members; the epoch stays above those that they may know."""
        state = self._state
        for key in keys_of(self.group_id, state):
            self._changed[key] = None
        epochs = (current.member_epoch for current in state.current.values())
        state.epoch = max([state.epoch, state.assignment_epoch, *epochs])
        for table in (state.members, state.targets, state.current):
            table.clear()

    # -- for reading

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def topics_hash(self) -> int:
        return self._state.topics_hash

    @property
    def assignment_epoch(self) -> int:
        return self._state.assignment_epoch

    @property
    def assigned_at_ms(self) -> int:
        return self._state.assigned_at_ms

    @property
    def members(self) -> dict[str, MemberMetadata]:
        """By member id, in the order in which they joined. Do not change it."""
        return self._state.members

    def current_of(self, member_id: str) -> CurrentAssignment:
        return self._state.current.get(member_id, _NOTHING)

    def target_of(self, member_id: str) -> Partitions:
        return self._state.targets.get(member_id, frozenset())

    @property
    def has_targets(self) -> bool:
        """Whether a member has a target assignment, which may be empty."""
        return bool(self._state.targets)

    def is_free(self, partition: Partition) -> bool:
        return partition not in self._owners

    def is_reconciled(self, member_id: str) -> bool:
        current = self.current_of(member_id)
        return current.state is MemberState.STABLE and current.member_epoch == self.assignment_epoch

    # -- changes

    def set_epoch(self, epoch: int, topics_hash: int) -> None:
        self._state.epoch, self._state.topics_hash = epoch, topics_hash
        self._change(ConsumerRecord.GROUP)

    def set_member(self, member_id: str, member: MemberMetadata) -> None:
        """Add a member or change its metadata."""
        before = self._state.members.get(member_id)
        if before == member:
            return
        if before is not None:
            self.subscription_bytes -= before.subscription_bytes
            self.classic.add(before, -1)
        self.subscription_bytes += member.subscription_bytes
        self.classic.add(member)
        self._state.members[member_id] = member
        if member.instance_id is not None:
            self.instances[member.instance_id] = member_id
        self._change(ConsumerRecord.MEMBER, member_id)

    def set_current(self, member_id: str, current: CurrentAssignment) -> None:
        before = self._state.current.get(member_id)
        if before == current:
            return
        if before is not None:
            self._release(before)
        self._own(member_id, current)
        self._state.current[member_id] = current
        self._change(ConsumerRecord.CURRENT, member_id)

    def set_targets(self, targets: dict[str, Partitions], assigned_at_ms: int) -> None:
        """Replace the target assignment by one for the group epoch."""
        for member_id in self._state.targets.keys() | targets.keys():
            if self._state.targets.get(member_id) != targets.get(member_id):
                self._change(ConsumerRecord.TARGET, member_id)
        self._state.targets = targets
        self._state.assignment_epoch, self._state.assigned_at_ms = self.epoch, assigned_at_ms
        self._change(ConsumerRecord.ASSIGNMENT_EPOCH)

    def remove_member(self, member_id: str) -> None:
        """Remove a member; its partitions are free at once."""
        member = self._state.members.pop(member_id)
        self.subscription_bytes -= member.subscription_bytes
        self.classic.add(member, -1)
        if member.instance_id is not None and self.instances.get(member.instance_id) == member_id:
            del self.instances[member.instance_id]
        current = self._state.current.pop(member_id, None)
        if current is not None:
            self._release(current)
            self._change(ConsumerRecord.CURRENT, member_id)
        if self._state.targets.pop(member_id, None) is not None:
            self._change(ConsumerRecord.TARGET, member_id)
        self._change(ConsumerRecord.MEMBER, member_id)

    def replace_member(self, old_id: str, new_id: str) -> None:
        """Give a static member that returned under another id its place, target and partitions, at epoch 0."""
        member, current, target = self._state.members[old_id], self.current_of(old_id), self._state.targets.get(old_id)
        self.remove_member(old_id)
        self.set_member(new_id, member)
        self.set_current(new_id, CurrentAssignment(assigned=current.assigned))
        if target is not None:
            self._state.targets[new_id] = target
            self._change(ConsumerRecord.TARGET, new_id)

    def drain(self) -> list[CoordinatorRecord]:
        """Return the records of all changes since the last call."""
        changed, self._changed = self._changed, {}
        records = [CoordinatorRecord(encode_key(key), encode_value(key, self._state)) for key in changed]
        if self._removes_classic and records:
            self._removes_classic = False
            records.insert(0, CoordinatorRecord(encode_group_key(self.group_id), None))
        return records

    def tombstones(self) -> list[CoordinatorRecord]:
        """Return the records that remove the group; its own comes last. Change nothing after this."""
        keys = dict.fromkeys((*keys_of(self.group_id, self._state), *self._changed))
        return [CoordinatorRecord(encode_key(key), None) for key in reversed(keys)]

    def _change(self, kind: ConsumerRecord, member_id: str = "") -> None:
        self._changed[ConsumerKey(kind, self.group_id, member_id)] = None

    def _own(self, member_id: str, current: CurrentAssignment) -> None:
        for partition in current.owned:
            assert partition not in self._owners, f"{partition} belongs to {self._owners[partition]} and {member_id}"
            self._owners[partition] = member_id

    def _release(self, current: CurrentAssignment) -> None:
        for partition in current.owned:
            del self._owners[partition]

    def validate_state(self) -> None:
        """Assert the invariants."""
        assert self._state.is_consistent
        assert self._owners == {each: member_id for member_id, current in self._state.current.items() for each in current.owned}
        assert self.subscription_bytes == sum(member.subscription_bytes for member in self.members.values())
        assert self.classic.count == sum(member.classic is not None for member in self.members.values())
        assert not self.classic.count or self.classic.supported_by_all(), "classic members without a common protocol"
