"""Replicas reported to clients: as many as there are copies, as many in sync as are live, updated at once."""

from __future__ import annotations

import asyncio
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from unit.broker.hand_fed_view import HandFedView

from stratalog_broker.cluster.partition_rows import PartitionRows, Pieces
from stratalog_broker.cluster.replicas import Replicas, replicas_of
from stratalog_broker.protocol.metadata import PartitionState, encode_partition, layout_of
from stratalog_metadata.records import Bookie, Broker, Fragment, Ledger, LedgerRef, LedgerState, Log, Partition, Topic

ID = UUID(int=1)
BROKERS = st.sets(st.integers(1, 8)).map(sorted)


def broker(number: int) -> Broker:
    return Broker(broker_id=number, host="h", port=9092, session_id=number)


def bookie(number: int, *, live: bool = True, failed_disks: tuple[int, ...] = ()) -> Bookie:
    return Bookie(
        bookie_id=f"b{number}", address=f"h{number}:1", cookie="c", session_id=int(live), failed_disks=failed_disks
    )  # fmt: skip


def topic(copies: int = 3) -> Topic:
    return Topic(name="t", topic_id=ID, partition_count=1, replication_factor=copies)


def ledger(number: int, *bookies: int, state: LedgerState = LedgerState.OPEN) -> Ledger:
    return Ledger(
        ledger_id=number, topic_id=ID, partition=0, base_offset=0, leader_epoch=1, write_quorum=len(bookies), ack_quorum=1,
        fragments=(Fragment(first_entry=0, bookies=tuple(f"b{each}" for each in bookies)),), state=state,
    )  # fmt: skip


def log(*ledgers: int) -> Log:
    refs = tuple(LedgerRef(ledger_id=number, base_offset=0, leader_epoch=1) for number in ledgers)
    return Log(topic_id=ID, index=0, ledgers=refs)


def a_view(copies: int = 3, brokers: int = 3, bookies: int = 3, **partition: object) -> HandFedView:
    view = HandFedView()
    owned = {"owner": 2, "leader_epoch": 1, **partition}
    view.put(
        topic(copies), Partition(topic_id=ID, index=0, **owned), *map(broker, range(1, brokers + 1)),  # type: ignore[arg-type]
        *map(bookie, range(1, bookies + 1)),
    )  # fmt: skip
    return view


def told(view: HandFedView, copies: int = 3) -> PartitionState:
    return Replicas(view).of(topic(copies), 0)


@given(
    owner=st.integers(-1, 8), assigned=st.lists(st.integers(1, 8), unique=True, max_size=4), brokers=BROKERS,
    copies=st.integers(1, 5),
)  # fmt: skip
def test_each_replica_is_named_once_and_the_owner_always(
    owner: int, assigned: list[int], brokers: list[int], copies: int
) -> None:
    found = replicas_of(owner, assigned, brokers, copies)
    known = {*assigned, *brokers, *({owner} - {-1})}
    assert len(set(found)) == len(found) == min(copies, len(known))
    assert owner == -1 or owner in found
    if not assigned and owner != -1:
        assert found[0] == owner
    if owner == -1 or owner in assigned[:copies]:
        assert found[: len(assigned)] == tuple(assigned[:copies])


def test_a_partition_that_is_empty_or_cold_is_in_sync() -> None:
    view = a_view()
    assert told(view) == PartitionState(2, 1, (2, 3, 1), (2, 3, 1), ())
    view.put(log())
    assert told(view).in_sync == (2, 3, 1)
    assert told(a_view(brokers=2)).replicas == (2, 1), "fewer brokers than copies: each once"
    assert told(view, copies=1) == PartitionState(2, 1, (2,), (2,), ())


def test_a_copy_that_is_away_is_out_of_sync() -> None:
    view = a_view(bookies=4)
    view.put(ledger(7, 1, 2, 3), log(7))
    assert told(view).in_sync == (2, 3, 1)
    view.put(bookie(3, live=False))
    assert told(view).in_sync == (2, 3)
    view.put(bookie(2, failed_disks=(0,)))
    assert told(view).in_sync == (2,)
    view.put(bookie(1, live=False))
    assert told(view).in_sync == (2,), "the owner leads as long as it lives"
    view.put(ledger(8, 4), log(7, 8))
    assert told(view).in_sync == (2,), "the newest ledger was opened with one copy"
    view.put(bookie(2), bookie(1), ledger(9, 1, 2, 4), log(7, 8, 9))
    assert told(view).in_sync == (2, 3, 1)


def test_an_assignment_is_reported_as_it_is() -> None:
    view = a_view(replicas=(3, 2, 1))
    assert told(view) == PartitionState(2, 1, (3, 2, 1), (3, 2, 1), ())
    view.remove("broker/3")
    assert told(view) == PartitionState(2, 1, (3, 2, 1), (2, 1), (3,))
    assert told(view, copies=1).replicas == (2,), "the owner is always among them"


def test_without_a_live_owner_nobody_leads() -> None:
    view = a_view()
    view.remove("broker/2")
    assert told(view) == PartitionState(-1, 1, (2, 3, 1), (), (2,))
    assert Replicas(view).of(topic(), 5) == PartitionState(-1, -1)


def test_rows_are_encoded_anew_when_copies_come_or_go_and_only_then() -> None:
    view = a_view(bookies=4)
    view.put(ledger(7, 1, 2, 3), log(7))
    rows = PartitionRows(view)
    encoded = 0

    def changed() -> bool:
        nonlocal encoded
        before, current = encoded, view.find(Topic, "topic/t") or topic()
        row = b"".join(asyncio.run(rows.of(current, 13, Pieces())).blocks)
        encoded = rows.encoded
        assert row == encode_partition(
            layout_of(13), 0, told(view, (view.find(Topic, "topic/t") or topic()).replication_factor)
        )
        return encoded != before

    assert changed()
    for records, is_seen in (
        ((bookie(3, live=False),), True),
        ((ledger(7, 1, 2, 4),), True),
        ((ledger(7, 1, 2, 4, state=LedgerState.CLOSED),), False),
        ((bookie(4),), False),
        ((ledger(8, 1, 2, 4), log(7, 8)), True),
        ((log(8),), False),
        ((topic(2),), True),
        ((broker(1),), False),
    ):
        view.put(*records)
        assert changed() == is_seen, records
    view.remove("bookie/b1")
    assert changed()
    view.remove("broker/1")
    assert changed()
