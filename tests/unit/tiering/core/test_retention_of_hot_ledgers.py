"""Retention of hot ledgers: which may be removed without the store, and how hot and cold copies count together."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stratalog_metadata.records import Fragment, Ledger, LedgerRef, LedgerState, Log, ManifestPointer, Topic
from stratalog_tiering.core.partition import PartitionSnapshot, StoredLedger
from stratalog_tiering.core.policy import TierPolicy
from stratalog_tiering.core.retention import expired_ledgers, retained_bytes
from stratalog_tiering.format.manifest import empty_manifest

NOW_MS = 1_000_000
TOPIC = Topic(name="t", topic_id=UUID(int=1), partition_count=1, replication_factor=1)


def ledger(number: int, size: int = 100, *, closed: bool = True) -> StoredLedger:
    """Return a ledger of ten records from offset 10 * ``number`` on."""
    made = Ledger(
        ledger_id=number, topic_id=TOPIC.topic_id, partition=0, base_offset=10 * number, leader_epoch=0, write_quorum=1,
        ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("b",)),), payload_bytes=size,
        state=LedgerState.CLOSED if closed else LedgerState.OPEN, last_entry=1, end_offset=10 * number + 10 if closed else -1,
    )  # fmt: skip
    return StoredLedger(version=1, ledger=made)


def state(ledgers: list[StoredLedger], cold_newest_ms: int | None = None) -> PartitionSnapshot:
    """Hot ledgers after ten cold offsets, if there are cold ones."""
    refs = tuple(LedgerRef(ledger_id=s.ledger.ledger_id, base_offset=s.ledger.base_offset, leader_epoch=0) for s in ledgers)
    pointer = ManifestPointer(
        topic_id=TOPIC.topic_id, index=0, manifest_version=1, object_key="m", sha256="", start_offset=0, end_offset=10,
        cold_bytes=1, newest_ms=cold_newest_ms or 0,
    )  # fmt: skip
    return PartitionSnapshot(
        topic=TOPIC, log=Log(topic_id=TOPIC.topic_id, index=0, ledgers=refs), log_version=1, ledgers=tuple(ledgers),
        pointer=pointer if cold_newest_ms is not None else None, pointer_version=1, request=None, request_version=0,
    )  # fmt: skip


def numbers(expired: tuple[StoredLedger, ...]) -> list[int]:
    return [stored.ledger.ledger_id for stored in expired]


@given(
    ages_ms=st.lists(st.integers(0, 2000), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 300), min_size=6, max_size=6),
    retention_ms=st.sampled_from([-1, 0, 500, 1500]),
    retention_bytes=st.sampled_from([-1, 0, 250, 800]),
    cold_age_ms=st.none() | st.integers(0, 2000),
    known=st.integers(0, 6),
    log_start=st.integers(0, 80),
    last_is_open=st.booleans(),
)
def test_only_expired_ledgers_are_removed_and_the_newest_stays(
    ages_ms: list[int],
    sizes: list[int],
    retention_ms: int,
    retention_bytes: int,
    cold_age_ms: int | None,
    known: int,
    log_start: int,
    last_is_open: bool,
) -> None:
    count = len(ages_ms)
    ledgers = [ledger(n + 1, sizes[n], closed=not last_is_open or n < count - 1) for n in range(count)]
    newest_ms = {n + 1: NOW_MS - age for n, age in enumerate(ages_ms) if n < known}
    policy = TierPolicy(retention_ms=retention_ms, retention_bytes=retention_bytes)
    found = state(ledgers, None if cold_age_ms is None else NOW_MS - cold_age_ms)
    found = replace(found, log=msgspec.structs.replace(found.log, log_start_offset=log_start))
    expired = numbers(expired_ledgers(found, policy, newest_ms, NOW_MS))
    assert expired == list(range(1, len(expired) + 1)), "the oldest, without a gap"
    assert len(expired) < count
    older_is_past = cold_age_ms is None or cold_age_ms > retention_ms or log_start >= 10
    for number in expired:
        too_much = retention_bytes != -1 and sum(sizes[number:count]) >= retention_bytes
        too_old = retention_ms != -1 and number <= known and ages_ms[number - 1] > retention_ms
        is_deleted = log_start >= 10 * number + 10
        assert too_much or is_deleted or (too_old and older_is_past)
        older_is_past = True
    if log_start >= 10:
        assert len(expired) >= min(count - 1, log_start // 10 - 1), "deleted records go"


def test_cold_history_of_unknown_age_keeps_all_that_follows() -> None:
    policy, newest_ms = TierPolicy(retention_ms=1), {1: 0, 2: 0}
    ledgers = [ledger(number) for number in (1, 2, 3)]
    assert numbers(expired_ledgers(state(ledgers), policy, newest_ms, NOW_MS)) == [1, 2]
    assert numbers(expired_ledgers(state(ledgers, 5), policy, newest_ms, NOW_MS)) == [1, 2]
    pointer = state(ledgers, 5).pointer
    assert pointer is not None
    unknown = msgspec.structs.replace(pointer, newest_ms=-1)
    assert expired_ledgers(replace(state(ledgers, 5), pointer=unknown), policy, newest_ms, NOW_MS) == ()
    below_start = Log(topic_id=TOPIC.topic_id, index=0, log_start_offset=10)
    past = replace(state(ledgers, 5), pointer=unknown, log=below_start)
    assert numbers(expired_ledgers(past, policy, newest_ms, NOW_MS)) == [1, 2]


def test_history_continues_after_a_gap_only_if_the_log_starts_after_it() -> None:
    gap = state([ledger(3), ledger(4)], 5)
    assert gap.cold_end == 10
    assert replace(gap, log=Log(topic_id=TOPIC.topic_id, index=0, log_start_offset=29)).cold_end == 10
    assert replace(gap, log=Log(topic_id=TOPIC.topic_id, index=0, log_start_offset=30)).cold_end == 30
    within = replace(state([ledger(1), ledger(2)], 5), log=Log(topic_id=TOPIC.topic_id, index=0, log_start_offset=15))
    assert within.cold_end == 10, "DeleteRecords within a ledger leaves the ledger"


@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8), data=st.data())
def test_kafka_20732_each_record_counts_once_while_hot_copies_remain(sizes: list[int], data: st.DataObject) -> None:
    """A new worker sees cold and hot copies of the same records; counted twice, size-based retention deletes live data."""
    cold_count = data.draw(st.integers(0, len(sizes)), "ledgers that the manifest covers")
    dropped = data.draw(st.integers(0, cold_count), "of these, hot copies that are dropped already")
    manifest = msgspec.structs.replace(
        empty_manifest(TOPIC.topic_id, TOPIC.name, 0, 0), end_offset=10 * cold_count, cold_bytes=sum(sizes[:cold_count])
    )
    hot = [ledger(number, sizes[number]) for number in range(dropped, len(sizes))]
    assert retained_bytes(state(hot), manifest) == sum(sizes)
