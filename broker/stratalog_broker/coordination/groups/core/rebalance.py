"""The phases of a group's rebalance. The requests that drive them are in ``group.py`` and ``joining.py``. Does no I/O.

Kafka's classic protocol (KIP-62, KIP-134, KIP-345, KIP-394)::

    EMPTY ──join──▶ PREPARING ──all joined, or time-out──▶ COMPLETING ──leader's sync persisted──▶ STABLE
      ▲                 ▲  └─no members──▶ EMPTY               │                                      │
      └─────────────────┴──────join, leave, expiry─────────────┴──────────────────────────────────────┘
    any ──deleted──▶ DEAD

Invariants: a generation's answers go only to members of that generation; a generation becomes STABLE only after its
assignment is in the log; time advances only through the ``now`` of each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.deadlines import Deadlines
from stratalog_broker.coordination.groups.core.instruction_queue import InstructionQueue
from stratalog_broker.coordination.groups.core.membership import Member, Membership
from stratalog_broker.coordination.groups.core.messages import (
    GroupImage,
    GroupLimits,
    JoinAnswer,
    JoinedMember,
    SyncAnswer,
)
from stratalog_broker.coordination.wake_times import Instant


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
    """State, generation and protocol of one group, and its transitions. It alone adds, removes and renames members."""

    def __init__(
        self,
        group_id: str,
        limits: GroupLimits,
        state_since_ms: int,
        membership: Membership,
        deadlines: Deadlines,
        instructions: InstructionQueue,
    ) -> None:
        self.group_id = group_id
        self.state = GroupState.EMPTY
        self.state_since_ms = state_since_ms
        self.generation = 0
        self.protocol_type = ""
        self.protocol_name: str | None = None
        self.pending_members: dict[str, int] = {}
        """Ids returned with MEMBER_ID_REQUIRED whose members have not joined yet, with their expiry times."""
        self._limits = limits
        self._membership = membership
        self._deadlines = deadlines
        self._instructions = instructions
        self._unsynced: set[str] = set()
        self._initial_end_ms: int | None = None
        self._member_came = False
        self._assigning: int | None = None

    def _move_to(self, state: GroupState, now: Instant) -> None:
        assert self.state in _PREVIOUS[state], f"{self.group_id}: {self.state} to {state}"
        self.state = state
        self.state_since_ms = now.wall_ms
        self._deadlines.clear_phase()

    def end(self, now: Instant) -> None:
        """Move a group without members to DEAD."""
        self._move_to(GroupState.DEAD, now)

    # -- members

    def add(self, member: Member, protocol_type: str, join_ticket: int, now: Instant) -> None:
        """Add a member that joins, and rebalance. The first member decides the group's protocol type."""
        self.pending_members.pop(member.member_id, None)
        if not self._membership.members:
            self.protocol_type = protocol_type
        self._membership.add(member, join_ticket)
        self._deadlines.expect_heartbeat(member, now, self._limits.new_member_timeout_ms)
        self._member_came = True
        self.member_joined(now)

    def add_pending(self, member_id: str, expires_at_ms: int) -> None:
        """Expect the client that was given this id to join with it (KIP-394)."""
        self.pending_members[member_id] = expires_at_ms
        self._deadlines.wake_by(expires_at_ms)

    def remove(self, member_id: str, now: Instant) -> None:
        """Remove a member, pending or not, that left or expired."""
        if self.pending_members.pop(member_id, None) is not None:
            self._maybe_complete_join(now)
            return
        self._drop(member_id, ErrorCode.unknown_member_id)
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self._start_rebalance(now)
        else:
            self._maybe_complete_join(now)

    def rename(self, member: Member, member_id: str) -> None:
        """Change the id of a returning static member; it owes the same requests as before."""
        old_id = member.member_id
        self._membership.rename(member, member_id)
        if old_id in self._unsynced:
            self._unsynced.remove(old_id)
            self._unsynced.add(member_id)

    def dissolve(self, error: ErrorCode) -> None:
        """Answer all waiting requests with ``error``, because the group goes on in the consumer protocol."""
        for member in self._membership.members.values():
            self._instructions.answer_join(member, JoinAnswer(error=error, member_id=member.member_id))
            self._instructions.answer_sync(member, SyncAnswer(error=error))

    def _drop(self, member_id: str, error: ErrorCode) -> None:
        """Remove a member; answer its pending requests with ``error``."""
        member = self._membership.remove(member_id)
        self._unsynced.discard(member_id)
        if member.join_ticket is not None:
            self._instructions.answer(member.join_ticket, JoinAnswer(error=error))
        self._instructions.answer_sync(member, SyncAnswer(error=error))

    # -- phase one: all members join

    def _start_rebalance(self, now: Instant) -> None:
        """Make all members rejoin. The first rebalance of an empty group waits a short time for more members."""
        if self.state is GroupState.COMPLETING_REBALANCE:
            self._abort_sync(ErrorCode.rebalance_in_progress)
        was_empty = self.state is GroupState.EMPTY
        self._unsynced.clear()
        self._move_to(GroupState.PREPARING_REBALANCE, now)
        timeout_ms = self._rebalance_timeout_ms()
        if was_empty:
            delay_ms = min(self._limits.initial_rebalance_delay_ms, timeout_ms)
            self._initial_end_ms = now.monotonic_ms + timeout_ms
            self._member_came = False
            self._deadlines.set_phase(now.monotonic_ms + delay_ms)
        else:
            self._initial_end_ms = None
            self._deadlines.set_phase(now.monotonic_ms + timeout_ms)
        self._maybe_complete_join(now)

    def member_joined(self, now: Instant) -> None:
        """Start a rebalance, or complete the current join phase if this was the last member that it waited for."""
        if self.state in _PREVIOUS[GroupState.PREPARING_REBALANCE]:
            self._start_rebalance(now)
        else:
            self._maybe_complete_join(now)

    def _maybe_complete_join(self, now: Instant) -> None:
        """Complete the join phase once all known members have joined; a first rebalance always waits for its delay."""
        initial_delay = self._initial_end_ms is not None and self._limits.initial_rebalance_delay_ms > 0
        if self.state is not GroupState.PREPARING_REBALANCE or (initial_delay and len(self._membership)):
            return
        if self._membership.joining == len(self._membership) and not self.pending_members:
            self._complete_join(now)

    def _join_deadline(self, now: Instant) -> None:
        """Handle the end of the delay or time-out; a first rebalance that a member joined in the delay waits once more."""
        end_ms = self._initial_end_ms
        if end_ms is not None and self._member_came and now.monotonic_ms < end_ms:
            self._member_came = False
            self._deadlines.set_phase(min(now.monotonic_ms + self._limits.initial_rebalance_delay_ms, end_ms))
        else:
            self._complete_join(now)

    def _complete_join(self, now: Instant) -> None:
        """Drop dynamic members that did not rejoin and answer the others with the new generation. Static members stay."""
        absent = [m for m in self._membership.members.values() if m.join_ticket is None and not m.is_static]
        for member in absent:
            self._drop(member.member_id, ErrorCode.unknown_member_id)
        if self._membership.members and not self._membership.elect_joined_leader():
            self._deadlines.set_phase(now.monotonic_ms + self._rebalance_timeout_ms())
            return
        self.generation += 1
        self._initial_end_ms = None
        self._assigning = None
        if not self._membership.members:
            self.protocol_name = None
            self._move_to(GroupState.EMPTY, now)
            self.persist()
            return
        self.protocol_name = self._membership.choose_protocol()
        self._move_to(GroupState.COMPLETING_REBALANCE, now)
        self._answer_joins(now)

    def _answer_joins(self, now: Instant) -> None:
        # An absent static member need not sync: it stays a member until its own session expires (KIP-345).
        for member in self._membership.members.values():
            member.assignment = b""
            if member.join_ticket is not None:
                self._unsynced.add(member.member_id)
                self._instructions.answer_join(member, self.join_answer(member))
                member.is_new = False
                self._deadlines.expect_heartbeat(member, now)
        self._deadlines.set_phase(now.monotonic_ms + self._rebalance_timeout_ms())

    def join_answer(self, member: Member) -> JoinAnswer:
        leads = member.member_id == self._membership.leader
        return JoinAnswer(
            generation=self.generation, protocol_type=self.protocol_type, protocol_name=self.protocol_name,
            leader=self._membership.leader or "", member_id=member.member_id, members=self._joined_members() if leads else (),
        )  # fmt: skip

    def _joined_members(self) -> tuple[JoinedMember, ...]:
        return tuple(
            JoinedMember(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                metadata=member.metadata_for(self.protocol_name),
            )
            for member in self._membership.members.values()
        )

    # -- phase two: the leader's assignment

    def member_synced(self, member_id: str) -> None:
        """Record that a member of this generation has requested its assignment."""
        self._unsynced.discard(member_id)

    def assign(self, assignments: Mapping[str, bytes], now: Instant) -> None:
        """Persist the leader's assignment; members get it only once it is in the log."""
        if self._assigning is not None:
            return
        members = self._membership.members.values()
        stored = sum(len(m.metadata_for(self.protocol_name)) + len(assignments.get(m.member_id, b"")) for m in members)
        if stored > self._limits.group_bytes_max:
            self._fail_assignment(ErrorCode.message_too_large, now)
            return
        for member in members:
            member.assignment = assignments.get(member.member_id, b"")
        self._assigning = self.persist()

    def on_persisted(self, token: int, error: ErrorCode, now: Instant) -> None:
        """Process the outcome of an image that :meth:`persist` queued; only the assignment's matters."""
        if token != self._assigning:
            return
        self._assigning = None
        if error is ErrorCode.none:
            self._complete_sync(now)
        else:
            self._fail_assignment(error, now)

    def _fail_assignment(self, error: ErrorCode, now: Instant) -> None:
        self._abort_sync(error)
        self._start_rebalance(now)

    def _abort_sync(self, error: ErrorCode) -> None:
        self._assigning = None
        self._unsynced.clear()
        for member in self._membership.members.values():
            member.assignment = b""
            self._instructions.answer_sync(member, SyncAnswer(error=error))

    def _complete_sync(self, now: Instant) -> None:
        """Send the assignment, which is in the log, to all waiting members."""
        deadline_ms = self._deadlines.phase_at_ms
        self._move_to(GroupState.STABLE, now)
        for member in self._membership.members.values():
            if member.sync_ticket is not None:
                self._instructions.answer_sync(member, self.sync_answer(member))
                self._deadlines.expect_heartbeat(member, now)
        if self._unsynced:
            self._deadlines.set_phase(deadline_ms)

    def _sync_deadline(self, now: Instant) -> None:
        """Drop members of the generation that never requested their assignment, and rebalance if there are any."""
        self._deadlines.clear_phase()
        missing = [member_id for member_id in self._unsynced if member_id in self._membership.members]
        for member_id in sorted(missing):
            self._drop(member_id, ErrorCode.unknown_member_id)
        if missing:
            self._start_rebalance(now)

    def sync_answer(self, member: Member) -> SyncAnswer:
        return SyncAnswer(protocol_type=self.protocol_type, protocol_name=self.protocol_name, assignment=member.assignment)

    # -- time

    def tick(self, now: Instant) -> None:
        """End phases and sessions whose deadline has passed."""
        if now.monotonic_ms >= self._deadlines.phase_at_ms:
            if self.state is GroupState.PREPARING_REBALANCE:
                self._join_deadline(now)
            else:
                self._sync_deadline(now)
        self._expire_members(now)
        self._deadlines.plan_wake(self._member_deadlines())

    def _member_deadlines(self) -> list[int]:
        sessions = [member.session_deadline_ms for member in self._membership.members.values()]
        return [*self.pending_members.values(), *sessions]

    def _expire_members(self, now: Instant) -> None:
        for member_id in [name for name, at_ms in self.pending_members.items() if at_ms <= now.monotonic_ms]:
            self.remove(member_id, now)
        for member in list(self._membership.members.values()):
            overdue = member.session_deadline_ms <= now.monotonic_ms and member.member_id in self._membership.members
            if overdue and (member.is_new or not member.is_waiting):
                self.remove(member.member_id, now)
            elif overdue:
                self._deadlines.expect_heartbeat(member, now)

    def _rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self._membership.members.values()), default=0)

    # -- stored image

    def persist(self) -> int:
        """Queue the group's image to be written; return its token."""
        return self._instructions.persist(self.image())

    def image(self) -> GroupImage:
        return GroupImage(
            group_id=self.group_id, protocol_type=self.protocol_type, generation=self.generation,
            protocol_name=self.protocol_name, leader=self._membership.leader, state_since_ms=self.state_since_ms,
            members=tuple(member.image(self.protocol_name) for member in self._membership.members.values()),
        )  # fmt: skip

    def restore(self, image: GroupImage, now: Instant) -> None:
        """Load a stored group into this new one. Its members' sessions start at ``now``."""
        self.generation = image.generation
        self.protocol_type = image.protocol_type
        self.protocol_name = image.protocol_name
        self.state = GroupState.STABLE if image.members else GroupState.EMPTY
        for stored in image.members:
            member = Member.from_image(stored, image.protocol_name)
            self._membership.add(member)
            self._deadlines.expect_heartbeat(member, now)
        if image.leader in self._membership.members:
            self._membership.leader = image.leader
        elif image.members and image.leader is None:
            self._start_rebalance(now)

    # -- checks

    def validate_state(self) -> None:
        """Assert the invariants."""
        self._membership.validate_state()
        members = self._membership.members
        assert not members.keys() & self.pending_members.keys()
        assert self._unsynced <= members.keys()
        assert self._deadlines.wake_at_ms <= min([self._deadlines.phase_at_ms, *self._member_deadlines()])
        self._validate_phase()

    def _validate_phase(self) -> None:
        members = self._membership.members
        if self.state in (GroupState.EMPTY, GroupState.DEAD):
            assert not members
        elif self.state is not GroupState.PREPARING_REBALANCE:
            assert members
        if self.state is GroupState.COMPLETING_REBALANCE:
            assert not self._membership.joining
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            assert self.protocol_name in self._membership.supported_by_all()
        if self.state is not GroupState.COMPLETING_REBALANCE:
            assert all(member.sync_ticket is None for member in members.values())
            assert self._assigning is None
