"""For any order of events: a partition has one owner, epochs never go back, assignments converge, replay restores the state."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kio.schema.errors import ErrorCode
from unit.broker.coordination.groups.consumer_members import FENCED, GROUP, Log, Member, replayed
from unit.broker.coordination.groups.known_topics import KnownTopics

from stratalog_broker.coordination.groups.core.consumer.group import ConsumerGroupPhase
from stratalog_broker.coordination.groups.core.consumer.requests import HeartbeatRequest
from stratalog_broker.coordination.groups.core.offset_rows import Commit
from stratalog_broker.coordination.groups.core.store import GroupStore

MEMBERS = st.sampled_from("abcd")
SUBSCRIPTIONS = st.sampled_from([(("t",), None), (("t", "u"), None), (("u",), None), ((), "t|u"), ((), ".*")])
ROUNDS_MAX = 40
SESSION_MS = 45_000


class ConsumerGroupMachine(RuleBasedStateMachine):
    """Members send one heartbeat at a time. Answers may be late or lost, writes may fail, coordinators may die."""

    def __init__(self) -> None:
        super().__init__()
        self.topics = KnownTopics(t=3, u=2)
        self.log = Log(self.topics, assignment_ms=500, turn_requests_max=3)
        self.members: dict[str, Member] = {}
        self.waiting: dict[int, tuple[str, HeartbeatRequest]] = {}
        self.epoch = 0
        self.restarts = 0

    # -- members

    @rule(name=MEMBERS, subscription=SUBSCRIPTIONS, static=st.booleans(), assignor=st.sampled_from([None, "range", "uniform"]))
    def start(self, name: str, subscription: tuple[tuple[str, ...], str | None], static: bool, assignor: str | None) -> None:
        """A client starts, or restarts under a new member id without having left."""
        self.restarts += 1
        self.forget_request_of(name)
        topics, pattern = subscription
        instance_id = name if static else None
        self.members[name] = Member(
            f"{name}{self.restarts}", topics=topics, pattern=pattern, instance_id=instance_id, assignor=assignor
        )
        self.heartbeat(name)

    @rule(name=MEMBERS, full=st.booleans())
    def heartbeat(self, name: str, full: bool = False) -> None:
        if name not in self.members or self.is_waiting(name):
            return
        request = self.members[name].request(self.log.ticket(), full=full)
        self.waiting[request.ticket] = name, request
        self.log.send(request)
        self.hear()

    @rule(name=MEMBERS, subscription=SUBSCRIPTIONS)
    def subscribe(self, name: str, subscription: tuple[tuple[str, ...], str | None]) -> None:
        if name in self.members and not self.is_waiting(name):
            self.members[name].topics, self.members[name].pattern = subscription[0], subscription[1] or ""
            self.heartbeat(name, full=True)

    @rule(name=MEMBERS, returns=st.booleans())
    def leave(self, name: str, returns: bool) -> None:
        member = self.members.pop(name, None)
        if member is not None:
            self.forget_request_of(name)
            epoch = -2 if returns and member.instance_id else -1
            ticket = self.log.ticket()
            self.log.send(
                HeartbeatRequest(ticket=ticket, member_id=member.member_id, member_epoch=epoch, instance_id=member.instance_id)
            )

    @rule(name=MEMBERS)
    def answer_is_lost(self, name: str) -> None:
        if name in self.members:
            self.members[name].must_repeat = True
        self.forget_request_of(name)

    def is_waiting(self, name: str) -> bool:
        return any(each == name for each, _ in self.waiting.values())

    def forget_request_of(self, name: str) -> None:
        self.waiting = {ticket: sent for ticket, sent in self.waiting.items() if sent[0] != name}

    def hear(self) -> None:
        for ticket, (name, request) in list(self.waiting.items()):
            answer = self.log.answers.get(ticket)
            if answer is None:
                continue
            del self.waiting[ticket]
            member = self.members[name]
            if answer.error is ErrorCode.none:
                assert answer.member_epoch >= request.member_epoch
                assert answer.member_epoch <= self.log.store.consumer_groups[GROUP].epoch, "an answered epoch is in the log"
            else:
                assert answer.error in FENCED | {
                    ErrorCode.coordinator_not_available, ErrorCode.unreleased_instance_id, ErrorCode.fenced_instance_id,
                    ErrorCode.group_id_not_found,
                }  # fmt: skip
            if answer.error in (ErrorCode.fenced_instance_id, ErrorCode.unreleased_instance_id, ErrorCode.group_id_not_found):
                del self.members[name]  # another client has its place
            else:
                member.hear(answer)

    # -- commits

    @rule(name=MEMBERS, index=st.integers(0, 2), behind=st.integers(-1, 1))
    def commit(self, name: str, index: int, behind: int) -> None:
        member = self.members.get(name)
        if member is None or not member.epoch or GROUP not in self.log.core.table.consumers:
            return
        epoch = member.epoch - behind
        (error,), _ = self.log.core.commits.plan(
            GROUP, member.member_id, member.instance_id, epoch, [Commit("t", index, 1, -1, "", None)], self.log.now
        )
        state = self.log.group.state
        if error is ErrorCode.none and epoch >= 0 and member.member_id in state.members:
            current = state.current_of(member.member_id)
            topic = self.topics.find("t")
            since = None if topic is None else current.assigned.get((topic.topic_id, index))
            assert epoch == current.member_epoch or (since is not None and since <= epoch < current.member_epoch)

    # -- topics, time, the log

    @rule(name=st.sampled_from(["t", "u", "v"]), count=st.integers(1, 4))
    def change_topic(self, name: str, count: int) -> None:
        known = self.topics.find(name)
        if known is None:
            self.topics.create(name, count)
        elif count > known.partition_count:
            self.topics.grow(name, count)
        elif count == 1:
            self.topics.delete(name)

    @rule(delay_ms=st.sampled_from([1, 499, 501, 5_000, 20_001, SESSION_MS + 1]))
    def wait(self, delay_ms: int) -> None:
        self.log.wait(delay_ms)
        self.hear()

    @precondition(lambda self: self.log.writing)
    @rule(arrived=st.booleans())
    def confirm(self, arrived: bool) -> None:
        self.log.confirm(arrived=arrived)
        self.hear()

    @rule()
    def confirm_all(self) -> None:
        self.log.confirm_all()
        self.hear()

    @precondition(lambda self: self.log.writing)
    @rule()
    def fail(self) -> None:
        self.log.fail()
        self.hear()

    @rule()
    def fail_over(self) -> None:
        """Another broker takes over from what is in the log; members retry."""
        for name in {name for name, _ in self.waiting.values()}:
            self.answer_is_lost(name)
        self.log.fail_over()

    @rule()
    def settle(self) -> None:
        """After some rounds of heartbeats every partition has an owner, and then a failover changes nothing."""
        for _ in range(ROUNDS_MAX):
            self.confirm_all()
            for name in sorted(self.members):
                self.heartbeat(name)
                self.confirm_all()
            self.wait(2_000)
        self.confirm_all()
        if not self.members:
            return
        group = self.log.group
        ids = {member.member_id for member in self.members.values()}
        assert group.state.members.keys() == ids, "silent members have been removed"
        assert group.phase is ConsumerGroupPhase.STABLE
        subscribed = [(*member.topics, *(self.topics.matching(member.pattern or "$"))) for member in self.members.values()]
        exist = {name for names in subscribed for name in names if self.topics.find(name)}
        owned = [partition for member in self.members.values() for partition in member.owned]
        assert sorted(owned) == sorted(self.topics.partitions_of(*exist))
        assert {member.epoch for member in self.members.values()} == {group.state.epoch}
        self.log.fail_over()
        written = len(self.log.records)
        for name in sorted(self.members):
            self.heartbeat(name, full=True)
        assert not self.log.writing
        assert len(self.log.records) == written, "a failover reassigns nothing"

    # -- invariants

    @invariant()
    def members_own_what_is_theirs(self) -> None:
        consumers = self.log.core.table.consumers
        group = consumers.find(GROUP)
        if group is None:
            return
        group.validate_state()
        for member in self.members.values():
            if member.member_id in group.state.members and member.epoch:
                assert member.owned <= set(group.state.current_of(member.member_id).owned), member

    @invariant()
    def epochs_rise(self) -> None:
        stored = self.log.store.consumer_groups.get(GROUP)
        if stored is not None:
            assert stored.is_consistent
            assert stored.epoch >= self.epoch
            self.epoch = stored.epoch

    @invariant()
    def replay_restores_the_state(self) -> None:
        stored = self.log.store.consumer_groups
        assert replayed(self.log.records).consumer_groups == stored
        assert GroupStore.from_snapshot(self.log.store.snapshot()).consumer_groups == stored

    def teardown(self) -> None:
        self.settle()


TestConsumerGroupProperties = ConsumerGroupMachine.TestCase
TestConsumerGroupProperties.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
