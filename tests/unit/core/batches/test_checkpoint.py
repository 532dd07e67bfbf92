"""Checkpoint entries: cut into parts, put together, and never taken for a record batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_core.batches.checkpoint import (
    PART_HEADER_BYTES,
    Checkpoint,
    EpochStart,
    OngoingTransaction,
    ProducerEntry,
    SequencedBatch,
    decode_checkpoint,
    encode_checkpoint,
    is_checkpoint,
    part_position,
)
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt

naturals = st.integers(0, 2**62)
sequences = st.integers(0, 2**31 - 1)
checkpoints = st.builds(
    Checkpoint,
    offset=naturals,
    leader_epochs=st.lists(st.builds(EpochStart, sequences, naturals), max_size=3).map(tuple),
    producers=st.lists(
        st.builds(
            ProducerEntry,
            naturals,
            st.integers(0, 2**15 - 1),
            st.lists(st.builds(SequencedBatch, sequences, sequences, naturals, naturals), max_size=5).map(tuple),
        ),
        max_size=4,
    ).map(tuple),
    transactions=st.lists(st.builds(OngoingTransaction, naturals, naturals), max_size=2).map(tuple),
    application_state=st.none() | st.binary(max_size=300),
)


@given(checkpoints, st.integers(1, 400))
def test_checkpoints_come_back_however_they_are_cut(checkpoint: Checkpoint, part_bytes: int) -> None:
    parts = encode_checkpoint(checkpoint, part_bytes)
    assert decode_checkpoint(parts) == checkpoint
    assert [part_position(part[:PART_HEADER_BYTES]) for part in parts] == [(n, len(parts)) for n in range(len(parts))]
    assert all(is_checkpoint(part) and len(part) <= PART_HEADER_BYTES + part_bytes for part in parts)


def test_parts_missing_twice_or_out_of_order_are_refused() -> None:
    parts = encode_checkpoint(Checkpoint(offset=5, application_state=bytes(100)), 20)
    for wrong in (parts[:-1], parts[1:], [*parts, parts[-1]], parts[::-1]):
        with pytest.raises(Corrupt):
            decode_checkpoint(wrong)


@given(st.binary(max_size=30))
def test_noise_is_refused(noise: bytes) -> None:
    head = encode_checkpoint(Checkpoint(offset=1))[0][:PART_HEADER_BYTES]
    for part in (noise, b"SLCK" + noise, head + b"\xc1" + noise):
        with pytest.raises(Corrupt):
            decode_checkpoint([part])


def test_another_format_version_is_refused() -> None:
    part = bytearray(encode_checkpoint(Checkpoint(offset=1))[0])
    part[4] = 2
    with pytest.raises(Corrupt, match="format version 2"):
        decode_checkpoint([part])


def test_no_batch_looks_like_a_checkpoint() -> None:
    batch = build_batch([Record(offset=2**62, timestamp_ms=0, key=None, value=None)])
    assert not is_checkpoint(batch)


def test_a_remembered_batch_knows_its_first_offset_across_the_wrap() -> None:
    assert SequencedBatch(2**31 - 2, 0, 102, 0).base_offset == 100


def test_the_bytes_of_version_1() -> None:
    checkpoint = Checkpoint(
        offset=10,
        leader_epochs=(EpochStart(1, 0),),
        producers=(ProducerEntry(7, 0, (SequencedBatch(0, 9, 9, 1000),)),),
        application_state=b"state",
    )
    (part,) = encode_checkpoint(checkpoint)
    head = "534c434b01000000000184a66f66667365740aad6c65616465725f65706f63687391920100a970726f64756365727391"
    tail = "b16170706c69636174696f6e5f7374617465c4057374617465"
    assert part.hex() == head + "9407009194000909cd03e8ff" + tail
    without_coordinator_epoch = head + "9307009194000909cd03e8" + tail
    assert decode_checkpoint([bytes.fromhex(without_coordinator_epoch)]) == checkpoint
