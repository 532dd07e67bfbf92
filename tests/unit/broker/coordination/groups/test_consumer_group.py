"""The consumer protocol step by step: joins, handovers of partitions, static members, fencing, commits, bounds, damage."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.consumer_members import DAY_MS, GROUP, REBALANCE_MS, Log, Member, replayed
from unit.broker.coordination.groups.known_topics import KnownTopics

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroupPhase
from stratalog_broker.coordination.groups.core.consumer.model import ConsumerGroupState, CurrentAssignment, MemberState
from stratalog_broker.coordination.groups.core.consumer.records import ConsumerKey, ConsumerRecord, encode_key, encode_value
from stratalog_broker.coordination.groups.core.messages import Answer, JoinRequest
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.replay import CoordinatorRecord
from stratalog_core.errors import Invalid

SESSION_MS = 45_000


@pytest.fixture
def topics() -> KnownTopics:
    return KnownTopics(t=4)


@pytest.fixture
def log(topics: KnownTopics) -> Log:
    return Log(topics, assignment_ms=0)


def commit(
    log: Log, member_id: str, epoch: int, *, index: int = 0, group_id: str = GROUP, transactional: bool = False
) -> ErrorCode:
    commits = [Commit("t", index, 1, -1, "", None)]
    errors, _ = log.core.commits.plan(group_id, member_id, None, epoch, commits, log.now, transactional=transactional)
    return errors[0]


# -- assignment


def test_the_first_member_gets_everything_with_its_first_heartbeat(log: Log, topics: KnownTopics) -> None:
    a = Member("a")
    (answer,) = log.beat(a)
    assert (answer.member_epoch, answer.heartbeat_interval_ms) == (1, 5_000)
    assert a.owned == topics.partitions_of("t")
    (again,) = log.beat(a)
    assert again.assignment is None, "an assignment that did not change is not repeated"
    assert not log.writing


def test_a_partition_is_handed_over_when_its_owner_has_revoked_it(log: Log) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b)
    assert (len(a.owned), len(b.owned)) == (4, 0)
    assert str(log.group.phase) == "Reconciling"
    first = log.ask(a.request(log.ticket()))
    assert first.member_epoch == 1, "it stays in its epoch until it has revoked"
    assert len(first.assignment or ()) == 2
    log.beat(b)
    assert b.owned == set(), "the owner may still read"
    a.hear(first)
    log.beat(a, b)
    assert (len(a.owned), len(b.owned)) == (2, 2)
    assert not a.owned & b.owned
    assert (a.epoch, b.epoch) == (2, 2)
    assert log.group.phase is ConsumerGroupPhase.STABLE


def test_a_member_that_does_not_revoke_in_time_is_removed(log: Log) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b, a)
    a.owned |= set(log.group.state.current_of("a").revoking)  # it processes its records and only sends heartbeats
    for _ in range(3):
        log.wait(REBALANCE_MS // 4)
        log.beat(a, b)
        a.owned |= set(log.group.state.current_of("a").revoking)
    log.wait(REBALANCE_MS // 4 + 1)
    log.confirm_all()
    assert set(log.group.state.members) == {"b"}
    (answer,) = log.beat(a)
    assert answer.error is ErrorCode.unknown_member_id


def test_a_silent_member_is_removed_after_its_session(log: Log) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b, a, a, b)
    log.wait(SESSION_MS - 1)
    log.beat(b)
    log.wait(1)
    log.confirm_all()
    log.beat(b)
    assert len(b.owned) == 4


def test_many_joins_cause_few_assignments(topics: KnownTopics) -> None:
    log = Log(topics, assignment_ms=1_000)
    a, b, c = Member("a"), Member("b"), Member("c")
    log.beat(a, b, c)
    assert (log.group.state.epoch, log.group.state.assignment_epoch) == (3, 1)
    assert log.group.phase is ConsumerGroupPhase.ASSIGNING
    log.wait(1_000)
    log.confirm_all()
    assert log.group.state.assignment_epoch == 3


def test_heartbeats_that_wait_for_the_log_share_the_next_turn(log: Log) -> None:
    members = [Member(name) for name in "abc"]
    requests = [member.request(log.ticket()) for member in members]
    for request in requests:
        log.send(request)
    assert len(log.writing) == 1, "one write at a time"
    log.confirm()
    assert len(log.writing) == 1, "and the others together"
    log.confirm()
    assert log.group.state.epoch == 2
    assert log.answers.keys() == {request.ticket for request in requests}


def test_members_are_not_silent_while_their_heartbeats_wait_for_the_log(topics: KnownTopics) -> None:
    log = Log(topics, assignment_ms=0, turn_requests_max=1)
    members = [Member(name) for name in "abc"]
    log.beat(*members, *members, *members)
    requests = [replace(member.request(log.ticket()), topic_names=("t", "later")) for member in members]
    for request in requests:
        log.send(request)
    log.wait(SESSION_MS)
    log.confirm_all()
    assert [log.answers[request.ticket].error for request in requests] == [ErrorCode.none] * 3
    assert log.group.state.members.keys() == set("abc")
    log.wait(SESSION_MS)
    log.confirm_all()
    assert not log.group.state.members


def test_topics_that_change_are_assigned_with_the_next_heartbeat(log: Log, topics: KnownTopics) -> None:
    a = Member("a", topics=(), pattern="t.*")
    log.beat(a)
    topics.create("t2", 2)
    log.wait(1)
    assert not log.writing
    log.beat(a)
    assert a.owned == topics.partitions_of("t", "t2")
    topics.delete("t")
    log.beat(a, a)
    assert a.owned == topics.partitions_of("t2")


def test_a_pattern_matches_topics_that_the_member_may_describe(log: Log, topics: KnownTopics) -> None:
    topics.create("secret", 2)
    a = Member("a", topics=(), pattern=".*")

    def visible(names: frozenset[str]) -> frozenset[str]:
        return names - {"secret"}

    a.hear(log.ask(replace(a.request(log.ticket()), may_describe=visible)))
    assert a.owned == topics.partitions_of("t")
    log.fail_over()
    log.wait(1)
    b = Member("b")
    log.ask(replace(b.request(log.ticket()), may_describe=visible))
    assert log.group.state.target_of("a") <= topics.partitions_of("t")
    log.wait(600_000)  # permissions are asked again, and sessions have ended
    log.confirm_all()
    c = Member("c", topics=(), pattern=".*")
    c.hear(log.ask(c.request(log.ticket())))
    assert c.owned == topics.partitions_of("t", "secret")


def test_a_stored_pattern_that_is_no_longer_valid_matches_nothing(
    log: Log, topics: KnownTopics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another release may have accepted it; its group must go on."""
    topics.create("u", 2)
    a, b = Member("a", pattern="u"), Member("b")
    log.beat(a)
    assert a.owned == topics.partitions_of("t", "u")

    def refused(pattern: str) -> frozenset[str]:
        raise Invalid(f"{pattern} is not valid")

    monkeypatch.setattr(topics, "matching", refused)
    log.fail_over()
    for _ in range(4):
        log.beat(a, b)
        log.wait(1_000)
    assert a.owned | b.owned == topics.partitions_of("t")


def test_without_a_heartbeat_patterns_are_not_resolved(log: Log, topics: KnownTopics) -> None:
    """After a failover nobody knows whose permissions count, so a target has to wait for a heartbeat."""
    a, b = Member("a", topics=(), pattern=".*"), Member("b", topics=(), pattern=".*")
    log.beat(a, b, a, a, b)
    log.fail_over()
    log.wait(SESSION_MS - 1)
    log.beat(a)
    topics.create("new", 1)
    log.wait(1)
    log.confirm_all()
    state = log.group.state
    assert set(state.members) == {"a"}
    assert state.assignment_epoch < state.epoch
    log.beat(a)
    assert a.owned == topics.partitions_of("t", "new")


@pytest.mark.parametrize("assignor", ["range", "uniform"])
def test_the_assignor_that_most_members_prefer_is_used(log: Log, assignor: str) -> None:
    a, b, c = (Member(name, assignor=preferred) for name, preferred in (("a", assignor), ("b", assignor), ("c", None)))
    log.beat(a, b, c)
    assert log.group.assignor == assignor


# -- static members


def test_a_static_member_returns_to_its_partitions_without_a_rebalance(log: Log) -> None:
    a, b = Member("a", instance_id="i"), Member("b")
    log.beat(a, b, a, a, b)
    before, epoch = set(a.owned), log.group.state.epoch
    left = log.ask(replace(a.request(log.ticket()), member_epoch=-2, owned=None))
    assert left.member_epoch == -2
    log.beat(b)
    assert log.group.state.epoch == epoch
    back = Member("a2", instance_id="i")
    log.beat(back)
    assert back.owned == before
    assert (back.epoch, log.group.state.epoch) == (epoch, epoch)
    (fenced,) = log.beat(a)
    assert fenced.error is ErrorCode.fenced_instance_id


def test_an_instance_id_in_use_is_refused(log: Log) -> None:
    log.beat(Member("a", instance_id="i"))
    (answer,) = log.beat(Member("b", instance_id="i"))
    assert answer.error is ErrorCode.unreleased_instance_id
    assert set(log.group.state.members) == {"a"}


def test_a_static_member_that_does_not_return_is_removed(log: Log) -> None:
    a = Member("a", instance_id="i")
    log.beat(a)
    log.ask(replace(a.request(log.ticket()), member_epoch=-2, owned=None))
    log.wait(SESSION_MS)
    log.confirm_all()
    assert not log.group.state.members


# -- epochs


def test_a_wrong_epoch_is_fenced_and_the_previous_one_is_forgiven(log: Log) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b, a)
    revoked = a.request(log.ticket())
    lost = log.ask(revoked)
    assert (revoked.member_epoch, lost.member_epoch) == (1, 2)
    again = log.ask(replace(revoked, ticket=log.ticket()))
    assert again.member_epoch == 2
    ahead = log.ask(replace(revoked, ticket=log.ticket(), member_epoch=3))
    assert ahead.error is ErrorCode.fenced_member_epoch
    log.beat(b)
    foreign = log.group.state.current_of("b").owned
    holds_too_much = log.ask(replace(revoked, ticket=log.ticket(), owned=frozenset(foreign)))
    assert holds_too_much.error is ErrorCode.fenced_member_epoch


def test_a_fenced_member_joins_again_under_its_id(log: Log) -> None:
    a = Member("a")
    log.beat(a)
    a.epoch = 7
    assert [each.error for each in log.beat(a, a)] == [ErrorCode.fenced_member_epoch, ErrorCode.none]
    assert len(a.owned) == 4
    assert a.epoch == 1, "nothing has changed in the group"


# -- commits


def test_commits_are_checked_by_member_epoch(log: Log) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b, a, a, b)
    kept = next(index for _, index in a.owned)
    moved = next(index for _, index in b.owned)
    assert commit(log, "a", a.epoch) is ErrorCode.none
    assert commit(log, "a", a.epoch + 1) is ErrorCode.stale_member_epoch
    assert commit(log, "a", 1, index=kept) is ErrorCode.none, "it has owned the partition since then (KIP-1251)"
    assert commit(log, "a", 1, index=moved) is ErrorCode.stale_member_epoch
    assert commit(log, "c", 1) is ErrorCode.unknown_member_id
    assert commit(log, "", -1) is ErrorCode.unknown_member_id


def test_commits_in_transactions_are_checked_by_member_epoch(log: Log) -> None:
    a = Member("a")
    log.beat(a)
    assert commit(log, "a", 1, transactional=True) is ErrorCode.none
    assert commit(log, "a", 0, index=9, transactional=True) is ErrorCode.illegal_generation
    assert commit(log, "nobody", -1, transactional=True) is ErrorCode.unknown_member_id
    assert commit(log, "", -1, transactional=True) is ErrorCode.none, "TxnOffsetCommit need not name a member, as in Kafka"


def test_offsets_of_an_empty_group_expire_when_it_has_been_empty_for_long(log: Log) -> None:
    member = Member("a")
    log.beat(member)
    _, records = log.core.commits.plan(GROUP, "a", None, member.epoch, [Commit("t", 0, 5)], log.now)
    log.append(records)
    log.wait(8 * DAY_MS)
    log.confirm_all()
    assert log.group.phase is ConsumerGroupPhase.EMPTY
    log.fail_over()
    log.expire()
    assert log.store.offsets_of(GROUP), "somebody subscribed to the topic a moment ago"
    log.wait(7 * DAY_MS)
    log.expire()
    assert log.core.table.group_ids() == []


def test_offsets_are_fetched_by_member_epoch(log: Log) -> None:
    log.beat(Member("a"))
    check = log.core.table.consumers.check_fetch
    assert check(GROUP, "a", 1) is ErrorCode.none
    assert check(GROUP, "a", 2) is ErrorCode.stale_member_epoch
    assert check(GROUP, "b", 1) is ErrorCode.unknown_member_id
    assert check(GROUP, None, -1) is ErrorCode.none
    assert check("other", "a", 1) is ErrorCode.none


# -- refusals and bounds


@pytest.mark.parametrize("group_id", ["", " ", "g" * 5_000])
def test_group_ids_that_are_refused(log: Log, group_id: str) -> None:
    request = Member("a").request(log.ticket())
    log.do(log.core.consumer_heartbeat(group_id, request, log.now))
    assert log.answers[request.ticket].error is ErrorCode.invalid_request


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"member_id": " "}, ErrorCode.invalid_request),
        ({"instance_id": ""}, ErrorCode.invalid_request),
        ({"rack_id": ""}, ErrorCode.invalid_request),
        ({"rebalance_timeout_ms": -1}, ErrorCode.invalid_request),
        ({"owned": None}, ErrorCode.invalid_request),
        ({"topic_names": None}, ErrorCode.invalid_request),
        ({"member_epoch": -3}, ErrorCode.invalid_request),
        ({"member_epoch": -2}, ErrorCode.invalid_request),
        ({"assignor": "sticky"}, ErrorCode.unsupported_assignor),
        ({"topic_pattern": "(a"}, ErrorCode.invalid_regular_expression),
        ({"topic_names": ("x" * 300_000,)}, ErrorCode.invalid_request),
        ({"member_epoch": 1}, ErrorCode.group_id_not_found),
        ({"member_epoch": -1}, ErrorCode.group_id_not_found),
    ],
)
def test_requests_that_are_refused(log: Log, changes: dict[str, object], error: ErrorCode) -> None:
    answer = log.ask(replace(Member("a").request(log.ticket()), **changes))  # type: ignore[arg-type]
    assert answer.error is error
    assert log.core.table.group_ids() == []


def test_a_group_has_so_many_members_and_so_large_subscriptions(topics: KnownTopics) -> None:
    log = Log(topics, members_max=2, group_bytes_max=10)
    assert [each.error for each in log.beat(Member("a"), Member("b"), Member("c"))] == [
        ErrorCode.none, ErrorCode.none, ErrorCode.group_max_size_reached,
    ]  # fmt: skip
    log = Log(topics, group_bytes_max=10)
    a = Member("a", topics=("0123456789",))
    refused = ErrorCode.group_max_size_reached
    assert [each.error for each in log.beat(a, Member("b"))] == [ErrorCode.none, refused]
    a.topics = ("t",)
    assert [each.error for each in log.beat(a, full=True)] == [ErrorCode.none]
    assert [each.error for each in log.beat(Member("b"))] == [ErrorCode.none]


def test_requests_beyond_the_queue_are_refused(topics: KnownTopics) -> None:
    log = Log(topics, turn_requests_max=1)
    tickets = []
    for number in range(103):
        request = Member(f"m{number}").request(log.ticket())
        tickets.append(request.ticket)
        log.send(request)
    assert log.answers.keys() == {tickets[-1]}
    assert log.answers[tickets[-1]].error is ErrorCode.coordinator_not_available


def test_a_turn_takes_so_many_bytes(topics: KnownTopics) -> None:
    log = Log(topics, turn_bytes_max=10)
    for number in range(5):
        log.send(Member(f"m{number}", topics=("0123456789",)).request(log.ticket()))
    log.confirm()
    assert len(log.group.state.members) == 2


# -- both protocols


def join_request() -> JoinRequest:
    return JoinRequest(
        ticket=99, member_id="", fresh_member_id="m", group_instance_id=None, client_id="c", client_host="/h",
        protocol_type="consumer", protocols=(("range", b""),), session_timeout_ms=10_000, rebalance_timeout_ms=10_000,
        requires_known_member=False,
    )  # fmt: skip


def test_a_group_with_members_does_not_change_its_protocol(log: Log) -> None:
    a = Member("a")
    log.beat(a)
    (work,) = log.core.join(GROUP, join_request(), log.now)
    assert isinstance(work, Answer)
    assert work.value.error is ErrorCode.inconsistent_group_protocol
    log.core.join("classic", join_request(), log.now)
    request = Member("b").request(log.ticket())
    log.do(log.core.consumer_heartbeat("classic", request, log.now))
    assert log.answers[request.ticket].error is ErrorCode.group_id_not_found


def test_an_empty_group_becomes_one_of_the_other_protocol(log: Log) -> None:
    a = Member("a")
    log.beat(a)
    log.ask(replace(a.request(log.ticket()), member_epoch=-1))
    log.core.join(GROUP, join_request(), log.now)
    assert log.core.table.find(GROUP) is not None
    assert log.core.table.consumers.find(GROUP) is None


# -- the log


def test_a_failed_write_answers_everybody_and_is_decided_by_a_barrier(log: Log) -> None:
    a, b = Member("a"), Member("b")
    first, second = a.request(log.ticket()), b.request(log.ticket())
    log.send(first)
    log.send(second)
    log.fail()
    assert {answer.error for answer in log.answers.values()} == {ErrorCode.coordinator_not_available}
    third = a.request(log.ticket())
    log.send(third)
    assert [record.value for write in log.writing for record in write.records] == [None], "the barrier comes first"
    log.confirm(arrived=True)
    log.confirm_all()
    assert log.answers[third.ticket].error is ErrorCode.none
    assert log.group.state.epoch == 1, "the failed write had arrived, so nothing changed"


def test_the_barrier_is_tried_again_without_a_heartbeat(log: Log) -> None:
    log.send(Member("a").request(log.ticket()))
    log.fail()
    log.wait(1_000)
    assert len(log.writing) == 1
    log.confirm()
    assert log.core.table.consumers.is_empty(GROUP)


def test_members_go_on_after_a_failover(log: Log) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b, a, a, b)
    owned, written = (set(a.owned), set(b.owned)), len(log.records)
    log.fail_over()
    log.beat(a, b)
    log.beat(a, b, full=True)
    assert (a.owned, b.owned) == owned
    assert len(log.records) == written
    assert log.group.phase is ConsumerGroupPhase.STABLE


def test_contradicting_records_cost_the_members_of_their_group_a_join(log: Log, topics: KnownTopics) -> None:
    a, b = Member("a"), Member("b")
    log.beat(a, b, a, a, b)
    stolen = CurrentAssignment(member_epoch=2, previous_epoch=1, state=MemberState.STABLE, assigned=dict.fromkeys(a.owned, 2))
    key = ConsumerKey(ConsumerRecord.CURRENT, GROUP, "b")
    log.records.append(CoordinatorRecord(encode_key(key), encode_value(key, ConsumerGroupState(current={"b": stolen}))))
    log.fail_over()
    request = Member("z").request(log.ticket())
    log.do(log.core.consumer_heartbeat("other", request, log.now))
    log.confirm_all()
    assert log.answers[request.ticket].error is ErrorCode.none, "other groups are served"
    assert {each.error for each in log.beat(a, b)} == {ErrorCode.unknown_member_id}
    log.beat(a, b, a, a, b)
    assert a.owned | b.owned == topics.partitions_of("t")
    assert a.epoch > 2, "the epoch is above those of before"
    assert replayed(log.records).consumer_groups[GROUP].is_consistent
