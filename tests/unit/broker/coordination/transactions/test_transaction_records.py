"""Records of ``__transaction_state``: Kafka's bytes, both versions, and what is not readable."""

from __future__ import annotations

import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stratalog_broker.coordination.transactions.core.records import decode_key, decode_value, encode_key, record_of
from stratalog_broker.coordination.transactions.core.store import TransactionStore
from stratalog_broker.coordination.transactions.core.transaction import Transaction, TransactionState
from stratalog_core.errors import Corrupt

S = TransactionState
_STORED = [S.ONGOING, S.PREPARE_COMMIT, S.PREPARE_ABORT, S.COMPLETE_COMMIT, S.COMPLETE_ABORT]
_I64 = st.integers(-1, 2**62)
_EPOCH = st.integers(-1, 32_767)
_TRANSACTIONS = st.builds(
    Transaction,
    transactional_id=st.text(min_size=1, max_size=30),
    producer_id=_I64,
    producer_epoch=_EPOCH,
    last_producer_epoch=_EPOCH,
    previous_producer_id=_I64,
    next_producer_id=_I64,
    timeout_ms=st.integers(0, 2**31 - 1),
    state=st.sampled_from(_STORED),
    partitions=st.sets(st.tuples(st.text(max_size=10), st.integers(0, 2**31 - 1)), max_size=8).map(lambda s: tuple(sorted(s))),
    updated_at_ms=_I64,
    started_at_ms=_I64,
    client_version=st.integers(0, 2),
)
_IDS = st.lists(st.uuids(), max_size=2, unique=True)


@st.composite
def transactions(draw: st.DrawFn) -> Transaction:
    """A transaction, in which each topic has no id, one, or two."""
    plain = draw(_TRANSACTIONS)
    ids = ((name, topic_id) for name in sorted({name for name, _ in plain.partitions}) for topic_id in draw(_IDS))
    return replace(plain, topic_ids=tuple(sorted(ids)))


@given(transactions())
def test_a_record_holds_the_whole_transaction(transaction: Transaction) -> None:
    record = record_of(transaction)
    assert record.value is not None
    assert decode_key(record.key) == transaction.transactional_id
    assert decode_value(transaction.transactional_id, record.value, record.headers) == transaction


def test_the_bytes_are_those_of_kafka() -> None:
    """By hand from Kafka's schema: TransactionLogKey v0, TransactionLogValue v1."""
    ongoing = Transaction(
        transactional_id="copier", producer_id=7, producer_epoch=3, timeout_ms=60_000, state=S.ONGOING,
        partitions=(("a", 0), ("a", 2), ("b", 1)), updated_at_ms=5, started_at_ms=4, client_version=2,
    )  # fmt: skip
    record = record_of(ongoing)
    assert record.key == b"\0\0" + b"\0\x06copier"
    assert record.value == (
        struct.pack(">hqhib", 1, 7, 3, 60_000, 1)
        + b"\x03"  # two topics
        + b"\x02a\x03" + struct.pack(">ii", 0, 2) + b"\0"
        + b"\x02b\x02" + struct.pack(">i", 1) + b"\0"
        + struct.pack(">qq", 5, 4)
        + b"\x01\x02\x02" + struct.pack(">h", 2)  # one tagged field: client version
    )  # fmt: skip


def test_a_transactional_id_without_a_transaction_has_a_null_array() -> None:
    empty = Transaction(transactional_id="copier", producer_id=7, producer_epoch=0, timeout_ms=60_000, updated_at_ms=5)
    assert record_of(empty).value == struct.pack(">hqhib", 1, 7, 0, 60_000, 0) + b"\0" + struct.pack(">qq", 5, -1) + b"\0"


def test_the_ids_of_topics_are_in_a_header() -> None:
    first, second = UUID(int=1), UUID(int=2)
    ongoing = Transaction(
        transactional_id="copier", producer_id=7, producer_epoch=3, timeout_ms=60_000, state=S.ONGOING, updated_at_ms=5,
        partitions=(("__consumer_offsets", 4), ("a", 0), ("a", 2), ("b", 1)),
        topic_ids=(("a", first), ("b", first), ("b", second)),
    )  # fmt: skip
    record = record_of(ongoing)
    assert record.headers == (
        ("stratalog.topic_ids", b"\0\0" + b"\0\x01" + first.bytes + b"\0\x02" + first.bytes + second.bytes),
    )
    assert record.value is not None
    with pytest.raises(Corrupt):
        decode_value("copier", record.value, [("stratalog.topic_ids", b"\0\0\0\x01")])


def test_values_of_version_0_are_read() -> None:
    topic = struct.pack(">h", 1) + b"a" + struct.pack(">iii", 2, 0, 2)
    value = struct.pack(">hqhib", 0, 7, 3, 60_000, 1) + struct.pack(">i", 1) + topic + struct.pack(">qq", 5, 4)
    read = decode_value("copier", value)
    assert read == Transaction(
        transactional_id="copier", producer_id=7, producer_epoch=3, timeout_ms=60_000, state=S.ONGOING,
        partitions=(("a", 0), ("a", 2)), updated_at_ms=5, started_at_ms=4,
    )  # fmt: skip


def test_an_expired_id_is_deleted() -> None:
    old = Transaction(transactional_id="copier", producer_id=7, producer_epoch=0, timeout_ms=1, updated_at_ms=0)
    record = record_of(old.expired(5))
    assert record == (encode_key("copier"), None, ())


@pytest.mark.parametrize(
    "value",
    [
        b"",
        struct.pack(">h", 2),
        struct.pack(">hqhib", 1, 7, 3, 1, 6),
        struct.pack(">hqhib", 1, 7, 3, 1, 1) + b"\xff\xff\x03",
        struct.pack(">hqhib", 0, 7, 3, 1, 1) + struct.pack(">i", 2**30),
        struct.pack(">hqhib", 1, 7, 3, 1, 0) + b"\0" + struct.pack(">qq", 5, -1) + b"\x01\x02\x01\0",
    ],
    ids=["empty", "version", "state", "array", "count", "tag"],
)
def test_a_malformed_value_is_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_value("copier", value)


@given(st.lists(transactions(), max_size=5))
def test_a_snapshot_holds_all_transactions(several: list[Transaction]) -> None:
    store = TransactionStore()
    for each in several:
        store.transactions[each.transactional_id] = each
    assert TransactionStore.from_snapshot(store.snapshot()).transactions == store.transactions


@pytest.mark.parametrize("content", [b"", b"\x80", b"nonsense"])
def test_a_malformed_snapshot_is_corrupt(content: bytes) -> None:
    with pytest.raises(Corrupt):
        TransactionStore.from_snapshot(content)
