"""The state machine: the effects of commands, and the reasons for refusals."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.errors import Conflict, Invalid, SessionExpired, StaleEpoch, StratalogError
from stratalog_metadata.records import (
    CLUSTER_KEY,
    LEDGER_IDS,
    Bookie,
    Broker,
    Cluster,
    Counter,
    DynamicConfig,
    Fragment,
    Lease,
    Ledger,
    Partition,
    Session,
    TieringWorker,
    bookie_key,
    broker_key,
    counter_key,
    lease_key,
    partition_key,
    session_key,
)
from stratalog_metadata.state.commands import (
    Allocate,
    Applied,
    Command,
    Delete,
    EpochIs,
    ExpireSession,
    OpenSession,
    Put,
    Requirement,
    SessionAlive,
    Update,
    VersionIs,
)
from stratalog_metadata.state.machine import LOST_LEDGER_IDS_MAX, Outcome, apply
from stratalog_metadata.state.record_map import RecordMap

TOPIC = UUID(int=7)


class Machine:
    """Applies commands one after the other."""

    def __init__(self) -> None:
        self.records = RecordMap()
        self.index = 0

    def apply(self, *updates: Update, requirements: tuple[Requirement, ...] = ()) -> Outcome:
        self.index += 1
        outcome = apply(self.records, self.index, Command(updates=updates, requirements=requirements))
        self.records.install(outcome.changes)
        return outcome

    def done(self, *updates: Update, requirements: tuple[Requirement, ...] = ()) -> Applied:
        result = self.apply(*updates, requirements=requirements).result
        assert isinstance(result, Applied), result
        return result

    def refused(self, *updates: Update, requirements: tuple[Requirement, ...] = ()) -> StratalogError:
        outcome = self.apply(*updates, requirements=requirements)
        assert isinstance(outcome.result, StratalogError)
        assert not outcome.changes
        return outcome.result

    def session(self) -> int:
        return self.done(OpenSession(holder="broker 1", lease_ms=3000)).allocated[0]


@pytest.fixture
def machine() -> Machine:
    return Machine()


def config(resource: str, **configs: str) -> DynamicConfig:
    return DynamicConfig(resource=resource, configs=configs)


def test_apply_does_not_change_its_input(machine: Machine) -> None:
    outcome = apply(machine.records, 1, Command(updates=(Put(record=config("a")),)))
    assert len(outcome.changes) == 1
    assert len(machine.records) == 0


def test_a_record_gets_the_commands_index_as_its_version(machine: Machine) -> None:
    machine.done(Put(record=config("a")))
    applied = machine.done(Put(record=config("a", key="value")), Put(record=config("b")))
    found = machine.records.get("dynamic_config/a")
    assert found is not None
    assert found.version == applied.index == 2
    assert found.record == config("a", key="value")


def test_changes_tell_before_and_after(machine: Machine) -> None:
    machine.done(Put(record=config("a")))
    (change,) = machine.apply(Delete(key="dynamic_config/a")).changes
    assert change.before is not None
    assert change.before.record == config("a")
    assert change.after is None


def test_a_record_put_and_deleted_in_one_command_leaves_no_trace(machine: Machine) -> None:
    assert not machine.apply(Put(record=config("a")), Delete(key="dynamic_config/a")).changes
    assert not machine.apply(Delete(key="dynamic_config/a")).changes


def test_version_requirements(machine: Machine) -> None:
    machine.done(Put(record=config("a")), requirements=(VersionIs(key="dynamic_config/a", version=0),))
    refused = machine.refused(Put(record=config("a")), requirements=(VersionIs(key="dynamic_config/a", version=0),))
    assert isinstance(refused, Conflict)
    assert refused.detail == {"key": "dynamic_config/a", "expected": 0, "found": 1}
    machine.done(Put(record=config("a")), requirements=(VersionIs(key="dynamic_config/a", version=1),))


def test_a_recreated_record_has_another_version(machine: Machine) -> None:
    machine.done(Put(record=config("a")))
    machine.done(Delete(key="dynamic_config/a"))
    machine.done(Put(record=config("a")))
    assert isinstance(machine.refused(requirements=(VersionIs(key="dynamic_config/a", version=1),)), Conflict)


def test_epoch_requirements(machine: Machine) -> None:
    key = partition_key(TOPIC, 0)
    machine.done(Put(record=Partition(topic_id=TOPIC, index=0, owner=3, leader_epoch=5)))
    machine.done(requirements=(EpochIs(key=key, owner=3, leader_epoch=5),))
    for owner, epoch in ((3, 4), (2, 5), (3, 6)):
        refused = machine.refused(requirements=(EpochIs(key=key, owner=owner, leader_epoch=epoch),))
        assert isinstance(refused, StaleEpoch)
        assert refused.detail["found"] == [3, 5]
    missing = EpochIs(key=partition_key(TOPIC, 9), owner=3, leader_epoch=5)
    assert isinstance(machine.refused(requirements=(missing,)), StaleEpoch)


def test_a_failed_requirement_applies_nothing(machine: Machine) -> None:
    machine.refused(
        Put(record=config("a")),
        Allocate(counter="ledger_ids", count=5),
        requirements=(VersionIs(key="dynamic_config/a", version=0), SessionAlive(session_id=9)),
    )
    assert len(machine.records) == 0


def test_ids_are_never_allocated_twice(machine: Machine) -> None:
    assert machine.done(Allocate(counter="ledger_ids", count=10)).allocated == (0,)
    assert machine.done(Allocate(counter="ledger_ids", count=1), Allocate(counter="ledger_ids", count=2)).allocated == (10, 11)
    found = machine.records.get(counter_key("ledger_ids"))
    assert found is not None
    assert found.record == Counter(name="ledger_ids", next_value=13)


def test_a_counter_never_decreases(machine: Machine) -> None:
    machine.done(Allocate(counter="producer_ids", count=100))
    assert isinstance(machine.refused(Put(record=Counter(name="producer_ids", next_value=99))), Invalid)
    machine.done(Put(record=Counter(name="producer_ids", next_value=500)))
    assert machine.done(Allocate(counter="producer_ids", count=1)).allocated == (500,)


def test_a_counter_cannot_be_deleted(machine: Machine) -> None:
    machine.done(Allocate(counter="ledger_ids", count=10))
    assert isinstance(machine.refused(Delete(key=counter_key("ledger_ids"))), Invalid)
    assert machine.done(Allocate(counter="ledger_ids", count=1)).allocated == (10,)


def test_a_cluster_keeps_its_id(machine: Machine) -> None:
    machine.done(Put(record=Cluster(cluster_id="a" * 22)))
    machine.done(Put(record=Cluster(cluster_id="a" * 22, format_version=2)))
    assert isinstance(machine.refused(Put(record=Cluster(cluster_id="b" * 22))), Invalid)
    assert isinstance(machine.refused(Delete(key=CLUSTER_KEY)), Invalid)


def bookie(greatest_ledger_id: int) -> Bookie:
    return Bookie(bookie_id="b1", address="h:1", cookie="c", greatest_ledger_id=greatest_ledger_id)


def ledger(ledger_id: int) -> Ledger:
    return Ledger(
        ledger_id=ledger_id, topic_id=TOPIC, partition=0, base_offset=0, leader_epoch=0, write_quorum=1, ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=("b1",)),),
    )  # fmt: skip


def ledger_ids(machine: Machine) -> Counter:
    found = machine.records.get(counter_key(LEDGER_IDS))
    assert found is not None
    assert isinstance(found.record, Counter)
    return found.record


def test_ledger_ids_that_a_bookie_knows_are_not_allocated_again(machine: Machine) -> None:
    """Metadata that was restored from an old copy has allocated fewer ids than bookies have seen."""
    machine.done(Allocate(counter=LEDGER_IDS, count=100))
    machine.done(Put(record=bookie(greatest_ledger_id=250)))
    assert ledger_ids(machine) == Counter(name=LEDGER_IDS, next_value=251, lost_below=251)
    assert machine.done(Allocate(counter=LEDGER_IDS, count=10)).allocated == (251,)
    assert ledger_ids(machine) == Counter(name=LEDGER_IDS, next_value=261, lost_below=251)


def test_a_block_of_lost_ids_cannot_be_used(machine: Machine) -> None:
    """A broker may have taken the block before the bookies registered."""
    machine.done(Put(record=ledger(7)))
    machine.done(Allocate(counter=LEDGER_IDS, count=100))
    machine.done(Put(record=bookie(greatest_ledger_id=250)))
    refused = machine.refused(Put(record=ledger(99)))
    assert isinstance(refused, Conflict)
    assert refused.detail == {"key": counter_key(LEDGER_IDS), "expected": 251, "found": 99}
    machine.done(Put(record=ledger(7)))
    machine.done(Put(record=ledger(251)))


@pytest.mark.parametrize("greatest", [-1, 0, 99])
def test_a_bookie_that_knows_allocated_ids_changes_nothing(machine: Machine, greatest: int) -> None:
    machine.done(Allocate(counter=LEDGER_IDS, count=100))
    machine.done(Put(record=bookie(greatest_ledger_id=greatest)))
    assert ledger_ids(machine) == Counter(name=LEDGER_IDS, next_value=100)


def test_an_absurd_report_does_not_use_up_the_counter(machine: Machine) -> None:
    machine.done(Allocate(counter=LEDGER_IDS, count=100))
    machine.done(Put(record=bookie(greatest_ledger_id=100 + LOST_LEDGER_IDS_MAX)))
    assert ledger_ids(machine) == Counter(name=LEDGER_IDS, next_value=100)


@pytest.mark.parametrize("lost_below", [0, 250, 252])
def test_the_limit_of_lost_ids_never_falls_nor_passes_the_counter(machine: Machine, lost_below: int) -> None:
    machine.done(Allocate(counter=LEDGER_IDS, count=100))
    machine.done(Put(record=bookie(greatest_ledger_id=250)))
    refused = machine.refused(Put(record=Counter(name=LEDGER_IDS, next_value=251, lost_below=lost_below)))
    assert isinstance(refused, Invalid)
    assert "allowed are 251..251" in refused.message


@given(st.lists(st.one_of(
    st.builds(lambda count: Allocate(counter=LEDGER_IDS, count=count), st.integers(1, 50)),
    st.builds(lambda greatest: Put(record=bookie(greatest)), st.integers(-1, 400)),
    st.builds(lambda ledger_id: Put(record=ledger(ledger_id)), st.integers(0, 400)),
)))  # fmt: skip
def test_no_id_is_allocated_or_used_that_a_bookie_reported_as_lost(updates: list[Update]) -> None:
    machine, lost_below = Machine(), 0
    for update in updates:
        outcome = machine.apply(update)
        if isinstance(update, Allocate):
            assert isinstance(outcome.result, Applied)
            assert outcome.result.allocated[0] >= lost_below
        elif isinstance(update, Put) and isinstance(update.record, Ledger):
            known = machine.records.get(update.record.key())
            assert known is not None or update.record.ledger_id < lost_below
        if machine.records.get(counter_key(LEDGER_IDS)) is not None:
            counter = ledger_ids(machine)
            assert lost_below <= counter.lost_below <= counter.next_value
            lost_below = counter.lost_below
            reported = machine.records.get(bookie_key("b1"))
            assert reported is None or getattr(reported.record, "greatest_ledger_id", -1) < counter.next_value


@pytest.mark.parametrize("count", [0, -1, 1_000_001])
def test_the_count_of_ids_is_bounded(machine: Machine, count: int) -> None:
    assert isinstance(machine.refused(Allocate(counter="ledger_ids", count=count)), Invalid)


def test_session_ids_begin_at_one(machine: Machine) -> None:
    assert machine.session() == 1
    assert machine.session() == 2


@pytest.mark.parametrize("lease_ms", [0, 99, 3_600_001])
def test_leases_are_bounded(machine: Machine, lease_ms: int) -> None:
    assert isinstance(machine.refused(OpenSession(holder="x", lease_ms=lease_ms)), Invalid)


def test_records_of_a_session_are_deleted_with_it(machine: Machine) -> None:
    mine, other = machine.session(), machine.session()
    machine.done(
        Put(record=Broker(broker_id=1, host="h", port=1, session_id=mine)),
        Put(record=Broker(broker_id=2, host="h", port=2, session_id=other)),
        Put(record=Bookie(bookie_id="b", address="h:1", cookie="c", session_id=mine)),
        Put(record=TieringWorker(worker_id="w", session_id=mine)),
        Put(record=Lease(name="offload", session_id=mine)),
    )
    machine.done(ExpireSession(session_id=mine))
    assert machine.records.get(session_key(mine)) is None
    assert machine.records.get(broker_key(1)) is None
    assert machine.records.get("tiering_worker/w") is None
    assert machine.records.get(lease_key("offload")) is None
    assert machine.records.get(broker_key(2)) is not None
    bookie = machine.records.get(bookie_key("b"))
    assert bookie is not None
    assert bookie.record == Bookie(bookie_id="b", address="h:1", cookie="c", session_id=0)


def test_ending_a_session_twice_changes_nothing(machine: Machine) -> None:
    session_id = machine.session()
    machine.done(ExpireSession(session_id=session_id))
    assert not machine.apply(ExpireSession(session_id=session_id)).changes


def test_a_record_put_and_its_session_ended_in_one_command(machine: Machine) -> None:
    session_id = machine.session()
    machine.done(Put(record=Lease(name="l", session_id=session_id)), ExpireSession(session_id=session_id))
    assert machine.records.get(lease_key("l")) is None


def test_records_of_an_expired_session_are_refused(machine: Machine) -> None:
    session_id = machine.session()
    machine.done(ExpireSession(session_id=session_id))
    refused = machine.refused(Put(record=Broker(broker_id=1, host="h", port=1, session_id=session_id)))
    assert isinstance(refused, SessionExpired)
    assert isinstance(machine.refused(requirements=(SessionAlive(session_id=session_id),)), SessionExpired)


def test_sessions_are_neither_put_nor_deleted(machine: Machine) -> None:
    session_id = machine.session()
    put = Put(record=Session(session_id=session_id, holder="x", lease_ms=1000))
    assert isinstance(machine.refused(put), Invalid)
    assert isinstance(machine.refused(Delete(key=session_key(session_id))), Invalid)


NAMES = st.sampled_from(["a", "b", "c", "aa", "b/1"])
UPDATES = st.one_of(
    NAMES.map(lambda name: Put(record=config(name))),
    NAMES.map(lambda name: Delete(key=f"dynamic_config/{name}")),
    st.just(OpenSession(holder="h", lease_ms=1000)),
    st.integers(1, 4).map(lambda session_id: ExpireSession(session_id=session_id)),
    st.builds(lambda name, session_id: Put(record=Lease(name=name, session_id=session_id)), NAMES, st.integers(1, 4)),
    st.builds(lambda count: Allocate(counter="ids", count=count), st.integers(0, 3)),
)


@given(st.lists(st.lists(UPDATES, min_size=1, max_size=4).map(tuple), max_size=20))
def test_changes_alone_rebuild_the_state(commands: list[tuple[Update, ...]]) -> None:
    """A follower, a watcher and the store rely on this. An orphaned lease never remains."""
    machine, copy = Machine(), RecordMap()
    for updates in commands:
        copy.install(machine.apply(*updates).changes)
        assert list(copy) == list(machine.records)
        sessions = {s.record.session_id for s in copy.of_kind("session") if isinstance(s.record, Session)}
        assert all(s.record.session_id in sessions for s in copy.of_kind("lease") if isinstance(s.record, Lease))


@given(
    st.lists(st.tuples(NAMES, st.booleans()), max_size=60), st.sampled_from(["", "d", "dynamic_config/", "dynamic_config/a"])
)
def test_scans_are_ordered_and_complete(history: list[tuple[str, bool]], prefix: str) -> None:
    machine = Machine()
    model: set[str] = set()
    for name, put in history:
        key = f"dynamic_config/{name}"
        machine.done(Put(record=config(name)) if put else Delete(key=key))
        (model.add if put else model.discard)(key)
        found = [stored.record.key() for stored in machine.records.scan(prefix)]
        assert found == sorted(key for key in model if key.startswith(prefix))
