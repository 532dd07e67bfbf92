"""The fast codec for many offsets writes and reads the same bytes as the codec for single records."""

from __future__ import annotations

import re
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratalog_broker.coordination.groups.core.offset_rows import Commit, OffsetDecoder, OffsetEncoder
from stratalog_broker.coordination.groups.core.records import (
    CommittedOffset,
    OffsetKey,
    decode_key,
    decode_offset_value,
    encode_offset_key,
    encode_offset_value,
    topic_id_headers,
)
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import Replay
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt


def batch_of(commits: list[Commit], group_id: str) -> bytearray:
    encoder = OffsetEncoder(group_id, 1_700_000_000_000)
    made = [encoder.record(commit) for commit in commits]
    return build_batch(
        [
            Record(offset=number, timestamp_ms=0, key=each.key, value=each.value, headers=each.headers)
            for number, each in enumerate(made)
        ]
    )


commit_lists = st.lists(
    st.builds(
        Commit,
        st.sampled_from(["flights", "f", "f\0", "überall"]),
        st.integers(-(2**31), 2**31 - 1),
        st.integers(-(2**63), 2**63 - 1),
        st.integers(-(2**31), 2**31 - 1),
        st.sampled_from(["", "", "m", "x" * 300]),
        st.sampled_from([None, UUID(int=1), UUID(int=2)]),
    ),
    min_size=1,
    max_size=40,
)


@settings(deadline=None)
@given(commit_lists, st.sampled_from(["", "g", "\0f"]))
def test_offsets_of_one_request_are_written_and_read_as_if_one_by_one(commits: list[Commit], group_id: str) -> None:
    encoder, decoder = OffsetEncoder(group_id, 7), OffsetDecoder()
    for commit in commits:
        committed = CommittedOffset(
            offset=commit.offset, leader_epoch=commit.leader_epoch, metadata=commit.metadata, committed_at_ms=7
        )
        key = OffsetKey(group_id, commit.topic, commit.partition)
        record = encoder.record(commit)
        assert record.value is not None
        expected = (encode_offset_key(key), encode_offset_value(committed), topic_id_headers(commit.topic_id))
        assert (record.key, record.value, record.headers) == expected
        assert decoder.key(record.key) == decode_key(record.key) == key
        found = decoder.value(record.value, record.headers)
        assert found == decode_offset_value(record.value, commit.topic_id)
        assert found.topic_id == commit.topic_id


@given(commit_lists, st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60), st.integers(0, 255)), max_size=5))
def test_keys_that_begin_alike_never_change_what_another_key_says(
    commits: list[Commit], damage: list[tuple[int, int, int]]
) -> None:
    """For other versions, trailing bytes and truncated keys the result equals that of a decoder without a cache."""
    encoder, decoder = OffsetEncoder("g", 7), OffsetDecoder()
    keys = [encoder.record(commit).key for commit in commits]
    for number, position, byte in damage:
        intact = keys[number % len(keys)]
        at = position % len(intact)
        keys += [intact[:at] + bytes((byte,)) + intact[at + 1 :], intact + b"more", intact[:at] or b"\0"]
    for key in keys:
        try:
            expected: object = decode_key(key)
        except Corrupt as corrupt:
            with pytest.raises(Corrupt, match=re.escape(str(corrupt))):
                decoder.key(key)
        else:
            assert decoder.key(key) == expected


def test_a_store_applies_thousands_of_offsets_of_one_batch() -> None:
    store = GroupStore()
    Replay(store).apply(batch_of([Commit("flights", number, number * 2, topic_id=UUID(int=9)) for number in range(3000)], "g"))
    found = store.offsets_of("g")
    assert (len(found), store.offset_count) == (3000, 3000)
    assert found["flights", 2999] == CommittedOffset(
        offset=5998, leader_epoch=-1, metadata="", committed_at_ms=1_700_000_000_000, topic_id=UUID(int=9)
    )
