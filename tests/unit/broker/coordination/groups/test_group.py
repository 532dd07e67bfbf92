"""The state machine of one group: joins, rebalances, static members, expiry."""

from __future__ import annotations

from collections.abc import Iterable

from kio.schema.errors import ErrorCode

from stratalog_broker.coordination.groups.core.group import Group
from stratalog_broker.coordination.groups.core.messages import (
    Answer,
    GroupLimits,
    Instruction,
    JoinAnswer,
    JoinRequest,
    LeavingMember,
    Persist,
    Protocols,
    SyncAnswer,
    SyncRequest,
)
from stratalog_broker.coordination.groups.core.rebalance import GroupState
from stratalog_broker.coordination.wake_times import Instant

LIMITS = GroupLimits(initial_rebalance_delay_ms=1_000, members_max=3)
RANGE: Protocols = (("range", b"topics"),)


class Conversation:
    """A group with a clock; collects its answers, and its persists until the test confirms them."""

    def __init__(self, limits: GroupLimits = LIMITS) -> None:
        self.now = Instant(0, 1_000_000)
        self.group = Group("group", limits, self.now.wall_ms)
        self.answers: dict[int, JoinAnswer | SyncAnswer] = {}
        self.persists: list[Persist] = []
        self.tickets = 0

    def state(self) -> GroupState:
        return self.group.state

    def take(self, instructions: Iterable[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Answer):
                assert instruction.ticket not in self.answers
                assert isinstance(instruction.value, JoinAnswer | SyncAnswer)
                self.answers[instruction.ticket] = instruction.value
            else:
                self.persists.append(instruction)

    def join(
        self, member_id: str = "", *, instance: str | None = None, protocols: Protocols = RANGE, old: bool = True,
        session_timeout_ms: int = 10_000, protocol_type: str = "consumer", can_skip: bool = True,
    ) -> int:  # fmt: skip
        self.tickets += 1
        request = JoinRequest(
            ticket=self.tickets, member_id=member_id, fresh_member_id=f"m{self.tickets}", group_instance_id=instance,
            client_id="client", client_host="/127.0.0.1", protocol_type=protocol_type, protocols=protocols,
            session_timeout_ms=session_timeout_ms, rebalance_timeout_ms=20_000, requires_known_member=not old,
            can_skip_assignment=can_skip,
        )  # fmt: skip
        self.take(self.group.join(request, self.now))
        return self.tickets

    def sync(self, member_id: str, assignments: dict[str, bytes] | None = None, *, instance: str | None = None) -> int:
        self.tickets += 1
        request = SyncRequest(
            ticket=self.tickets, member_id=member_id, group_instance_id=instance, generation=self.group.generation,
            assignments=tuple((assignments or {}).items()),
        )  # fmt: skip
        self.take(self.group.sync(request, self.now))
        return self.tickets

    def wait(self, milliseconds: int) -> None:
        self.now = Instant(self.now.monotonic_ms + milliseconds, self.now.wall_ms + milliseconds)
        self.take(self.group.tick(self.now))

    def persisted(self, error: ErrorCode = ErrorCode.none) -> None:
        persists, self.persists = self.persists, []
        for persist in persists:
            self.take(self.group.on_persisted(persist.token, error, self.now))

    def heartbeat(self, member_id: str) -> ErrorCode:
        return self.group.heartbeat(member_id, None, self.group.generation, self.now)

    def leave(self, member_id: str, instance: str | None = None) -> ErrorCode:
        error, instructions = self.group.leave(LeavingMember(member_id=member_id, group_instance_id=instance), self.now)
        self.take(instructions)
        return error

    def joined(self, ticket: int) -> JoinAnswer:
        answer = self.answers[ticket]
        assert isinstance(answer, JoinAnswer)
        return answer

    def synced(self, ticket: int) -> SyncAnswer:
        answer = self.answers[ticket]
        assert isinstance(answer, SyncAnswer)
        return answer

    def stable(self, *instances: str | None) -> list[str]:
        """Bring a group of members into the stable state; return their ids, the leader's first."""
        tickets = [self.join(instance=instance) for instance in instances]
        self.wait(1_000)
        self.wait(1_000)
        ids = [self.joined(ticket).member_id for ticket in tickets]
        for member_id, instance in zip(ids, instances, strict=True):
            self.sync(member_id, {name: f"for {name}".encode() for name in ids}, instance=instance)
        self.persisted()
        assert self.state() is GroupState.STABLE
        return ids


def test_a_dynamic_member_is_told_its_id_first() -> None:
    talk = Conversation()
    told = talk.joined(talk.join(old=False))
    assert (told.error, told.member_id) == (ErrorCode.member_id_required, "m1")
    ticket = talk.join("m1", old=False)
    assert ticket not in talk.answers
    talk.wait(1_000)
    answer = talk.joined(ticket)
    assert (answer.error, answer.generation, answer.leader, answer.member_id) == (ErrorCode.none, 1, "m1", "m1")
    assert answer.protocol_name == "range"
    assert [member.metadata for member in answer.members] == [b"topics"]


def test_an_id_that_was_never_used_is_forgotten() -> None:
    talk = Conversation()
    talk.join(old=False)
    talk.wait(10_000)
    assert talk.joined(talk.join("m1", old=False)).error is ErrorCode.unknown_member_id


def test_the_first_rebalance_waits_for_latecomers() -> None:
    talk = Conversation()
    first = talk.join()
    talk.wait(900)
    second = talk.join()
    talk.wait(100)
    assert first not in talk.answers, "somebody came, so it waits once more"
    talk.wait(1_000)
    assert talk.joined(first).generation == talk.joined(second).generation == 1
    assert len(talk.joined(first).members) == 2
    assert talk.joined(second).members == ()


def test_assignments_are_handed_out_once_they_are_in_the_log() -> None:
    talk = Conversation()
    first, second = talk.join(), talk.join()
    talk.wait(1_000)
    talk.wait(1_000)
    waiting = talk.sync("m2")
    leading = talk.sync("m1", {"m1": b"one", "m2": b"two"})
    assert waiting not in talk.answers
    assert leading not in talk.answers
    assert talk.state() is GroupState.COMPLETING_REBALANCE
    talk.persisted()
    assert (talk.synced(waiting).assignment, talk.synced(leading).assignment) == (b"two", b"one")
    assert talk.synced(talk.sync("m2")).assignment == b"two"
    assert (first, second) == (1, 2)


def test_an_assignment_that_was_not_written_starts_over() -> None:
    talk = Conversation()
    talk.join()
    talk.wait(1_000)
    leading = talk.sync("m1", {"m1": b"one"})
    talk.persisted(ErrorCode.coordinator_not_available)
    assert talk.synced(leading).error is ErrorCode.coordinator_not_available
    assert talk.state() is GroupState.PREPARING_REBALANCE
    assert talk.heartbeat("m1") is ErrorCode.rebalance_in_progress
    assert talk.joined(talk.join("m1")).generation == 2


def test_a_new_member_calls_the_others_back() -> None:
    talk = Conversation()
    one, two = talk.stable(None, None)
    joining = talk.join()
    assert talk.heartbeat(one) is ErrorCode.rebalance_in_progress
    again = [talk.join(one), talk.join(two)]
    assert {talk.joined(ticket).generation for ticket in (joining, *again)} == {2}
    assert len(talk.joined(again[0]).members) == 3


def test_who_does_not_rejoin_in_time_is_left_out() -> None:
    talk = Conversation()
    one, _ = talk.stable(None, None)
    rejoined = talk.join(one)
    for _ in range(5):
        talk.wait(4_000)
        talk.heartbeat("m2")
    answer = talk.joined(rejoined)
    assert (answer.generation, len(answer.members)) == (2, 1)
    assert talk.heartbeat("m2") is ErrorCode.unknown_member_id


def test_a_member_that_does_not_fetch_its_assignment_is_left_out() -> None:
    talk = Conversation()
    first, second = talk.join(session_timeout_ms=60_000), talk.join(session_timeout_ms=60_000)
    talk.wait(1_000)
    talk.wait(1_000)
    talk.sync("m1", {"m1": b"all"})
    talk.persisted()
    assert talk.state() is GroupState.STABLE
    talk.wait(20_000)
    assert talk.state() is GroupState.PREPARING_REBALANCE
    assert list(talk.group.membership.members) == ["m1"]
    assert (first, second) == (1, 2)


def test_a_silent_member_expires_and_an_empty_group_is_written() -> None:
    talk = Conversation()
    talk.stable(None)
    talk.wait(9_000)
    talk.heartbeat("m1")
    talk.wait(9_000)
    assert talk.state() is GroupState.STABLE
    talk.wait(1_000)
    assert talk.state() is GroupState.EMPTY
    assert talk.persists[-1].image.members == ()
    assert talk.persists[-1].image.state_since_ms == talk.now.wall_ms


def test_members_that_leave() -> None:
    talk = Conversation()
    one, two = talk.stable(None, None)
    assert talk.leave("nobody") is ErrorCode.unknown_member_id
    assert talk.leave(one) is ErrorCode.none
    assert talk.group.membership.leader == two
    assert talk.heartbeat(two) is ErrorCode.rebalance_in_progress
    assert talk.joined(talk.join(two)).leader == two
    assert talk.leave(two) is ErrorCode.none
    assert talk.state() is GroupState.EMPTY


def test_an_unchanged_follower_keeps_the_generation_and_the_leader_renews_it() -> None:
    talk = Conversation()
    one, two = talk.stable(None, None)
    assert talk.joined(talk.join(two)).generation == 1
    assert talk.state() is GroupState.STABLE
    talk.join(one)
    assert talk.state() is GroupState.PREPARING_REBALANCE


def test_a_follower_with_other_topics_renews_the_generation() -> None:
    talk = Conversation()
    _, two = talk.stable(None, None)
    talk.join(two, protocols=(("range", b"other topics"),))
    assert talk.state() is GroupState.PREPARING_REBALANCE


def test_a_static_member_returns_to_its_assignment_without_a_rebalance() -> None:
    talk = Conversation()
    one, two = talk.stable("a", "b")
    returned = talk.join(instance="b")
    talk.persisted()
    answer = talk.joined(returned)
    assert (answer.error, answer.generation, answer.leader, answer.members) == (ErrorCode.none, 1, one, ())
    assert answer.member_id != two
    assert talk.synced(talk.sync(answer.member_id, instance="b")).assignment == f"for {two}".encode()
    assert talk.group.heartbeat(two, "b", 1, talk.now) is ErrorCode.fenced_instance_id


def test_a_static_leader_that_returns_skips_the_assignment() -> None:
    talk = Conversation()
    one, _ = talk.stable("a", "b")
    returned = talk.join(instance="a")
    talk.persisted()
    answer = talk.joined(returned)
    assert (answer.skip_assignment, answer.leader, len(answer.members)) == (True, answer.member_id, 2)
    returned = talk.join(instance="a", can_skip=False)
    talk.persisted()
    old = talk.joined(returned)
    assert (old.skip_assignment, old.leader, old.members) == (False, answer.member_id, ())
    assert one not in talk.group.membership.members


def test_a_static_replacement_that_was_not_written_is_taken_back() -> None:
    talk = Conversation()
    _, two = talk.stable("a", "b")
    returned = talk.join(instance="b")
    talk.persisted(ErrorCode.not_coordinator)
    assert talk.joined(returned).error is ErrorCode.not_coordinator
    assert talk.group.membership.instances["b"] == two


def test_a_static_member_whose_replacement_failed_still_has_to_fetch_its_assignment() -> None:
    talk = Conversation()
    first, second = (talk.join(instance=instance, session_timeout_ms=60_000) for instance in ("a", "b"))
    talk.wait(1_000)
    talk.wait(1_000)
    leader, follower = talk.joined(first).member_id, talk.joined(second).member_id
    talk.sync(leader, {leader: b"", follower: b"all"}, instance="a")
    talk.persisted()
    talk.join(instance="b", session_timeout_ms=60_000)
    talk.persisted(ErrorCode.not_coordinator)
    talk.group.validate_state()
    talk.wait(20_000)
    assert talk.state() is GroupState.PREPARING_REBALANCE
    assert list(talk.group.membership.members) == [leader]


def test_a_static_member_can_be_removed_by_its_instance() -> None:
    talk = Conversation()
    talk.stable("a", "b")
    assert talk.leave("", "nobody") is ErrorCode.unknown_member_id
    assert talk.leave("", "b") is ErrorCode.none
    assert "b" not in talk.group.membership.instances


def test_a_static_member_outlives_a_rebalance_that_it_missed() -> None:
    talk = Conversation()
    first, second = talk.join(instance="a", session_timeout_ms=60_000), talk.join(instance="b", session_timeout_ms=60_000)
    talk.wait(1_000)
    talk.wait(1_000)
    talk.join("m2", instance="b", protocols=(("range", b"other"),), session_timeout_ms=60_000)
    again = talk.join("m2", instance="b", protocols=(("range", b"other"),), session_timeout_ms=60_000)
    talk.wait(20_000)
    assert (first, second) == (1, 2)
    assert talk.joined(again).leader == "m2"
    assert [member.member_id for member in talk.joined(again).members] == ["m1", "m2"]


def test_the_protocol_is_voted_for() -> None:
    talk = Conversation()
    both: Protocols = (("range", b"1"), ("sticky", b"2"))
    tickets = [talk.join(protocols=both), talk.join(protocols=both[::-1]), talk.join(protocols=both[::-1])]
    talk.wait(1_000)
    talk.wait(1_000)
    assert {talk.joined(ticket).protocol_name for ticket in tickets} == {"sticky"}
    assert [member.metadata for member in talk.joined(tickets[0]).members] == [b"2"] * 3


def test_what_is_refused() -> None:
    talk = Conversation()
    assert talk.joined(talk.join(session_timeout_ms=1)).error is ErrorCode.invalid_session_timeout
    assert talk.joined(talk.join(protocols=())).error is ErrorCode.inconsistent_group_protocol
    talk.stable(None)
    assert talk.joined(talk.join(protocols=(("other", b""),))).error is ErrorCode.inconsistent_group_protocol
    assert talk.joined(talk.join(protocol_type="connect")).error is ErrorCode.inconsistent_group_protocol
    assert talk.joined(talk.join(protocols=(("range", bytes(300_000)),))).error is ErrorCode.message_too_large
    talk.join()
    talk.join()
    assert talk.joined(talk.join()).error is ErrorCode.group_max_size_reached


def test_commits_need_a_member_of_the_generation_or_an_empty_group() -> None:
    talk = Conversation()
    check = talk.group.check_commit
    assert check("", None, -1, talk.now) is ErrorCode.none
    (one,) = talk.stable(None)
    assert check("", None, -1, talk.now) is ErrorCode.unknown_member_id
    assert check(one, None, 1, talk.now) is ErrorCode.none
    assert check(one, None, 0, talk.now) is ErrorCode.illegal_generation
    talk.join(one)
    assert talk.state() is GroupState.COMPLETING_REBALANCE
    assert check(one, None, 2, talk.now) is ErrorCode.rebalance_in_progress


def test_a_group_is_deleted_only_when_it_is_empty() -> None:
    talk = Conversation()
    (one,) = talk.stable(None)
    assert talk.group.delete(talk.now) is ErrorCode.non_empty_group
    talk.leave(one)
    assert talk.group.delete(talk.now) is ErrorCode.none
    assert talk.joined(talk.join()).error is ErrorCode.coordinator_not_available
    assert talk.group.delete(talk.now) is ErrorCode.group_id_not_found


def test_a_stable_group_survives_its_broker() -> None:
    talk = Conversation()
    one, two = talk.stable(None, "b")
    image = talk.group.image()
    talk.group = Group.from_image(image, LIMITS, talk.now)
    talk.wait(9_000)
    assert talk.heartbeat(one) is ErrorCode.none
    assert talk.synced(talk.sync(two, instance="b")).assignment == f"for {two}".encode()
    assert talk.group.image() == image
    talk.wait(9_999)
    assert talk.state() is GroupState.STABLE
    talk.wait(1)
    assert talk.state() is GroupState.EMPTY
