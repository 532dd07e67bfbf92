"""A group changes its protocol while its members go on: one member after the other, in both directions (KIP-848)."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.consumer_members import GROUP, Member
from unit.broker.coordination.groups.known_topics import KnownTopics
from unit.broker.coordination.groups.mixed_members import (
    REBALANCE_MS,
    ROUND_MS,
    SESSION_MS,
    ClassicMember,
    MixedGroup,
    subscription,
)

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroupPhase
from stratalog_broker.coordination.groups.core.consumer.settings import MigrationPolicy
from stratalog_broker.coordination.groups.core.messages import JoinRequest, LeaveRequest, LeavingMember
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.rebalance import GroupState

SETTLED = 12
"""Rounds after which nothing changes any more."""


@pytest.fixture
def group() -> MixedGroup:
    return MixedGroup(topics=KnownTopics(t=6))


def with_policy(policy: MigrationPolicy) -> MixedGroup:
    return MixedGroup(topics=KnownTopics(t=6), migration=policy)


def start_classic(group: MixedGroup, names: str, *, cooperative: bool = False) -> None:
    for name in names:
        group.start(ClassicMember(name, cooperative=cooperative))
    group.rounds(SETTLED)


def start_consumer(group: MixedGroup, *names: str) -> None:
    for name in names:
        group.start(Member(name))
    group.rounds(SETTLED)


def classic(group: MixedGroup, name: str) -> ClassicMember:
    found = group.members[name]
    assert isinstance(found, ClassicMember)
    return found


@pytest.mark.parametrize("cooperative", [False, True])
def test_members_are_replaced_one_by_one_by_those_of_the_consumer_protocol(group: MixedGroup, cooperative: bool) -> None:
    start_classic(group, "abc", cooperative=cooperative)
    assert group.shares() == [2, 2, 2]
    assert not group.is_consumer_group
    for name in "abc":
        group.leave(name)
        start_consumer(group, f"new-{name}")
        assert group.is_consumer_group
        assert group.shares() == [2, 2, 2]
        group.group.validate_state()
        assert group.group.phase is ConsumerGroupPhase.STABLE
    assert GROUP not in group.store.images, "the classic group is gone from the log"


@pytest.mark.parametrize("cooperative", [False, True])
def test_members_are_replaced_one_by_one_by_those_of_the_classic_protocol(group: MixedGroup, cooperative: bool) -> None:
    start_consumer(group, "a", "b", "c")
    for name in "abc":
        assert group.is_consumer_group
        group.leave(name)
        start_classic(group, name.upper(), cooperative=cooperative)
        assert group.shares() == [2, 2, 2]
    assert not group.is_consumer_group
    assert GROUP not in group.store.consumer_groups, "the consumer group is gone from the log"
    assert group.store.images[GROUP].protocol_type == "consumer"


@pytest.mark.parametrize("cooperative", [False, True])
def test_any_coordinator_may_die_between_the_steps(group: MixedGroup, cooperative: bool) -> None:
    start_classic(group, "abc", cooperative=cooperative)
    group.start(Member("new"))
    for _ in range(SETTLED):
        group.fail_over()
        group.rounds(1)
    group.rounds(SETTLED)
    assert group.shares() == [1, 1, 2, 2]
    assert group.is_consumer_group
    group.leave("new")
    group.confirm_all()
    for _ in range(SETTLED):
        group.fail_over()
        group.rounds(1)
    group.rounds(SETTLED)
    assert group.shares() == [2, 2, 2]
    assert not group.is_consumer_group


def test_the_generation_becomes_the_epoch_and_back(group: MixedGroup) -> None:
    start_classic(group, "ab")
    generation = classic(group, "a").generation
    start_consumer(group, "new")
    epoch = group.group.state.epoch
    assert epoch == generation + 1, "the new member raised it"
    assert classic(group, "a").generation == epoch
    group.leave("new")
    group.confirm_all()
    live = group.core.table.live[GROUP]
    assert (live.generation, live.state) == (epoch, GroupState.PREPARING_REBALANCE)
    assert group.core.heartbeat(GROUP, classic(group, "a").member_id, None, epoch, group.now) is ErrorCode.rebalance_in_progress


def test_a_member_keeps_what_it_still_reads_in_the_middle_of_a_rebalance(group: MixedGroup) -> None:
    start_classic(group, "a", cooperative=True)
    group.start(ClassicMember("b", cooperative=True))
    for name in "bbbaaab":
        group.act(name)
        group.confirm_all()
    assert group.core.table.live[GROUP].state is GroupState.COMPLETING_REBALANCE
    assert len(group.read_by("a")) == 6
    group.start(Member("new"))
    group.act("new")
    group.confirm_all()
    assert len(group.group.state.current_of(classic(group, "a").member_id).assigned) == 6, "nobody else gets them yet"
    group.rounds(SETTLED)
    assert group.shares() == [2, 2, 2]


def test_a_downgraded_group_rebalances_also_if_its_coordinator_dies_first(group: MixedGroup) -> None:
    start_classic(group, "ab")
    start_consumer(group, "new")
    group.leave("new")
    group.confirm_all()
    group.fail_over()
    assert group.core.table.live[GROUP].state is GroupState.PREPARING_REBALANCE
    group.rounds(SETTLED)
    assert group.shares() == [3, 3]


def test_a_group_is_downgraded_when_its_last_consumer_member_is_silent(group: MixedGroup) -> None:
    start_classic(group, "ab")
    start_consumer(group, "new")
    del group.members["new"]
    group.rounds(60)
    assert not group.is_consumer_group
    assert group.shares() == [3, 3]


# -- policies


@pytest.mark.parametrize("policy", [MigrationPolicy.DOWNGRADE, MigrationPolicy.DISABLED])
def test_a_classic_group_is_not_upgraded_if_the_policy_forbids_it(policy: MigrationPolicy) -> None:
    group = with_policy(policy)
    start_classic(group, "ab")
    answer = group.ask(Member("new").request(group.ticket()))
    assert answer.error is ErrorCode.group_id_not_found
    assert answer.message == f"Cannot upgrade classic group {GROUP} to consumer group because online upgrade is disabled."
    group.rounds(2)
    assert group.shares() == [3, 3]
    assert not group.is_consumer_group


def test_a_consumer_group_takes_no_classic_members_if_migration_is_disabled() -> None:
    group = with_policy(MigrationPolicy.DISABLED)
    start_consumer(group, "a")
    assert join(group, ClassicMember("b")) is ErrorCode.inconsistent_group_protocol
    assert group.shares() == [6]


def test_classic_members_go_on_in_a_consumer_group_if_only_upgrades_are_allowed() -> None:
    group = with_policy(MigrationPolicy.UPGRADE)
    start_classic(group, "ab", cooperative=True)
    start_consumer(group, "new")
    group.leave("new")
    group.rounds(SETTLED)
    assert group.is_consumer_group
    assert group.shares() == [3, 3]
    group.topics.grow("t", 8)
    group.rounds(SETTLED)
    assert group.shares() == [4, 4], "a heartbeat of a classic member notices new partitions, too"


@pytest.mark.parametrize("changed", [{"members_max": 1}, {"migration_bytes_max": 10}])
def test_a_group_that_is_too_large_is_not_upgraded(changed: dict[str, int]) -> None:
    group = MixedGroup(topics=KnownTopics(t=6), **changed)
    start_classic(group, "ab")
    assert group.ask(Member("new").request(group.ticket())).error is ErrorCode.group_id_not_found
    assert group.shares() == [3, 3]


def test_a_refused_member_upgrades_nothing() -> None:
    group = MixedGroup(topics=KnownTopics(t=6), members_max=2)
    start_classic(group, "ab")
    assert group.ask(Member("new").request(group.ticket())).error is ErrorCode.group_max_size_reached
    assert not group.is_consumer_group
    assert group.shares() == [3, 3]


def test_a_group_that_is_too_large_is_not_downgraded() -> None:
    group = MixedGroup(topics=KnownTopics(t=6), classic_members_max=1)
    start_classic(group, "ab")
    start_consumer(group, "new")
    group.leave("new")
    group.rounds(SETTLED)
    assert group.is_consumer_group
    assert group.shares() == [3, 3]


def join(group: MixedGroup, member: ClassicMember, **changed: object) -> ErrorCode:
    """Return the code with which one JoinGroup is answered."""
    ticket = group.ticket()
    fields = {
        "ticket": ticket, "member_id": member.member_id, "fresh_member_id": "fresh",
        "group_instance_id": member.instance_id, "client_id": "c", "client_host": "/h", "protocol_type": "consumer",
        "protocols": ((member.protocol, subscription(member.topics, member.owned)),), "session_timeout_ms": SESSION_MS,
        "rebalance_timeout_ms": REBALANCE_MS, **changed,
    }  # fmt: skip
    group.do(group.core.join(GROUP, JoinRequest(**fields), group.now))  # type: ignore[arg-type]
    group.confirm_all()
    error = group.answers.pop(ticket).error
    assert isinstance(error, ErrorCode)
    return error


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"protocol_type": "connect"}, ErrorCode.inconsistent_group_protocol),
        ({"protocols": (("range", b"\x00"),)}, ErrorCode.inconsistent_group_protocol),
        ({"protocols": ()}, ErrorCode.inconsistent_group_protocol),
        ({"session_timeout_ms": 1}, ErrorCode.invalid_session_timeout),
        ({"member_id": ""}, ErrorCode.member_id_required),
        ({"group_instance_id": "unknown"}, ErrorCode.unknown_member_id),
        ({"member_id": "m" * 40_000}, ErrorCode.invalid_request),
        ({}, ErrorCode.none),
    ],
)
def test_a_join_is_checked_as_in_a_classic_group(group: MixedGroup, changed: dict[str, object], error: ErrorCode) -> None:
    start_consumer(group, "a")
    assert join(group, ClassicMember("b", member_id="b"), **changed) is error


def test_classic_members_need_a_protocol_in_common(group: MixedGroup) -> None:
    start_consumer(group, "a")
    start_classic(group, "b")
    assert join(group, ClassicMember("c", cooperative=True, member_id="c")) is ErrorCode.inconsistent_group_protocol


# -- classic requests in a consumer group


def test_requests_of_classic_members_are_checked(group: MixedGroup) -> None:
    start_consumer(group, "a")
    start_classic(group, "b")
    member = classic(group, "b")
    now, beat = group.now, group.core.heartbeat
    assert beat(GROUP, member.member_id, None, member.generation, now) is ErrorCode.none
    assert beat(GROUP, member.member_id, None, member.generation - 1, now) is ErrorCode.illegal_generation
    assert beat(GROUP, "a", None, member.generation, now) is ErrorCode.unknown_member_id, "it is of the other protocol"
    assert beat(GROUP, "nobody", None, member.generation, now) is ErrorCode.unknown_member_id
    assert beat(GROUP, member.member_id, "nobody", member.generation, now) is ErrorCode.unknown_member_id
    commits = [Commit("t", 0, 1, -1, "", None)]
    plan = group.core.commits.plan
    assert plan(GROUP, member.member_id, None, member.generation, commits, now)[0] == [ErrorCode.none]
    assert plan(GROUP, member.member_id, None, member.generation + 1, commits, now)[0] == [ErrorCode.illegal_generation]
    assert plan(GROUP, "a", None, 9, commits, now)[0] == [ErrorCode.stale_member_epoch]


def test_several_members_leave_with_one_request(group: MixedGroup) -> None:
    start_consumer(group, "a")
    start_classic(group, "bc")
    names = (classic(group, "b").member_id, "nobody", classic(group, "c").member_id)
    request = LeaveRequest(ticket=group.ticket(), members=tuple(LeavingMember(member_id=name) for name in names))
    group.do(group.core.leave_consumer_group(GROUP, request, group.now))
    assert request.ticket not in group.answers, "the answer waits for the log"
    group.confirm_all()
    codes = (ErrorCode.none, ErrorCode.unknown_member_id, ErrorCode.none)
    assert group.answers.pop(request.ticket).errors == codes
    assert list(group.group.state.members) == ["a"]


def test_a_member_that_joined_before_a_change_of_protocol_has_to_join_again(group: MixedGroup) -> None:
    """It is not told that the assignment protocol is wrong, which would end the client."""
    group.start(ClassicMember("a", both=True))
    group.start(ClassicMember("b", both=True, cooperative=True))
    group.rounds(SETTLED)
    start_consumer(group, "new")
    for name in "abab":
        classic(group, name).step = "join"
        group.act(name)
        group.confirm_all()
    assert {classic(group, name).step for name in "ab"} == {"sync"}
    group.leave("new")
    group.confirm_all()
    for name in "abab":
        group.act(name)
    assert {classic(group, name).step for name in "ab"} == {"join"}
    group.rounds(SETTLED)
    assert group.shares() == [3, 3]


def test_a_classic_member_that_does_not_rejoin_in_time_is_removed(group: MixedGroup) -> None:
    start_classic(group, "b")
    start_consumer(group, "a")
    member = classic(group, "b")
    group.start(Member("c"))
    group.act("c")
    group.confirm_all()
    del group.members["b"]
    for _ in range(REBALANCE_MS // ROUND_MS + 3):
        group.core.heartbeat(GROUP, member.member_id, None, member.generation, group.now)
        group.rounds(1)
    assert member.member_id not in group.group.state.members, "its heartbeats alone do not keep it"
    assert group.shares() == [3, 3]


def test_a_classic_member_that_does_not_sync_in_time_is_removed(group: MixedGroup) -> None:
    start_consumer(group, "a")
    assert join(group, ClassicMember("b", member_id="b")) is ErrorCode.none
    for _ in range(REBALANCE_MS // ROUND_MS + 3):
        generation = group.group.state.current_of("b").member_epoch if "b" in group.group.state.members else 0
        group.core.heartbeat(GROUP, "b", None, generation, group.now)
        group.rounds(1)
    assert "b" not in group.group.state.members
    assert group.shares() == [6]


# -- static members


def test_a_static_member_returns_with_the_other_protocol_and_keeps_its_partitions(group: MixedGroup) -> None:
    for name in "ab":
        group.start(ClassicMember(name, instance_id=name))
    group.rounds(SETTLED)
    before = group.read_by("a")
    del group.members["a"]
    group.start(Member("new-a", instance_id="a"))
    group.rounds(SETTLED)
    assert group.is_consumer_group
    assert group.shares() == [3, 3]
    assert group.read_by("new-a") == before


def test_the_last_consumer_member_is_replaced_by_a_classic_one_of_its_instance(group: MixedGroup) -> None:
    group.start(Member("a", instance_id="a"))
    start_classic(group, "b")
    del group.members["a"]
    group.start(ClassicMember("new-a", instance_id="a"))
    group.rounds(SETTLED)
    assert not group.is_consumer_group
    assert group.shares() == [3, 3]


def test_the_only_member_returns_with_the_classic_protocol(group: MixedGroup) -> None:
    group.start(Member("a", instance_id="a"))
    group.rounds(SETTLED)
    del group.members["a"]
    group.start(ClassicMember("new-a", instance_id="a"))
    group.rounds(SETTLED)
    assert not group.is_consumer_group
    assert group.shares() == [6]


# -- writes whose outcome is unknown


@pytest.mark.parametrize("arrived", [False, True])
def test_an_upgrade_whose_write_failed_is_decided_by_the_log(group: MixedGroup, arrived: bool) -> None:
    start_classic(group, "ab", cooperative=True)
    group.start(Member("new"))
    group.act("new")
    group.fail()
    group.act("new")
    assert group.members["new"].must_repeat  # type: ignore[union-attr]
    group.act("new")
    group.confirm(arrived=arrived)
    assert group.is_consumer_group or not arrived
    group.confirm_all()
    group.rounds(SETTLED)
    assert group.is_consumer_group
    assert group.shares() == [2, 2, 2]


@pytest.mark.parametrize("arrived", [False, True])
def test_a_downgrade_whose_write_failed_is_decided_by_the_log(group: MixedGroup, arrived: bool) -> None:
    start_classic(group, "ab", cooperative=True)
    start_consumer(group, "new")
    group.leave("new")
    assert group.core.heartbeat(GROUP, "x", None, 1, group.now) is ErrorCode.unknown_member_id
    group.fail()
    assert group.core.heartbeat(GROUP, "x", None, 1, group.now) is ErrorCode.coordinator_not_available
    group.wait(ROUND_MS)
    group.confirm(arrived=arrived)
    assert group.is_consumer_group is not arrived
    group.rounds(70)
    assert not group.is_consumer_group
    assert group.shares() == [3, 3]


def test_a_join_that_waits_for_a_downgrade_is_answered_by_the_classic_group(group: MixedGroup) -> None:
    start_classic(group, "ab")
    start_consumer(group, "new")
    group.leave("new")
    group.start(ClassicMember("c"))
    group.act("c")
    group.start(Member("again"))
    group.act("again")
    group.rounds(SETTLED)
    assert group.shares() == [1, 1, 2, 2]
    assert group.is_consumer_group


def test_a_classic_group_whose_record_is_on_its_way_when_it_ends_leaves_none(group: MixedGroup) -> None:
    start_consumer(group, "a")
    group.leave("a")
    group.confirm_all()
    group.start(ClassicMember("b", both=True))
    group.rounds(2)
    group.leave("b")
    assert group.writing, "the classic group, which is empty now"
    assert GROUP in group.store.consumer_groups
    group.start(Member("c"))
    group.act("c")
    group.rounds(SETTLED)
    assert GROUP in group.store.consumer_groups
    assert GROUP not in group.store.images
