"""What goes into a group's state machine and what comes out: requests with tickets, answers to tickets, records to persist.

A ticket is a number that the shell chose for a request that may be answered later. Every ticket that goes in comes out
in exactly one :class:`Answer`. Times: ``monotonic_ms`` for time-outs, ``wall_ms`` for what is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from kio.schema.errors import ErrorCode

NO_MEMBER = ""
NO_GENERATION = -1
Protocols = tuple[tuple[str, bytes], ...]
"""Name and metadata of each assignment protocol that a member can use, the most wanted first."""


class Instant(NamedTuple):
    """Now, on both clocks."""

    monotonic_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """JoinGroup. ``fresh_member_id`` is what a member without an id gets (the core has no randomness of its own).

    ``requires_known_member``: from v4 on a new dynamic member is first told its id (KIP-394).
    ``can_skip_assignment``: from v9 on a returning static leader learns that nothing has to be assigned (KIP-814).
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMember:
    """One row of the leader's list: metadata is that of the chosen protocol."""

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
    """SyncGroup; ``assignments`` comes from the leader only. Protocol type and name are checked when given (v5)."""

    ticket: int
    member_id: str
    group_instance_id: str | None
    generation: int
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignments: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAnswer:
    error: ErrorCode = ErrorCode.none
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingMember:
    """One member of a LeaveGroup; a static one may be named by its instance id alone."""

    member_id: str
    group_instance_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Answer the request that came with ``ticket``."""

    ticket: int
    value: JoinAnswer | SyncAnswer


class MemberImage(msgspec.Struct, frozen=True, kw_only=True):
    """A member as it is stored: ``subscription`` is its metadata for the group's chosen protocol."""

    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


class GroupImage(msgspec.Struct, frozen=True, kw_only=True):
    """A group as it is stored: always between rebalances, either empty or with an assignment for everybody."""

    group_id: str
    protocol_type: str
    generation: int
    protocol_name: str | None
    leader: str | None
    state_since_ms: int
    members: tuple[MemberImage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Write ``image`` to the log, then call ``Group.on_persisted`` with ``token`` and what became of it."""

    token: int
    image: GroupImage


Instruction = Answer | Persist


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimits:
    """Bounds of one group. Sessions outside the bounds are refused; members beyond ``members_max`` too.

    ``initial_rebalance_delay_ms``: how long the first rebalance of an empty group waits for more members.
    ``new_member_timeout_ms``: a new member whose join is pending that long is given up.
    """

    members_max: int = 1_000
    session_timeout_ms_min: int = 6_000
    session_timeout_ms_max: int = 1_800_000
    initial_rebalance_delay_ms: int = 3_000
    new_member_timeout_ms: int = 300_000
    protocols_max: int = 64
    member_metadata_bytes_max: int = 262_144
    group_bytes_max: int = 4_194_304
