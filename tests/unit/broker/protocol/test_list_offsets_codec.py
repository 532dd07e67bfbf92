"""ListOffsets responses with hand-encoded partitions against kio."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.entities import encode_response, response_factory
from stratalog_broker.protocol.list_offsets import OffsetRow, encode_list_offsets

long = st.integers(-(2**63), 2**63 - 1)
rows = st.builds(
    OffsetRow,
    st.integers(-(2**31), 2**31 - 1),
    st.sampled_from([code.value for code in ErrorCode]),
    long,
    long,
    st.integers(-(2**31), 2**31 - 1),
)
names = st.text(st.characters(codec="utf-8"), max_size=40)


@pytest.mark.parametrize("version", range(1, 12))
@given(topics=st.lists(st.tuples(names, st.lists(rows, max_size=140)), max_size=3))
@settings(max_examples=15, deadline=None)
def test_the_bytes_are_kios(version: int, topics: list[tuple[str, list[OffsetRow]]]) -> None:
    new = response_factory(2, version)
    expected = new(
        "ListOffsetsResponse",
        topics=tuple(
            new(
                "ListOffsetsTopicResponse",
                name=name,
                partitions=tuple(
                    new(
                        "ListOffsetsPartitionResponse", partition_index=row.partition, error_code=ErrorCode(row.error),
                        timestamp=row.timestamp_ms, offset=row.offset, leader_epoch=row.leader_epoch,
                    )
                    for row in of_topic
                ),
            )
            for name, of_topic in topics
        ),
    )  # fmt: skip
    assert encode_list_offsets(new, version, topics) == encode_response(expected)
