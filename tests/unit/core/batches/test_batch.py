"""The batch header's view: every field where Kafka puts it, and nothing believed that is not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.batch import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_BYTES,
    TIMESTAMP_TYPE_BIT,
    TRANSACTIONAL_BIT,
    assign_log_append_time,
    assign_offset,
    check_batch,
    clear_broker_bits,
    crc_matches,
    iterate_headers,
    read_header,
)
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt, Invalid


def batch_of(count: int = 3, base_offset: int = 100, *, compression: int = 0, attributes: int = 0) -> bytearray:
    records = [
        Record(offset=base_offset + step, timestamp_ms=1000 + step, key=None, value=b"v" * step) for step in range(count)
    ]
    return build_batch(records, compression=compression, attributes=attributes, leader_epoch=7)


def test_header_fields() -> None:
    batch = batch_of(compression=4, attributes=TRANSACTIONAL_BIT | CONTROL_BIT)
    header = read_header(b"ab" + batch, 2)
    assert (header.base_offset, header.last_offset, header.next_offset) == (100, 102, 103)
    assert (header.size_bytes, header.leader_epoch, header.record_count) == (len(batch), 7, 3)
    assert (header.base_timestamp_ms, header.max_timestamp_ms) == (1000, 1002)
    assert (header.compression, header.is_transactional, header.is_control) == (4, True, True)
    assert not header.is_log_append_time


@pytest.mark.parametrize(
    ("base_sequence", "count", "last_sequence"), [(-1, 3, -1), (0, 3, 2), (2**31 - 2, 3, 0), (2**31 - 1, 1, 2**31 - 1)]
)
def test_the_last_sequence_wraps_as_kafkas_does(base_sequence: int, count: int, last_sequence: int) -> None:
    records = [Record(offset=step, timestamp_ms=0, key=None, value=None) for step in range(count)]
    assert read_header(build_batch(records, base_sequence=base_sequence)).last_sequence == last_sequence


@given(st.lists(st.integers(1, 4), max_size=5), st.integers(0, 80))
def test_runs_are_walked_batch_by_batch_and_a_cut_is_noticed(counts: list[int], cut: int) -> None:
    batches = [batch_of(count, 10 * number) for number, count in enumerate(counts)]
    run = b"".join(batches)
    walked = list(iterate_headers(run))
    assert [header.size_bytes for _, header in walked] == [len(batch) for batch in batches]
    assert [position for position, _ in walked] == [sum(map(len, batches[:number])) for number in range(len(batches))]
    if batches and 0 < cut < len(batches[-1]):
        with pytest.raises(Corrupt):
            list(iterate_headers(run[:-cut]))


@pytest.mark.parametrize("length", [-(2**31), -12, 0, 48, 2**31 - 1])
def test_lengths_that_cannot_be_are_refused(length: int) -> None:
    batch = batch_of()
    batch[8:12] = length.to_bytes(4, "big", signed=True)
    with pytest.raises(Corrupt):
        list(iterate_headers(batch))


def test_a_header_that_is_cut_short_is_refused() -> None:
    with pytest.raises(Corrupt, match="60 of 61 bytes"):
        read_header(batch_of()[: HEADER_BYTES - 1])


def test_every_flipped_byte_that_the_checksum_covers_is_found() -> None:
    batch = batch_of()
    for position in range(21, len(batch)):
        batch[position] ^= 0x10
        assert not crc_matches(batch, read_header(batch))
        batch[position] ^= 0x10
    assert check_batch(batch) == read_header(batch)


def test_a_whole_batch_is_checked_by_magic_size_and_checksum() -> None:
    batch = batch_of()
    with pytest.raises(Corrupt, match="claims"):
        check_batch(batch + b"\x00")
    batch[-1] ^= 1
    with pytest.raises(Corrupt, match="base offset 100 does not match its CRC"):
        check_batch(batch)
    batch[16] = 1
    with pytest.raises(Invalid, match="magic 1"):
        check_batch(batch)


@given(st.integers(0, 2**62), st.integers(0, 2**31 - 1))
def test_offset_and_epoch_are_assigned_without_touching_the_checksum(base_offset: int, epoch: int) -> None:
    batch = batch_of()
    before = bytes(batch)
    assign_offset(memoryview(batch), base_offset, epoch)
    header = check_batch(batch)
    assert (header.base_offset, header.leader_epoch) == (base_offset, epoch)
    assert batch[16:] == before[16:]


def test_what_only_brokers_set_is_removed_without_changing_times() -> None:
    batch = batch_of(compression=1, attributes=TRANSACTIONAL_BIT | DELETE_HORIZON_BIT | TIMESTAMP_TYPE_BIT)
    before = read_header(batch)
    header = clear_broker_bits(memoryview(batch))
    assert header == check_batch(batch)
    assert header.delete_horizon_ms is None
    assert header._replace(crc=0) == before._replace(crc=0, attributes=TRANSACTIONAL_BIT | 1)


def test_log_append_time_renews_the_checksum() -> None:
    batch = batch_of(compression=1)
    assign_log_append_time(batch, 123_456)
    header = check_batch(batch)
    assert header.is_log_append_time
    assert header.attributes == TIMESTAMP_TYPE_BIT | 1
    assert header.max_timestamp_ms == 123_456
