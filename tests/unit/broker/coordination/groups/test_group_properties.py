"""For any order of events: each ticket is answered once, generations agree, and assignments are the leader's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    GroupImage,
    GroupLimits,
    Instruction,
    JoinAnswer,
    JoinRequest,
    LeavingMember,
    Persist,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.wake_times import Instant

LIMITS = GroupLimits(members_max=5, session_timeout_ms_min=1, initial_rebalance_delay_ms=100, new_member_timeout_ms=5_000)
PROTOCOLS = st.lists(st.sampled_from(["range", "roundrobin", "sticky"]), min_size=1, unique=True).map(
    lambda names: tuple((name, f"wants {name}".encode()) for name in names)
)
INSTANCES = st.sampled_from([None, None, "a", "b"])


class GroupMachine(RuleBasedStateMachine):
    members = Bundle("members")
    """Member ids that the group assigned, with the instance id of the request."""
    persists = Bundle("persists")

    def __init__(self) -> None:
        super().__init__()
        self.group = Group("group", LIMITS, 0)
        self.now = Instant(1_000, 1_000)
        self.tickets = 0
        self.open: dict[int, tuple[str, str | None]] = {}
        self.generations: dict[int, JoinAnswer] = {}
        self.sync_generation: dict[int, tuple[int, str]] = {}
        self.persisting: list[Persist] = []
        self.stored: GroupImage | None = None

    def ticket(self, member_id: str, instance_id: str | None) -> int:
        self.tickets += 1
        self.open[self.tickets] = (member_id, instance_id)
        return self.tickets

    def do(self, instructions: Iterable[Instruction]) -> Any:
        known = []
        for instruction in instructions:
            if isinstance(instruction, Persist):
                self.persisting.append(instruction)
                continue
            _, instance_id = self.open.pop(instruction.ticket)
            if isinstance(instruction.value, JoinAnswer):
                known += self.joined(instruction.value, instance_id)
            else:
                assert isinstance(instruction.value, SyncAnswer)
                self.synced(instruction, instruction.value)
        return multiple(*known)

    def joined(self, answer: JoinAnswer, instance_id: str | None) -> list[tuple[str, str | None]]:
        if answer.error not in (ErrorCode.none, ErrorCode.member_id_required):
            return []
        if answer.error is ErrorCode.none:
            first = self.generations.setdefault(answer.generation, answer)
            assert (answer.protocol_name, answer.protocol_type) == (first.protocol_name, first.protocol_type)
            if answer.members:
                assert answer.leader == answer.member_id
                assert answer.member_id in {member.member_id for member in answer.members}
                assert all(member.metadata == f"wants {answer.protocol_name}".encode() for member in answer.members)
        return [(answer.member_id, instance_id)]

    def synced(self, instruction: Answer, answer: SyncAnswer) -> None:
        generation, member_id = self.sync_generation.pop(instruction.ticket)
        if answer.error is ErrorCode.none:
            assert generation == self.group.generation
            assert answer.assignment in (b"", f"{generation} assigns".encode()), member_id
            assert self.stored is not None
            assert self.stored.generation == generation, "an assignment is in the log before anybody hears of it"

    @initialize(target=members, instances=st.lists(st.sampled_from([None, "a", "b"]), max_size=3, unique=True))
    def begin(self, instances: list[str | None]) -> Any:
        done = [self.join("", instance_id, (("range", b"wants range"),), True, 3_000) for instance_id in instances]
        return multiple(*(value for one in done for value in one.values))

    @rule(
        target=members,
        instance_id=INSTANCES,
        protocols=PROTOCOLS,
        old=st.booleans(),
        rebalance_ms=st.sampled_from([500, 3_000]),
    )
    def join_anew(self, instance_id: str | None, protocols: Any, old: bool, rebalance_ms: int) -> Any:
        return self.join("", instance_id, protocols, old, rebalance_ms)

    @rule(target=members, member=members, protocols=PROTOCOLS, old=st.booleans())
    def join_again(self, member: tuple[str, str | None], protocols: Any, old: bool) -> Any:
        return self.join(member[0], member[1], protocols, old, 3_000)

    def join(self, member_id: str, instance_id: str | None, protocols: Any, old: bool, rebalance_ms: int) -> Any:
        ticket = self.ticket(member_id, instance_id)
        request = JoinRequest(
            ticket=ticket, member_id=member_id, fresh_member_id=f"member-{ticket}", group_instance_id=instance_id,
            client_id="client", client_host="/127.0.0.1", protocol_type="consumer", protocols=protocols,
            session_timeout_ms=2_000, rebalance_timeout_ms=rebalance_ms, requires_known_member=not old,
            can_skip_assignment=not old,
        )  # fmt: skip
        return self.do(self.group.join(request, self.now))

    @rule(member=members, stale=st.booleans())
    def sync(self, member: tuple[str, str | None], stale: bool) -> None:
        generation = self.group.generation - stale
        ticket = self.ticket(*member)
        self.sync_generation[ticket] = (generation, member[0])
        assignments = tuple((name, f"{generation} assigns".encode()) for name in self.group.membership.members)
        leads = self.group.membership.leader == member[0]
        request = SyncRequest(
            ticket=ticket, member_id=member[0], group_instance_id=member[1], generation=generation,
            assignments=assignments if leads else (),
        )  # fmt: skip
        self.do(self.group.sync(request, self.now))

    @rule(target=members, leader_last=st.booleans(), followers_sync=st.booleans(), writes=st.booleans())
    def everybody_rejoins_and_syncs(self, leader_last: bool, followers_sync: bool, writes: bool) -> Any:
        """Complete a rebalance as clients do, or as far as the leader can; random single steps rarely get that far."""
        done = [self.pass_time(101), *self.rejoin_all()]
        everybody = [(member.member_id, member.group_instance_id) for member in self.group.membership.members.values()]
        if self.group.state is GroupState.COMPLETING_REBALANCE:
            for identity in reversed(everybody) if leader_last else everybody:
                if followers_sync or identity[0] == self.group.membership.leader:
                    self.sync(identity, stale=False)
        while writes and self.persisting:
            done.append(self.persist(ErrorCode.none))
        return multiple(*(value for one in done for value in one.values))

    @rule(target=members, number=st.integers(0, 3), fails=st.booleans())
    def a_static_member_restarts(self, number: int, fails: bool) -> Any:
        """Join again by instance id alone; the member's new id is written, or the write fails."""
        static = [member for member in self.group.membership.members.values() if member.is_static]
        if not static:
            return multiple()
        member = static[number % len(static)]
        done = [self.join("", member.group_instance_id, member.protocols, False, 3_000)]
        while self.persisting:
            done.append(self.persist(ErrorCode.coordinator_not_available if fails else ErrorCode.none))
        return multiple(*(value for one in done for value in one.values))

    def rejoin_all(self) -> list[Any]:
        if self.group.state is not GroupState.PREPARING_REBALANCE:
            return []
        absent = [member for member in self.group.membership.members.values() if member.join_ticket is None]
        done = [self.join(member.member_id, member.group_instance_id, member.protocols, False, 3_000) for member in absent]
        return [*done, *(self.pass_time(100) for _ in range(3))]

    @rule(member=members)
    def heartbeat(self, member: tuple[str, str | None]) -> None:
        error = self.group.heartbeat(*member, self.group.generation, self.now)
        assert (error is ErrorCode.unknown_member_id) <= (member[0] not in self.group.membership.members)

    @rule(member=members, generation=st.sampled_from([-1, 0]))
    def commit(self, member: tuple[str, str | None], generation: int) -> None:
        error = self.group.check_commit("", None, -1, self.now)
        assert (error is ErrorCode.none) == (self.group.state is GroupState.EMPTY)
        error = self.group.check_commit(*member, self.group.generation + generation, self.now)
        if error is ErrorCode.none and self.group.state is not GroupState.EMPTY:
            assert member[0] in self.group.membership.members
            assert generation == 0

    @rule(target=members, member=consumes(members))
    def leave(self, member: tuple[str, str | None]) -> Any:
        error, instructions = self.group.leave(LeavingMember(member_id=member[0], group_instance_id=member[1]), self.now)
        if error is ErrorCode.none:
            assert member[0] not in self.group.membership.members
        return self.do(instructions)

    @rule(target=members, delay_ms=st.sampled_from([1, 50, 101, 600, 1_900, 2_001, 6_000]))
    def wait(self, delay_ms: int) -> Any:
        return self.pass_time(delay_ms)

    def pass_time(self, delay_ms: int) -> Any:
        self.now = Instant(self.now.monotonic_ms + delay_ms, self.now.wall_ms + delay_ms)
        return self.do(self.group.tick(self.now))

    @rule(target=members, fails=st.booleans())
    def persisted(self, fails: bool) -> Any:
        if not self.persisting:
            return multiple()
        return self.persist(ErrorCode.coordinator_not_available if fails else ErrorCode.none)

    def persist(self, error: ErrorCode) -> Any:
        persist = self.persisting.pop(0)
        if error is ErrorCode.none:
            self.stored = persist.image
        return self.do(self.group.on_persisted(persist.token, error, self.now))

    @rule()
    def fail_over(self) -> None:
        """Load the group from the log, as another broker does in a takeover; waiting requests are lost."""
        self.open.clear()
        self.sync_generation.clear()
        self.persisting.clear()
        self.generations.clear()
        if self.stored is None:
            self.group = Group("group", LIMITS, self.now.wall_ms)
        else:
            self.group = Group.from_image(self.stored, LIMITS, self.now)
            assert self.group.image() == self.stored

    @invariant()
    def holds(self) -> None:
        self.group.validate_state()
        waiting = {m.join_ticket for m in self.group.membership.members.values()}
        waiting |= {m.sync_ticket for m in self.group.membership.members.values()}
        assert waiting - {None} == self.open.keys(), "every unanswered ticket belongs to a member that waits"

    def teardown(self) -> None:
        """Without heartbeats all members expire, and every request has been answered."""
        for _ in range(40):
            while self.persisting:
                self.persist(ErrorCode.none)
            self.pass_time(1_000)
        assert self.group.state is GroupState.EMPTY
        assert not self.open
        assert not self.group.pending_members


TestGroupProperties = GroupMachine.TestCase
TestGroupProperties.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)
