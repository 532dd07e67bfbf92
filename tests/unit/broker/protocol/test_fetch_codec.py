"""The hand-written Fetch response against kio, which was made from Kafka's own message definitions."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.entities import encode_response as kio_encode
from stratalog_broker.protocol.entities import response_factory
from stratalog_broker.protocol.fetch import (
    ENDPOINTS_VERSION,
    FLEXIBLE_VERSION,
    TOPIC_ID_VERSION,
    PartitionFetched,
    encode_response,
)
from stratalog_broker.protocol.produce import Leader

versions = st.integers(4, 18)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)
int32, int64 = (st.integers(-(2**bits), 2**bits - 1) for bits in (31, 63))
leaders = st.builds(Leader, st.integers(0, 3), int32, st.sampled_from(["broker", "h"]), int32, st.sampled_from(["", "r1"]))


@st.composite
def partitions(draw: st.DrawFn) -> PartitionFetched:
    batches = [memoryview(batch) for batch in draw(st.lists(st.binary(min_size=1, max_size=200), max_size=3))]
    code = draw(st.sampled_from([0, 0, 1, 6, 74]))
    return PartitionFetched(
        draw(int32),
        code,
        draw(int64),
        draw(int64),
        draw(int64),
        batches,
        sum(map(len, batches)),
        draw(st.none() | st.lists(st.tuples(int64, int64), max_size=3)),
        draw(leaders) if code in (6, 74) else None,
        draw(st.none() | st.tuples(int32, int64)),
        draw(st.sampled_from([-1, -1, 3])),
    )


def kio_response(version: int, topics: list[tuple[bytes, list[PartitionFetched]]], code: int, session_id: int) -> bytes:
    new = response_factory(1, version)
    found: dict[int, Leader] = {}

    def partition(one: PartitionFetched) -> Any:
        values: dict[str, Any] = {}
        if one.leader is not None and version >= FLEXIBLE_VERSION:
            found[one.leader.broker_id] = one.leader
            values["current_leader"] = new(
                "LeaderIdAndEpoch", leader_id=one.leader.broker_id, leader_epoch=one.leader.leader_epoch
            )
        if one.diverging is not None and version >= FLEXIBLE_VERSION:
            values["diverging_epoch"] = new("EpochEndOffset", epoch=one.diverging[0], end_offset=one.diverging[1])
        aborted = one.aborted
        return new(
            "PartitionData",
            partition_index=one.partition,
            error_code=ErrorCode(one.error_code),
            high_watermark=one.high_watermark,
            last_stable_offset=one.last_stable_offset,
            log_start_offset=one.log_start_offset,
            aborted_transactions=None
            if aborted is None
            else tuple(new("AbortedTransaction", producer_id=pair[0], first_offset=pair[1]) for pair in aborted),
            preferred_read_replica=one.preferred_replica,
            records=b"".join(one.batches),
            **values,
        )

    responses = tuple(
        new(
            "FetchableTopicResponse",
            topic=None if version >= TOPIC_ID_VERSION else key.decode(),
            topic_id=UUID(bytes=key) if version >= TOPIC_ID_VERSION else None,
            partitions=tuple(partition(one) for one in partitions),
        )
        for key, partitions in topics
    )
    endpoints: tuple[Any, ...] = ()
    if version >= ENDPOINTS_VERSION:
        endpoints = tuple(
            new("NodeEndpoint", node_id=one.broker_id, host=one.host, port=one.port, rack=one.rack or None)
            for one in found.values()
        )
    response = new(
        "FetchResponse", error_code=ErrorCode(code), session_id=session_id, responses=responses, node_endpoints=endpoints
    )
    return kio_encode(response)


@given(st.data(), versions)
@settings(deadline=None)
def test_responses_are_byte_for_byte_what_kio_writes(data: st.DataObject, version: int) -> None:
    keys = st.binary(min_size=16, max_size=16).filter(any) if version >= TOPIC_ID_VERSION else names.map(str.encode)
    topics = data.draw(st.lists(st.tuples(keys, st.lists(partitions(), max_size=4)), max_size=3))
    code, session_id = data.draw(st.sampled_from([0, 70])), data.draw(st.integers(0, 2**31 - 1))
    parts, size = encode_response(topics, version, error_code=code, session_id=session_id)
    encoded = b"".join(bytes(part) for part in parts)
    assert len(encoded) == size
    assert encoded == kio_response(version, topics, code, session_id)


def test_batches_travel_as_the_views_they_were_read_as() -> None:
    batch = memoryview(bytearray(b"batch"))
    parts, _ = encode_response([(b"t", [PartitionFetched(0, batches=[batch], batches_bytes=5)])], 12)
    assert any(part is batch for part in parts)
