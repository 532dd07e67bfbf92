"""For any order of events in a group of both protocols: a partition has one reader, and in the end every partition has one."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unit.broker.coordination.groups.consumer_members import GROUP, Member, replayed
from unit.broker.coordination.groups.known_topics import KnownTopics
from unit.broker.coordination.groups.mixed_members import ClassicMember, MixedGroup

from stratalog_broker.coordination.groups.core.store import GroupStore

NAMES = st.sampled_from("abcd")
ROUNDS_MAX = 60
"""More than the longest session."""


class MixedGroupMachine(RuleBasedStateMachine):
    """Members act one after the other. Writes may fail, coordinators and members may die; nobody alive is silent for long."""

    def __init__(self) -> None:
        super().__init__()
        self.group = MixedGroup(topics=KnownTopics(t=3), assignment_ms=500, turn_requests_max=3)
        self.started = 0

    @rule(name=NAMES, kind=st.sampled_from(["eager", "cooperative", "consumer"]))
    def start(self, name: str, kind: str) -> None:
        """A client starts in the place of another one, which has left if it was there."""
        self.leave(name)
        self.started += 1
        protocol = ("cooperative-sticky" if kind == "cooperative" else "range") if kind != "consumer" else ""
        if protocol:
            self.group.members[name] = ClassicMember(name, cooperative=kind == "cooperative", both=True)
        else:
            self.group.members[name] = Member(f"{name}{self.started}")
        self.group.act(name)

    @rule(name=NAMES)
    def act(self, name: str) -> None:
        if name in self.group.members:
            self.group.act(name)

    @rule(name=NAMES)
    def leave(self, name: str) -> None:
        if name in self.group.members:
            self.group.leave(name)

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        """A client stops without leaving the group."""
        self.group.members.pop(name, None)
        self.group.asking.pop(name, None)

    @precondition(lambda self: self.group.writing)
    @rule(arrived=st.booleans())
    def confirm(self, arrived: bool) -> None:
        self.group.confirm(arrived=arrived)

    @precondition(lambda self: self.group.writing)
    @rule()
    def fail(self) -> None:
        self.group.fail()

    @rule()
    def fail_over(self) -> None:
        self.group.fail_over()

    @rule(count=st.integers(1, 3))
    def rounds(self, count: int) -> None:
        self.group.confirm_all()
        self.group.rounds(count)

    @rule()
    def settle(self) -> None:
        self.rounds(ROUNDS_MAX)
        if not self.group.members:
            return
        shares = self.group.shares()
        assert len(shares) > 3 or min(shares) > 0, shares
        assert self.group.is_consumer_group is any(isinstance(each, Member) for each in self.group.members.values())

    @invariant()
    def one_reader(self) -> None:
        self.group.check()

    @invariant()
    def consumer_group_is_valid(self) -> None:
        found = self.group.core.table.consumers.find(GROUP)
        if found is not None and not self.group.writing:
            found.validate_state()

    @invariant()
    def a_group_is_stored_in_one_protocol(self) -> None:
        store = self.group.store
        assert not (store.consumer_groups.keys() & store.images.keys())
        again = replayed(self.group.records)
        assert (again.consumer_groups, again.images) == (store.consumer_groups, store.images)
        assert GroupStore.from_snapshot(store.snapshot()).consumer_groups == store.consumer_groups

    def teardown(self) -> None:
        self.settle()


TestMixedGroupProperties = MixedGroupMachine.TestCase
TestMixedGroupProperties.settings = settings(
    max_examples=200, stateful_step_count=25, deadline=None, report_multiple_bugs=False
)
