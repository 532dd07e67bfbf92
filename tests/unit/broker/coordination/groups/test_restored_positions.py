"""Positions of groups after a restore: within what was restored, under the topics' names, pending ones included."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.coordination.groups.core.records import CommittedOffset, OffsetKey
from stratalog_broker.coordination.groups.core.restored_positions import (
    MovedPosition,
    PositionsReport,
    RestoredEnds,
    restore_positions,
)
from stratalog_broker.coordination.groups.core.store import GroupStore

FLIGHTS, ORDERS = UUID(int=1), UUID(int=2)
NONE: Mapping[UUID, str] = {}
TOPICS = {FLIGHTS: RestoredEnds("flights-2", "flights", (100, 50))}


def committed(offset: int, topic_id: UUID | None = FLIGHTS) -> CommittedOffset:
    return CommittedOffset(offset=offset, leader_epoch=4, metadata="m", committed_at_ms=1, topic_id=topic_id)


def restored(
    store: GroupStore, topics: Mapping[UUID, RestoredEnds] = TOPICS, others: Mapping[UUID, str] = NONE
) -> tuple[GroupStore, PositionsReport]:
    report = PositionsReport()
    return GroupStore.from_snapshot(restore_positions(store.snapshot(), topics, others, report)), report


def test_positions_past_the_end_become_the_end_and_are_listed() -> None:
    store = GroupStore()
    store.put(OffsetKey("readers", "flights", 0), committed(100))
    store.put(OffsetKey("readers", "flights", 1), committed(51))
    store.pending.add(9, OffsetKey("writers", "flights", 0), committed(130))
    found, report = restored(store)
    offsets = found.offsets_of("readers")
    assert offsets["flights-2", 0] == committed(100)
    moved = offsets["flights-2", 1]
    assert (moved.offset, moved.leader_epoch, moved.metadata) == (50, -1, "m"), "the epoch is that of a record that is lost"
    ((producer_id, name, pending),) = found.pending
    assert (producer_id, name, pending.offset) == (9, OffsetKey("writers", "flights-2", 0), 100)
    assert report.moved == [
        MovedPosition("readers", "flights-2", 1, 51, 50), MovedPosition("writers", "flights-2", 0, 130, 100)
    ]  # fmt: skip
    assert (report.restored, report.left_out, report.groups) == (3, 0, {"readers", "writers"})


def test_positions_of_what_was_not_restored_are_left_out() -> None:
    store = GroupStore()
    store.put(OffsetKey("readers", "orders", 0), committed(3, ORDERS))
    store.put(OffsetKey("readers", "flights", 2), committed(3))
    store.put(OffsetKey("others", "flights", 0), committed(3, ORDERS))
    store.put(OffsetKey("others", "flights", 1), committed(3, None))
    found, report = restored(store)
    assert found.offsets == {"others": {("flights-2", 1): committed(3, None)}}
    assert found.offset_count == 1
    assert (report.restored, report.left_out) == (1, 3)
    assert list(found.left_out) == [], "the bucket has no other topics"


def test_positions_of_topics_that_are_restored_later_wait_for_that() -> None:
    store = GroupStore()
    store.put(OffsetKey("readers", "orders", 0), committed(3, ORDERS))
    store.put(OffsetKey("readers", "orders", 1), committed(4, None))
    store.put(OffsetKey("readers", "flights", 0), committed(9))
    store.pending.add(9, OffsetKey("writers", "orders", 0), committed(5, ORDERS))
    store.pending.add(8, OffsetKey("writers", "orders", 1), committed(6, ORDERS))
    first, _ = restored(store, others={ORDERS: "orders"})
    assert first.offsets == {"readers": {("flights-2", 0): committed(9)}}
    assert len(first.pending) == 0
    first.put(OffsetKey("readers", "flights-2", 0), committed(11))
    first.put(OffsetKey("readers", "orders", 0), committed(1, UUID(int=3)))
    first.transaction_ended(9, commit=True)
    first.transaction_ended(8, commit=False)
    second, report = restored(
        first, {FLIGHTS: RestoredEnds("flights-2", "flights-2", (100,)), ORDERS: RestoredEnds("orders", "orders", (100, 100))}
    )
    assert second.offsets == {
        "readers": {("flights-2", 0): committed(11), ("orders", 0): committed(3, ORDERS), ("orders", 1): committed(4, None)},
        "writers": {("orders", 0): committed(5, ORDERS)},
    }
    assert list(second.left_out) == []
    assert report.left_out == 1, "the topic that the cluster had created under the name is not restored"


def test_a_state_of_an_earlier_release_has_nothing_left_out() -> None:
    store = GroupStore()
    store.put(OffsetKey("readers", "flights", 0), committed(3))
    earlier = msgspec.msgpack.decode(store.snapshot())
    del earlier["left_out"], earlier["left_out_pending"]
    found = GroupStore.from_snapshot(msgspec.msgpack.encode(earlier))
    assert found.offsets == store.offsets
    assert list(found.left_out) == []


@given(st.dictionaries(st.tuples(st.sampled_from(("a", "b")), st.integers(0, 1)), st.integers(0, 200)))
def test_no_position_is_past_the_end_and_none_moves_without_reason(offsets: dict[tuple[str, int], int]) -> None:
    store = GroupStore()
    for (group, partition), offset in offsets.items():
        store.put(OffsetKey(group, "flights", partition), committed(offset))
    found, report = restored(store)
    ends = TOPICS[FLIGHTS].ends
    for (group, partition), offset in offsets.items():
        assert found.offsets_of(group)["flights-2", partition].offset == min(offset, ends[partition])
    assert len(report.moved) == sum(offset > ends[partition] for (_, partition), offset in offsets.items())


def test_a_partition_without_state_has_none() -> None:
    assert restore_positions(None, TOPICS, NONE, PositionsReport()) is None
