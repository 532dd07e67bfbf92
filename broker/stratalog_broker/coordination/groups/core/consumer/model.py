"""The state of a consumer group as it is stored: members, epochs, target assignment, and the partitions each member owns.

The *group epoch* rises when members, subscriptions or topics change. The *target assignment* is computed for a group epoch,
which is then the *assignment epoch*. A member's epoch becomes the assignment epoch once it has revoked the partitions that are
not in its target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple, Protocol
from uuid import UUID

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
LEAVE_STATIC_EPOCH: Final = -2
"""A static member is away and returns: it keeps its partitions until its session ends."""
Partition = tuple[UUID, int]
"""Topic id and partition index; this protocol identifies topics by id."""
Partitions = frozenset[Partition]


class TopicInfo(NamedTuple):
    """The properties of a topic on which an assignment depends."""

    name: str
    topic_id: UUID
    partition_count: int


class Topics(Protocol):
    """The topics of the cluster, as far as this broker knows them."""

    @property
    def version(self) -> int:
        """A number that changes with every change of topics."""
        ...

    def find(self, name: str) -> TopicInfo | None: ...

    def matching(self, pattern: str) -> frozenset[str]:
        """Return the names that a regular expression matches as a whole. Raises ``Invalid`` for one that is not valid."""
        ...


class MemberState(IntEnum):
    """Numbers are those of Kafka's records."""

    STABLE = 0
    UNREVOKED_PARTITIONS = 1
    """The member has to revoke partitions before it reaches the next epoch."""
    UNRELEASED_PARTITIONS = 2
    """The member is at the assignment epoch, but other members still own partitions of its target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicJoin:
    """The properties of a member of the classic protocol: a session time-out of its own, and what it sent with JoinGroup."""

    session_timeout_ms: int
    protocols: tuple[tuple[str, bytes], ...]
    """Name and metadata of each assignment protocol that the member supports, in order of preference."""

    @property
    def protocol_name(self) -> str:
        """The protocol that the member is told. All its protocols have the same subscription, and the server assigns."""
        return self.protocols[0][0]

    @property
    def metadata_bytes(self) -> int:
        return sum(len(name) + len(metadata) for name, metadata in self.protocols)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberMetadata:
    """A member's own properties, from its heartbeats. An empty ``topic_pattern`` means none.

    ``classic`` is None for a member of the consumer protocol.
    """

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topic_names: tuple[str, ...] = ()
    topic_pattern: str = ""
    rebalance_timeout_ms: int = -1
    assignor: str | None = None
    classic: ClassicJoin | None = None

    @property
    def subscription_bytes(self) -> int:
        classic_bytes = 0 if self.classic is None else self.classic.metadata_bytes
        return sum(map(len, self.topic_names)) + len(self.topic_pattern) + classic_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentAssignment:
    """A member's epoch and partitions, each with the epoch at which the member got it (KIP-1251)."""

    member_epoch: int = JOIN_EPOCH
    previous_epoch: int = JOIN_EPOCH
    state: MemberState = MemberState.STABLE
    assigned: Mapping[Partition, int] = field(default_factory=dict)
    revoking: Mapping[Partition, int] = field(default_factory=dict)
    """Partitions that the member has to revoke. No other member gets them before it has."""

    @property
    def owned(self) -> tuple[Partition, ...]:
        """The partitions that no other member may get."""
        return (*self.assigned, *self.revoking)


@dataclass(slots=True, kw_only=True)
class ConsumerGroupState:
    """A group's records, by what they describe. Target and current assignment may lack members."""

    epoch: int = 0
    topics_hash: int = 0
    """A hash of names, ids and partition counts of the subscribed topics, for which the epoch is valid."""
    assignment_epoch: int = 0
    assigned_at_ms: int = 0
    """Wall time at which the target assignment was computed."""
    members: dict[str, MemberMetadata] = field(default_factory=dict)
    targets: dict[str, Partitions] = field(default_factory=dict)
    current: dict[str, CurrentAssignment] = field(default_factory=dict)

    @property
    def is_consistent(self) -> bool:
        """Whether partitions have at most one owner and one target, who are members, and no epoch is above the group's."""
        owned = [each for current in self.current.values() for each in current.owned]
        targets = [each for target in self.targets.values() for each in target]
        return (
            len(owned) == len(set(owned))
            and len(targets) == len(set(targets))
            and self.current.keys() | self.targets.keys() <= self.members.keys()
            and max([self.assignment_epoch, *(current.member_epoch for current in self.current.values())]) <= self.epoch
        )

    def copy(self) -> ConsumerGroupState:
        return ConsumerGroupState(
            epoch=self.epoch, topics_hash=self.topics_hash, assignment_epoch=self.assignment_epoch,
            assigned_at_ms=self.assigned_at_ms, members=dict(self.members), targets=dict(self.targets),
            current=dict(self.current),
        )  # fmt: skip
