"""The bytes of ``__consumer_offsets`` in Kafka's schemas, and malformed keys, values and snapshots."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.coordination.groups.core.consumer.model import ClassicJoin, ConsumerGroupState, MemberMetadata
from stratalog_broker.coordination.groups.core.consumer.records import ConsumerKey, ConsumerRecord, apply_value, encode_value
from stratalog_broker.coordination.groups.core.messages import GroupImage, MemberImage
from stratalog_broker.coordination.groups.core.records import (
    CommittedOffset,
    GroupKey,
    OffsetKey,
    decode_group_value,
    decode_key,
    decode_offset_value,
    encode_group_key,
    encode_group_value,
    encode_offset_key,
    encode_offset_value,
    subscribed_topics,
)
from stratalog_broker.coordination.groups.core.store import GroupStore
from stratalog_broker.coordination.replay import Replay
from stratalog_broker.coordination.routing import java_string_hash, partition_of
from stratalog_core.batches.records import Record, build_batch
from stratalog_core.errors import Corrupt

TEXT = st.text(max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
OFFSETS = st.builds(CommittedOffset, offset=INT64, leader_epoch=INT32, metadata=TEXT, committed_at_ms=INT64)
MEMBERS = st.builds(
    MemberImage, member_id=TEXT, group_instance_id=st.none() | TEXT, client_id=TEXT, client_host=TEXT,
    rebalance_timeout_ms=INT32, session_timeout_ms=INT32, subscription=st.binary(), assignment=st.binary(),
)  # fmt: skip
IMAGES = st.builds(
    GroupImage, group_id=st.just("g"), protocol_type=TEXT, generation=INT32, protocol_name=st.none() | TEXT,
    leader=st.none() | TEXT, state_since_ms=INT64, members=st.lists(MEMBERS, max_size=3).map(tuple),
)  # fmt: skip


def test_offset_commit_bytes() -> None:
    assert encode_offset_key(OffsetKey("grp", "tp", 7)) == b"\x00\x01\x00\x03grp\x00\x02tp\x00\x00\x00\x07"
    value = encode_offset_value(CommittedOffset(offset=258, leader_epoch=5, metadata="m", committed_at_ms=1))
    assert value == (
        b"\x00\x03" b"\x00\x00\x00\x00\x00\x00\x01\x02" b"\x00\x00\x00\x05" b"\x00\x01m" b"\x00\x00\x00\x00\x00\x00\x00\x01"
    )  # fmt: skip


def test_bytes_of_a_classic_member_in_a_consumer_group() -> None:
    """As the generated classes of Kafka 4.3.1 write them, which also write a tag for a member of the consumer protocol."""
    classic = ClassicJoin(session_timeout_ms=45_000, protocols=(("range", b"\x01\x02\x03"),))
    member = MemberMetadata(
        instance_id="i", client_id="c", client_host="/h", topic_names=("t",), rebalance_timeout_ms=300_000, classic=classic
    )
    key, known = ConsumerKey(ConsumerRecord.MEMBER, "grp", "m"), "00000269000263032f6802027401000493e00001"
    value = bytes.fromhex(known + "0012010000afc8020672616e6765040102030000")
    assert encode_value(key, ConsumerGroupState(members={"m": member})) == value
    for content, expected in ((value, member), (bytes.fromhex(known + "000100"), replace(member, classic=None))):
        state = ConsumerGroupState()
        apply_value(key, content, state)
        assert state.members == {"m": expected}


def test_group_metadata_bytes() -> None:
    assert encode_group_key("grp") == b"\x00\x02\x00\x03grp"
    member = MemberImage(
        member_id="m", group_instance_id=None, client_id="c", client_host="/h", rebalance_timeout_ms=2, session_timeout_ms=1,
        subscription=b"s", assignment=b"as",
    )  # fmt: skip
    image = GroupImage(
        group_id="grp", protocol_type="consumer", generation=3, protocol_name="range", leader="m", state_since_ms=9,
        members=(member,),
    )  # fmt: skip
    assert encode_group_value(image) == (
        b"\x00\x03" b"\x00\x08consumer" b"\x00\x00\x00\x03" b"\x00\x05range" b"\x00\x01m"
        b"\x00\x00\x00\x00\x00\x00\x00\x09" b"\x00\x00\x00\x01"
        b"\x00\x01m" b"\xff\xff" b"\x00\x01c" b"\x00\x02/h" b"\x00\x00\x00\x02" b"\x00\x00\x00\x01"
        b"\x00\x00\x00\x01s" b"\x00\x00\x00\x02as"
    )  # fmt: skip


@given(TEXT, TEXT, INT32)
def test_keys_round_trip(group_id: str, topic: str, partition: int) -> None:
    assert decode_key(encode_offset_key(OffsetKey(group_id, topic, partition))) == OffsetKey(group_id, topic, partition)
    assert decode_key(encode_group_key(group_id)) == GroupKey(group_id)


@given(OFFSETS, IMAGES)
def test_values_round_trip(offset: CommittedOffset, image: GroupImage) -> None:
    assert decode_offset_value(encode_offset_value(offset)) == offset
    assert decode_group_value("g", encode_group_value(image)) == image


def test_values_of_older_kafkas_are_read() -> None:
    first = b"\x00\x01" + b"\x00\x00\x00\x00\x00\x00\x00\x05" + b"\x00\x00" + bytes(8) + b"\xff" * 8
    assert decode_offset_value(first) == CommittedOffset(offset=5, leader_epoch=-1, metadata="", committed_at_ms=0)
    group = b"\x00\x00" + b"\x00\x00" + b"\x00\x00\x00\x01" + b"\xff\xff" + b"\xff\xff" + b"\x00\x00\x00\x00"
    assert decode_group_value("g", group).generation == 1


def test_keys_of_other_kinds_are_skipped() -> None:
    assert decode_key(b"\x00\x0b\x00\x01g") is None


@given(st.binary(max_size=40))
def test_garbage_is_corrupt_or_a_value_but_never_a_crash(content: bytes) -> None:
    for decode in (decode_key, decode_offset_value, lambda value: decode_group_value("g", value)):
        with contextlib.suppress(Corrupt):
            decode(content)


def test_subscriptions_name_their_topics() -> None:
    assert subscribed_topics(b"\x00\x01\x00\x00\x00\x02\x00\x01a\x00\x02bc\x00\x00\x00\x00") == frozenset({"a", "bc"})
    assert subscribed_topics(b"anything") is None
    assert subscribed_topics(b"") is None


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("a", 97), ("häß", 107_235), ("😀", 1_772_899), ("polygenelubricants", -(2**31))]
)
def test_java_hash(text: str, expected: int) -> None:
    assert java_string_hash(text) == expected
    assert 0 <= partition_of(text, 50) < 50


def test_groups_stay_in_the_partitions_of_their_records() -> None:
    assert [partition_of(group_id, 50) for group_id in ("payments", "orders", "flights")] == [13, 17, 39]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("tu"), st.integers(0, 1), st.none() | OFFSETS)), IMAGES)
def test_a_store_is_its_records_and_its_snapshot(
    commits: list[tuple[str, str, int, CommittedOffset | None]], image: GroupImage
) -> None:
    store, expected = GroupStore(), dict[tuple[str, str, int], CommittedOffset]()
    for group_id, topic, partition, offset in commits:
        key = encode_offset_key(OffsetKey(group_id, topic, partition))
        value = encode_offset_value(offset) if offset is not None else None
        Replay(store).apply(build_batch([Record(offset=0, timestamp_ms=0, key=key, value=value)]))
        if offset is None:
            expected.pop((group_id, topic, partition), None)
        else:
            expected[(group_id, topic, partition)] = offset
    store.begin_batch()(encode_group_key("g"), encode_group_value(image), ())
    for one in (store, GroupStore.from_snapshot(store.snapshot())):
        found = {(g, *name): offset for g, table in one.offsets.items() for name, offset in table.items()}
        assert found == expected
        assert one.offset_count == len(expected)
        assert one.images == {"g": image}
        assert all(one.offsets.values())
    store.begin_batch()(encode_group_key("g"), None, ())
    assert not store.images


def test_a_snapshot_of_another_version_is_refused() -> None:
    with pytest.raises(Corrupt, match="malformed"):
        GroupStore.from_snapshot(b"garbage")
    other = GroupStore().snapshot().replace(b"\xa7version\x01", b"\xa7version\x02")
    with pytest.raises(Corrupt, match="version 2"):
        GroupStore.from_snapshot(other)
