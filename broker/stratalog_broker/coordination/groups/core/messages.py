"""Inputs and outputs of a group's state machine: requests with tickets, answers to tickets, and images to persist.

A ticket is a number that the shell assigns to a request that may be answered later. Each ticket is answered by exactly one
:class:`Answer`. Times: ``monotonic_ms`` for time-outs, ``wall_ms`` for stored values.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatAnswer

NO_MEMBER = ""
NO_GENERATION = -1
Protocols = tuple[tuple[str, bytes], ...]
"""Name and metadata of each assignment protocol that a member supports, in order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """JoinGroup. ``fresh_member_id`` is assigned to a member without an id (the core has no source of randomness).

    ``requires_known_member``: since v4 a new dynamic member gets its id first and joins again with it (KIP-394).
    ``can_skip_assignment``: since v9 a returning static leader may skip the assignment (KIP-814).
    """

    ticket: int
    member_id: str
    fresh_member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    protocol_type: str
    protocols: Protocols
    session_timeout_ms: int
    rebalance_timeout_ms: int
    requires_known_member: bool = True
    can_skip_assignment: bool = True

    @property
    def must_get_id_first(self) -> bool:
        """Whether the member has to join again with the id that it is given."""
        return self.requires_known_member and not self.member_id and self.group_instance_id is None

    @property
    def subscription_bytes(self) -> int:
        return sum(len(name) + len(metadata) for name, metadata in self.protocols)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMember:
    """One member in the response to the leader; ``metadata`` is for the chosen protocol."""

    member_id: str
    group_instance_id: str | None
    metadata: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    error: ErrorCode = ErrorCode.none
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = NO_MEMBER
    member_id: str = NO_MEMBER
    members: tuple[JoinedMember, ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRequest:
    """SyncGroup; only the leader sends ``assignments``. Protocol type and name are checked if given (v5)."""

    ticket: int
    member_id: str
    group_instance_id: str | None
    generation: int
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()

    @property
    def subscription_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    error: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingMember:
    """One member of a LeaveGroup request; a static member may be identified by its instance id alone."""

    member_id: str
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """LeaveGroup of a group of the consumer protocol, which answers when the departures are in the log."""

    ticket: int
    members: tuple[LeavingMember, ...]

    @property
    def subscription_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAnswer:
    """``errors`` has a code for each member, unless ``error`` says that nothing was done."""

    error: ErrorCode = ErrorCode.none
    errors: tuple[ErrorCode, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Instructs the shell to answer the request with ``ticket``."""

    ticket: int
    value: JoinAnswer | SyncAnswer | HeartbeatAnswer | LeaveAnswer


class MemberImage(msgspec.Struct, frozen=True, kw_only=True):
    """A stored member; ``subscription`` is its metadata for the group's chosen protocol."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupImage(msgspec.Struct, frozen=True, kw_only=True):
    """A stored group, never in the middle of a rebalance: either empty, or with an assignment for each member.

    With members but without a leader it was a group of the consumer protocol before, and begins with a rebalance.
    """

    group_id: str
    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    state_since_ms: int
    members: tuple[MemberImage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Instructs the shell to write ``image`` to the log, then call ``Group.on_persisted`` with ``token`` and the outcome."""

    token: int
    image: GroupImage


Instruction = Answer | Persist
Instructions = tuple[Instruction, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Bounds of one group. Session time-outs outside the bounds and members beyond ``members_max`` are refused.

    ``initial_rebalance_delay_ms``: the time for which the first rebalance of an empty group waits for more members.
    ``new_member_timeout_ms``: a new member whose join is pending for this time is removed.
    """

    members_max: int = 1_000
    session_timeout_ms_min: int = 6_000
    session_timeout_ms_max: int = 1_800_000
    initial_rebalance_delay_ms: int = 3_000
    new_member_timeout_ms: int = 300_000
    protocols_max: int = 64
    member_metadata_bytes_max: int = 262_144
    group_bytes_max: int = 4_194_304
