"""The phases of a group's rebalance. The requests that drive them are in ``group.py``. Does no I/O.

Kafka's classic protocol (KIP-62, KIP-134, KIP-345, KIP-394)::

    EMPTY ──join──▶ PREPARING ──all joined, or time-out──▶ COMPLETING ──leader's sync persisted──▶ STABLE
      ▲                 ▲  └─no members──▶ EMPTY               │                                      │
      └─────────────────┴──────join, leave, expiry─────────────┴──────────────────────────────────────┘
    any ──deleted──▶ DEAD

Invariants: a generation's answers go only to members of that generation; a generation becomes STABLE only after its
assignment is in the log; time advances only through the ``now`` of each call; ``wake_at_ms`` is never later than the next
deadline.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.membership import Member, Membership
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    GroupImage,
    GroupLimits,
    Instant,
    Instruction,
    JoinAnswer,
    JoinedMember,
    MemberImage,
    Persist,
    SyncAnswer,
)

NEVER_MS: Final = 2**62


class GroupState(StrEnum):
    """The states of a group, named as Kafka's tools print them."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


_PREVIOUS: Final[dict[GroupState, frozenset[GroupState]]] = {
    GroupState.EMPTY: frozenset({GroupState.PREPARING_REBALANCE, GroupState.EMPTY}),
    GroupState.PREPARING_REBALANCE: frozenset({GroupState.STABLE, GroupState.COMPLETING_REBALANCE, GroupState.EMPTY}),
    GroupState.COMPLETING_REBALANCE: frozenset({GroupState.PREPARING_REBALANCE}),
    GroupState.STABLE: frozenset({GroupState.COMPLETING_REBALANCE}),
    GroupState.DEAD: frozenset(GroupState),
}


class Rebalance:
    """State, members and deadlines of one group, and its transitions. Instructions are collected in ``_out``."""

    def __init__(self, group_id: str, limits: GroupLimits, state_since_ms: int) -> None:
        self.group_id = group_id
        self.limits = limits
        self.state = GroupState.EMPTY
        self.state_since_ms = state_since_ms
        self.generation = 0
        self.protocol_type = ""
        self.protocol_name: str | None = None
        self.membership = Membership()
        self.pending_members: dict[str, int] = {}
        """Ids returned with MEMBER_ID_REQUIRED whose members have not joined yet, with their expiry times."""
        self.unsynced: set[str] = set()
        self.wake_at_ms = NEVER_MS
        self._phase_deadline_ms = NEVER_MS
        self._initial_end_ms: int | None = None
        self._member_came = False
        self._tokens = 0
        self._assigning: int | None = None
        self._out: list[Instruction] = []

    # -- instructions and deadlines

    def _drain(self) -> tuple[Instruction, ...]:
        out, self._out = tuple(self._out), []
        return out

    def _answer(self, ticket: int, value: JoinAnswer | SyncAnswer) -> None:
        self._out.append(Answer(ticket=ticket, value=value))

    def _persist(self) -> int:
        self._tokens += 1
        self._out.append(Persist(token=self._tokens, image=self.image()))
        return self._tokens

    def _set_phase_deadline(self, at_ms: int) -> None:
        self._phase_deadline_ms = at_ms
        self.wake_at_ms = min(self.wake_at_ms, at_ms)

    def _expect_heartbeat(self, member: Member, now: Instant, within_ms: int | None = None) -> None:
        member.session_deadline_ms = now.monotonic_ms + (member.session_timeout_ms if within_ms is None else within_ms)
        self.wake_at_ms = min(self.wake_at_ms, member.session_deadline_ms)

    def _move_to(self, state: GroupState, now: Instant) -> None:
        assert self.state in _PREVIOUS[state], f"{self.group_id}: {self.state} to {state}"
        self.state = state
        self.state_since_ms = now.wall_ms
        self._phase_deadline_ms = NEVER_MS

    # -- phase one: all members join

    def _start_rebalance(self, now: Instant) -> None:
        """Make all members rejoin. The first rebalance of an empty group waits a short time for more members."""
        if self.state is GroupState.COMPLETING_REBALANCE:
            self._abort_sync(ErrorCode.rebalance_in_progress)
        was_empty = self.state is GroupState.EMPTY
        self.unsynced.clear()
        self._move_to(GroupState.PREPARING_REBALANCE, now)
        timeout_ms = self._rebalance_timeout_ms()
        if was_empty:
            delay_ms = min(self.limits.initial_rebalance_delay_ms, timeout_ms)
            self._initial_end_ms = now.monotonic_ms + timeout_ms
            self._member_came = False
            self._set_phase_deadline(now.monotonic_ms + delay_ms)
        else:
            self._initial_end_ms = None
            self._set_phase_deadline(now.monotonic_ms + timeout_ms)
        self._maybe_complete_join(now)

    def _rebalance_or_complete_join(self, now: Instant) -> None:
        if self.state in _PREVIOUS[GroupState.PREPARING_REBALANCE]:
            self._start_rebalance(now)
        else:
            self._maybe_complete_join(now)

    def _maybe_complete_join(self, now: Instant) -> None:
        """Complete the join phase once all known members have joined; a first rebalance always waits for its delay."""
        initial_delay = self._initial_end_ms is not None and self.limits.initial_rebalance_delay_ms > 0
        if self.state is not GroupState.PREPARING_REBALANCE or (initial_delay and len(self.membership)):
            return
        if self.membership.joining == len(self.membership) and not self.pending_members:
            self._complete_join(now)

    def _join_deadline(self, now: Instant) -> None:
        """Handle the end of the delay or time-out; a first rebalance that a member joined in the delay waits once more."""
        end_ms = self._initial_end_ms
        if end_ms is not None and self._member_came and now.monotonic_ms < end_ms:
            self._member_came = False
            self._set_phase_deadline(min(now.monotonic_ms + self.limits.initial_rebalance_delay_ms, end_ms))
        else:
            self._complete_join(now)

    def _complete_join(self, now: Instant) -> None:
        """Drop dynamic members that did not rejoin and answer the others with the new generation. Static members stay."""
        absent = [m for m in self.membership.members.values() if m.join_ticket is None and not m.is_static]
        for member in absent:
            self._drop(member.member_id, ErrorCode.unknown_member_id)
        if self.membership.members and not self.membership.elect_joined_leader():
            self._set_phase_deadline(now.monotonic_ms + self._rebalance_timeout_ms())
            return
        self.generation += 1
        self._initial_end_ms = None
        self._assigning = None
        if not self.membership.members:
            self.protocol_name = None
            self._move_to(GroupState.EMPTY, now)
            self._persist()
            return
        self.protocol_name = self.membership.choose_protocol()
        self._move_to(GroupState.COMPLETING_REBALANCE, now)
        self._answer_joins(now)

    def _answer_joins(self, now: Instant) -> None:
        # An absent static member need not sync: it stays a member until its own session expires (KIP-345).
        for member in self.membership.members.values():
            member.assignment = b""
            if member.join_ticket is not None:
                self.unsynced.add(member.member_id)
                self._answer_join(member, self._join_answer(member))
                member.is_new = False
                self._expect_heartbeat(member, now)
        self._set_phase_deadline(now.monotonic_ms + self._rebalance_timeout_ms())

    def _join_answer(self, member: Member) -> JoinAnswer:
        leads = member.member_id == self.membership.leader
        return JoinAnswer(
            generation=self.generation, protocol_type=self.protocol_type, protocol_name=self.protocol_name,
            leader=self.membership.leader or "", member_id=member.member_id, members=self._joined_members() if leads else (),
        )  # fmt: skip

    def _joined_members(self) -> tuple[JoinedMember, ...]:
        return tuple(
            JoinedMember(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                metadata=member.metadata_for(self.protocol_name),
            )
            for member in self.membership.members.values()
        )

    def _answer_join(self, member: Member, answer: JoinAnswer) -> None:
        if member.join_ticket is not None:
            self._answer(member.join_ticket, answer)
            self.membership.set_join_ticket(member, None)

    # -- phase two: the leader's assignment

    def _abort_sync(self, error: ErrorCode) -> None:
        self._assigning = None
        self.unsynced.clear()
        for member in self.membership.members.values():
            member.assignment = b""
            self._answer_sync(member, SyncAnswer(error=error))

    def _complete_sync(self, now: Instant) -> None:
        """Send the assignment, which is in the log, to all waiting members."""
        deadline_ms = self._phase_deadline_ms
        self._move_to(GroupState.STABLE, now)
        for member in self.membership.members.values():
            if member.sync_ticket is not None:
                self._answer_sync(member, self._sync_answer(member))
                self._expect_heartbeat(member, now)
        if self.unsynced:
            self._set_phase_deadline(deadline_ms)

    def _sync_deadline(self, now: Instant) -> None:
        """Drop members of the generation that never requested their assignment, and rebalance if there are any."""
        self._phase_deadline_ms = NEVER_MS
        missing = [member_id for member_id in self.unsynced if member_id in self.membership.members]
        for member_id in sorted(missing):
            self._drop(member_id, ErrorCode.unknown_member_id)
        if missing:
            self._start_rebalance(now)

    def _sync_answer(self, member: Member) -> SyncAnswer:
        return SyncAnswer(protocol_type=self.protocol_type, protocol_name=self.protocol_name, assignment=member.assignment)

    def _answer_sync(self, member: Member, answer: SyncAnswer) -> None:
        if member.sync_ticket is not None:
            self._answer(member.sync_ticket, answer)
            member.sync_ticket = None

    # -- removing members

    def _drop(self, member_id: str, error: ErrorCode) -> None:
        """Remove a member; answer its pending requests with ``error``."""
        member = self.membership.remove(member_id)
        self.unsynced.discard(member_id)
        if member.join_ticket is not None:
            self._answer(member.join_ticket, JoinAnswer(error=error))
        self._answer_sync(member, SyncAnswer(error=error))

    def _remove(self, member_id: str, now: Instant) -> None:
        self._drop(member_id, ErrorCode.unknown_member_id)
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self._start_rebalance(now)
        else:
            self._maybe_complete_join(now)

    def _expire_members(self, now: Instant) -> None:
        for member_id in [name for name, at_ms in self.pending_members.items() if at_ms <= now.monotonic_ms]:
            del self.pending_members[member_id]
            self._maybe_complete_join(now)
        for member in list(self.membership.members.values()):
            overdue = member.session_deadline_ms <= now.monotonic_ms and member.member_id in self.membership.members
            if overdue and (member.is_new or not member.is_waiting):
                self._remove(member.member_id, now)
            elif overdue:
                self._expect_heartbeat(member, now)

    def _rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.membership.members.values()), default=0)

    # -- stored image

    def image(self) -> GroupImage:
        return GroupImage(
            group_id=self.group_id, protocol_type=self.protocol_type, generation=self.generation,
            protocol_name=self.protocol_name, leader=self.membership.leader, state_since_ms=self.state_since_ms,
            members=tuple(self._member_image(member) for member in self.membership.members.values()),
        )  # fmt: skip

    def _member_image(self, member: Member) -> MemberImage:
        return MemberImage(
            member_id=member.member_id, group_instance_id=member.group_instance_id, client_id=member.client_id,
            client_host=member.client_host, rebalance_timeout_ms=member.rebalance_timeout_ms,
            session_timeout_ms=member.session_timeout_ms, subscription=member.metadata_for(self.protocol_name),
            assignment=member.assignment,
        )  # fmt: skip

    # -- checks

    def validate_state(self) -> None:
        """Assert the invariants."""
        self.membership.validate_state()
        members = self.membership.members
        assert not members.keys() & self.pending_members.keys()
        assert self.unsynced <= members.keys()
        deadlines = [*self.pending_members.values(), *(member.session_deadline_ms for member in members.values())]
        assert self.wake_at_ms <= min([self._phase_deadline_ms, *deadlines])
        self._validate_phase()

    def _validate_phase(self) -> None:
        members = self.membership.members
        if self.state in (GroupState.EMPTY, GroupState.DEAD):
            assert not members
        elif self.state is not GroupState.PREPARING_REBALANCE:
            assert members
        if self.state is GroupState.COMPLETING_REBALANCE:
            assert not self.membership.joining
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            assert self.protocol_name in self.membership.supported_by_all()
        if self.state is not GroupState.COMPLETING_REBALANCE:
            assert all(member.sync_ticket is None for member in members.values())
            assert self._assigning is None
