"""Leases, assignment and the controller: which brokers are declared dead, and the new owners of their partitions."""

from __future__ import annotations

from collections import Counter
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import StratalogError
from stratalog_metadata.controller import controller as controlling
from stratalog_metadata.controller.assignment import assign
from stratalog_metadata.controller.controller import Controller
from stratalog_metadata.controller.leases import LeaseTable
from stratalog_metadata.records import Broker, Partition, partition_key
from stratalog_metadata.state.commands import Applied, Command, Delete, ExpireSession, OpenSession, Put, SessionAlive, Update
from stratalog_metadata.state.machine import apply
from stratalog_metadata.state.record_map import RecordMap

TOPIC = UUID(int=9)


class Quorum:
    """Records, the controller over them, and time: every command that the controller wants is applied at once."""

    def __init__(self) -> None:
        self.records = RecordMap()
        self.index = 0
        self.now = 100.0
        self.controller = Controller(self.records, self.now)
        self.commands: list[Command] = []

    def propose(self, *updates: Update) -> Applied | StratalogError:
        result = self.apply(Command(updates=updates))
        self.decide()
        return result

    def apply(self, command: Command) -> Applied | StratalogError:
        self.index += 1
        outcome = apply(self.records, self.index, command)
        self.records.install(outcome.changes)
        self.controller.observe(outcome.changes, self.now)
        return outcome.result

    def decide(self) -> None:
        while (command := self.controller.decide(self.now)) is not None:
            self.commands.append(command)
            self.controller.decided(succeeded=isinstance(self.apply(command), Applied))

    def pass_time(self, seconds: float, *renewed: int) -> None:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            self.controller.renew(renewed, self.now)
            self.decide()

    def broker(self, broker_id: int, grace_ms: int = 0) -> int:
        opened = self.propose(OpenSession(holder=f"broker {broker_id}", lease_ms=3000, grace_ms=grace_ms))
        assert isinstance(opened, Applied)
        session_id = opened.allocated[0]
        self.propose(Put(record=Broker(broker_id=broker_id, host="h", port=1, session_id=session_id)))
        return session_id

    def partitions(self, count: int) -> None:
        self.propose(*(Put(record=Partition(topic_id=TOPIC, index=index)) for index in range(count)))

    @property
    def owned(self) -> list[Partition]:
        return [stored.record for stored in self.records.of_kind("partition") if isinstance(stored.record, Partition)]

    @property
    def counts(self) -> Counter[int]:
        return Counter(partition.owner for partition in self.owned)


def test_new_partitions_are_assigned_evenly_in_one_command() -> None:
    quorum = Quorum()
    quorum.broker(1)
    quorum.broker(2)
    quorum.partitions(12)
    assert quorum.counts == {1: 6, 2: 6}
    assert len(quorum.commands) == 1
    assert {partition.leader_epoch for partition in quorum.owned} == {1}


def test_partitions_without_a_live_broker_wait_for_the_first() -> None:
    quorum = Quorum()
    quorum.partitions(3)
    assert quorum.counts == {-1: 3}
    quorum.broker(5)
    assert quorum.counts == {5: 3}


def test_a_dead_brokers_partitions_move_with_the_end_of_its_session_in_one_command() -> None:
    quorum = Quorum()
    dying, living, third = quorum.broker(1), quorum.broker(2), quorum.broker(3)
    quorum.partitions(30)
    before = {partition.key(): partition for partition in quorum.owned}
    quorum.commands.clear()
    quorum.pass_time(4, living, third)
    assert quorum.counts == {2: 15, 3: 15}
    (command,) = quorum.commands
    assert command.updates[0] == ExpireSession(session_id=dying)
    assert set(command.requirements) >= {SessionAlive(session_id=living), SessionAlive(session_id=third)}
    for partition in quorum.owned:
        moved = before[partition.key()].owner == 1
        assert partition.leader_epoch == (2 if moved else 1), "what works is not moved"


def test_a_session_is_not_ended_before_its_lease_and_margin() -> None:
    quorum = Quorum()
    quorum.broker(1)
    quorum.partitions(1)
    quorum.pass_time(3.0)
    assert quorum.counts == {1: 1}
    quorum.pass_time(0.4)
    assert quorum.counts == {-1: 1}


def test_the_last_brokers_partitions_have_no_owner_at_a_new_epoch() -> None:
    quorum = Quorum()
    quorum.broker(1)
    quorum.partitions(2)
    quorum.pass_time(4)
    assert [(partition.owner, partition.leader_epoch) for partition in quorum.owned] == [(-1, 2)] * 2
    quorum.broker(1)
    assert [(partition.owner, partition.leader_epoch) for partition in quorum.owned] == [(1, 3)] * 2


def test_closing_a_session_moves_its_partitions_at_once() -> None:
    quorum = Quorum()
    closing = quorum.broker(1)
    quorum.partitions(4)
    quorum.broker(2)
    quorum.propose(ExpireSession(session_id=closing))
    assert quorum.counts == {2: 4}


def test_a_broker_that_comes_back_under_a_new_session_gets_a_new_epoch() -> None:
    """The old process may still be running, so its epoch must no longer be valid."""
    quorum = Quorum()
    quorum.broker(1)
    quorum.broker(2)
    quorum.partitions(4)
    quorum.broker(1)
    assert quorum.counts == {1: 2, 2: 2}
    assert {partition.owner: partition.leader_epoch for partition in quorum.owned} == {1: 2, 2: 1}


def test_partitions_assigned_by_hand_stay_without_a_better_owner() -> None:
    quorum = Quorum()
    quorum.propose(Put(record=Partition(topic_id=TOPIC, index=0, owner=7, leader_epoch=4)))
    assert quorum.counts == {7: 1}
    quorum.broker(7)
    assert quorum.owned[0].leader_epoch == 4
    quorum.propose(Put(record=Partition(topic_id=TOPIC, index=1, owner=8, leader_epoch=1)))
    assert quorum.counts == {7: 2}


def test_a_command_that_conflicts_is_decided_again() -> None:
    quorum = Quorum()
    first = quorum.broker(1)
    quorum.apply(Command(updates=(Put(record=Partition(topic_id=TOPIC, index=0)),)))
    command = quorum.controller.decide(quorum.now)
    assert command is not None
    quorum.apply(Command(updates=(ExpireSession(session_id=first),)))
    assert isinstance(quorum.apply(command), StratalogError)
    assert quorum.controller.decide(quorum.now) is None, "one command at a time"
    quorum.controller.decided(succeeded=False)
    quorum.broker(2)
    assert quorum.counts == {2: 1}


def test_a_deleted_partition_stays_deleted() -> None:
    quorum = Quorum()
    quorum.broker(1)
    quorum.apply(Command(updates=(Put(record=Partition(topic_id=TOPIC, index=0)),)))
    command = quorum.controller.decide(quorum.now)
    assert command is not None
    quorum.apply(Command(updates=(Delete(key=partition_key(TOPIC, 0)),)))
    assert isinstance(quorum.apply(command), StratalogError)
    assert not quorum.owned


def after_a_death(partitions: int) -> Quorum:
    """A quorum after one broker of three, which owned all partitions, has died."""
    quorum = Quorum()
    dying = quorum.broker(1)
    quorum.partitions(partitions)
    living = [quorum.broker(2), quorum.broker(3)]
    quorum.commands.clear()
    quorum.pass_time(4, *living)
    assert quorum.records.get(f"session/{dying}") is None
    return quorum


def test_ten_thousand_partitions_are_one_command() -> None:
    quorum = after_a_death(10_000)
    assert quorum.counts == {2: 5000, 3: 5000}
    assert len(quorum.commands) == 1


def test_more_partitions_than_fit_into_one_command_take_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is larger than a frame would reach no follower, and nothing after it would be committed."""
    monkeypatch.setattr(controlling, "MOVED_AT_ONCE_MAX", 30)
    quorum = after_a_death(100)
    assert [sum(isinstance(update, Put) for update in command.updates) for command in quorum.commands] == [30, 30, 30, 10]
    assert quorum.counts == {2: 50, 3: 50}
    assert {partition.leader_epoch for partition in quorum.owned} == {2}


# --- leases ----------------------------------------------------------------------------------------------------------


def test_renewals_keep_a_session_alive() -> None:
    leases = LeaseTable([(1, 3.0, 0.0), (2, 3.0, 0.0)], now=0.0)
    for tenth in range(1, 60):
        assert leases.renew(1, tenth / 10)
        expired = leases.tick(tenth / 10)
        assert expired == (frozenset({2}) if tenth / 10 >= 3.15 else frozenset())


def test_an_expired_session_is_not_renewed() -> None:
    leases = LeaseTable([(1, 1.0, 0.0)], now=0.0)
    for tenth in range(1, 12):
        leases.tick(tenth / 10)
    assert leases.tick(1.2) == {1}
    assert not leases.renew(1, 1.25)
    leases.ended(1)
    assert leases.tick(1.3) == frozenset()


def test_a_stalled_leader_extends_all_leases() -> None:
    leases = LeaseTable([(1, 1.0, 0.0)], now=0.0)
    assert leases.tick(60.0) == frozenset()
    assert leases.renew(1, 60.1)


def expiry_s(leases: LeaseTable, session_id: int, until_s: float = 10.0) -> float:
    """When the leases declares the session expired; ticks are 50 ms apart."""
    for tick in range(1, round(until_s * 20)):
        if session_id in leases.tick(tick / 20):
            return tick / 20
    return float("inf")


def graced(*session_ids: int) -> LeaseTable:
    """Leases of 3 s, grace 0.3 s, each renewed at 0 over the carrier ``("over", session)``."""
    leases = LeaseTable([(session_id, 3.0, 0.3) for session_id in session_ids], now=0.0)
    for session_id in session_ids:
        assert leases.renew(session_id, 0.0, CARRIERS[session_id])
    return leases


CARRIERS = [object() for _ in range(4)]


def test_a_session_whose_connection_broke_ends_after_its_grace() -> None:
    leases = graced(1, 2)
    assert leases.carrier_lost(CARRIERS[1], 0.0) == [1]
    assert leases.next_deadline() == 0.3
    assert expiry_s(leases, 1) == 0.3


def test_a_renewal_over_any_connection_ends_the_suspicion() -> None:
    leases = graced(1, 2)
    leases.carrier_lost(CARRIERS[1], 0.0)
    leases.renew(1, 0.2, CARRIERS[3])
    assert leases.carrier_lost(CARRIERS[1], 0.25) == [], "an old connection's end means nothing"
    assert expiry_s(leases, 1) == 3.35


def test_without_a_grace_only_the_lease_counts() -> None:
    leases = LeaseTable([(1, 3.0, 0.0), (2, 3.0, 0.3)], now=0.0)
    leases.renew(1, 0.0, CARRIERS[1])
    assert leases.carrier_lost(CARRIERS[1], 0.0) == []
    assert expiry_s(leases, 1) == 3.15


def test_a_new_leader_suspects_no_session() -> None:
    leases = LeaseTable([(1, 3.0, 0.3), (2, 3.0, 0.3)], now=0.0)
    assert leases.carrier_lost(CARRIERS[1], 0.0) == []
    assert expiry_s(leases, 1) == 3.15


def test_only_leases_count_if_all_connections_break() -> None:
    """The leader's own network has failed then; otherwise no broker would be left to take over."""
    leases = graced(1, 2)
    leases.carrier_lost(CARRIERS[1], 0.0)
    leases.carrier_lost(CARRIERS[2], 0.1)
    assert expiry_s(leases, 1) == 3.15


def test_a_short_stall_of_the_leader_does_not_use_up_a_grace() -> None:
    leases = graced(1, 2)
    leases.tick(0.0)
    leases.carrier_lost(CARRIERS[1], 0.0)
    assert leases.tick(0.45) == frozenset(), "its renewal may be waiting in a socket"
    assert leases.tick(0.65) == frozenset()
    assert leases.tick(0.8) == {1}


def test_the_controller_moves_the_partitions_of_a_killed_process_after_its_grace() -> None:
    quorum = Quorum()
    dying, living = quorum.broker(1, grace_ms=300), quorum.broker(2, grace_ms=300)
    quorum.partitions(4)
    quorum.controller.renew([dying], quorum.now, CARRIERS[1])
    assert quorum.controller.carrier_lost(CARRIERS[1], quorum.now) == [dying]
    quorum.pass_time(0.2, living)
    assert quorum.counts == {1: 2, 2: 2}
    quorum.pass_time(0.2, living)
    assert quorum.counts == {2: 4}


# --- assignment ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.booleans()), max_size=80),
    st.dictionaries(st.integers(0, 5), st.integers(10, 20), min_size=1),
)
def test_assignment_is_complete_balanced_and_keeps_live_owners(owners: list[tuple[int, bool]], live: dict[int, int]) -> None:
    partitions = [
        Partition(topic_id=TOPIC, index=index, owner=owner, leader_epoch=3, owner_session=live.get(owner, 99) if fresh else 7)
        for index, (owner, fresh) in enumerate(owners)
    ]
    moved = {partition.index: partition for partition in assign(partitions, live)}
    after = [moved.get(partition.index, partition) for partition in partitions]
    assert all(live[partition.owner] == partition.owner_session for partition in after)
    for before, now in zip(partitions, after, strict=True):
        worked = live.get(before.owner) == before.owner_session
        assert (now == before) == worked
        assert now.leader_epoch == before.leader_epoch + (0 if worked else 1)
    counts = Counter(dict.fromkeys(live, 0) | Counter(partition.owner for partition in after))
    unmoved = Counter(partition.owner for partition in partitions if partition.index not in moved)
    for broker_id, count in counts.items():
        assert count <= max(-(-len(partitions) // len(live)), unmoved[broker_id]), "only what stays may exceed a fair share"


@given(
    assigned=st.lists(st.integers(0, 5), unique=True, max_size=4).map(tuple),
    live=st.sets(st.integers(0, 5), min_size=1),
    leaving=st.sets(st.integers(0, 5)),
)
def test_an_assigned_partition_goes_to_the_first_of_its_brokers_that_takes_any(
    assigned: tuple[int, ...], live: set[int], leaving: set[int]
) -> None:
    partition = Partition(topic_id=TOPIC, index=0, replicas=assigned)
    (moved,) = assign([partition], {broker_id: 10 + broker_id for broker_id in live}, leaving=leaving)
    takers = live - leaving or live
    wanted = [broker_id for broker_id in assigned if broker_id in takers]
    assert moved.owner == wanted[0] if wanted else moved.owner in takers
    assert moved.replicas == assigned
