"""The lag of tiering, compared with each partition's records."""

from __future__ import annotations

from uuid import UUID

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from unit.broker.hand_fed_view import HandFedView

from stratalog_metadata.records import Fragment, Ledger, LedgerState, ManifestPointer, Topic
from stratalog_tiering.metrics import TieringLag, tiering_lag

NOW_MS = 1_000_000
RECORDS = 10


def _topic(number: int, *, internal: bool = False) -> Topic:
    return Topic(
        name=f"topic-{number}", topic_id=UUID(int=number), partition_count=2, replication_factor=1, internal=internal
    )  # fmt: skip


def _ledger(ledger_id: int, topic: Topic, partition: int, position: int, payload_bytes: int, *, closed: bool = True) -> Ledger:
    """The ledger at ``position`` of its partition. Each has ``RECORDS`` records and was sealed a second after the last."""
    return Ledger(
        ledger_id=ledger_id, topic_id=topic.topic_id, partition=partition, base_offset=position * RECORDS, leader_epoch=1,
        write_quorum=1, ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("bookie-1",)),),
        state=LedgerState.CLOSED if closed else LedgerState.OPEN,
        last_entry=0, payload_bytes=payload_bytes, end_offset=(position + 1) * RECORDS, closed_at_ms=1000 * position,
    )  # fmt: skip


def _pointer(topic: Topic, partition: int, ledgers: int) -> ManifestPointer:
    return ManifestPointer(
        topic_id=topic.topic_id, index=partition, manifest_version=1, object_key="m", sha256="", start_offset=0,
        end_offset=ledgers * RECORDS, cold_bytes=0,
    )  # fmt: skip


partitions = st.lists(
    st.tuples(st.lists(st.integers(1, 1000), max_size=5), st.none() | st.integers(0, 5)), min_size=2, max_size=6
)


@given(partitions)
def test_the_lag_counts_ledgers_that_are_sealed_and_not_cold(partitions: list[tuple[list[int], int | None]]) -> None:
    view = HandFedView()
    wanted: dict[str, TieringLag] = {}
    ledger_id = 0
    for number, (sizes, cold) in enumerate(partitions):
        topic, partition = _topic(number // 2), number % 2
        view.put(topic)
        if cold is not None:
            view.put(_pointer(topic, partition, cold))
        for position, size in enumerate(sizes):
            ledger_id += 1
            view.put(_ledger(ledger_id, topic, partition, position, size))
            if position >= (cold or 0):
                lag = wanted.setdefault(topic.name, TieringLag(topic=topic.name))
                lag.lag_bytes += size
                lag.lag_ledgers += 1
                lag.lag_seconds = max(lag.lag_seconds, NOW_MS / 1000 - position)
    found = tiering_lag(view, NOW_MS)
    assert {lag.topic: lag for lag in found} == wanted
    assert [lag.lag_bytes for lag in found] == sorted((lag.lag_bytes for lag in found), reverse=True)


def test_open_ledgers_internal_topics_and_empty_ledgers_do_not_lag() -> None:
    view = HandFedView()
    user, internal = _topic(1), _topic(2, internal=True)
    view.put(user, internal)
    view.put(_ledger(1, user, 0, 0, 100, closed=False), _ledger(2, internal, 0, 0, 100), _ledger(3, user, 1, 0, 0))
    assert tiering_lag(view, NOW_MS) == []


def test_a_topic_that_is_never_offloaded_does_not_lag_and_one_whose_copying_is_paused_does() -> None:
    view = HandFedView()
    policies = [{"remote.storage.enable": "false"}, {"remote.log.copy.disable": "true"}]
    for number, configs in enumerate(policies):
        topic = msgspec.structs.replace(_topic(number), configs=configs)
        view.put(topic)
        view.put(_ledger(number + 1, topic, 0, 0, 100))
    assert [lag.topic for lag in tiering_lag(view, NOW_MS)] == [_topic(1).name]
