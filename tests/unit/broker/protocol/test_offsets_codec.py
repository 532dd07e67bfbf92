"""OffsetCommit and OffsetFetch responses with hand-encoded partitions against kio."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from stratalog_broker.protocol.entities import encode_response, response_factory
from stratalog_broker.protocol.offset_commit import CommittedTopic, encode_offset_commit
from stratalog_broker.protocol.offset_fetch import CommittedRow, FetchedGroup, FetchedTopic, encode_offset_fetch

text = st.text(st.characters(codec="utf-8"), max_size=40)
index = st.integers(-(2**31), 2**31 - 1)
code = st.sampled_from(list(ErrorCode))
pairs = st.lists(st.tuples(index, code.map(lambda each: each.value)), max_size=140)
committed = st.builds(
    lambda name, topic_id, of_topic: CommittedTopic(name, topic_id, [row[0] for row in of_topic], [row[1] for row in of_topic]),
    text,
    st.uuids(),
    pairs,
)
rows = st.builds(
    CommittedRow,
    index,
    st.integers(-(2**63), 2**63 - 1),
    index,
    st.one_of(st.just(""), text, st.text("x", min_size=120, max_size=300)),
    code.map(lambda each: each.value),
)
fetched = st.builds(FetchedTopic, text, st.uuids(), st.lists(rows, max_size=140))
groups = st.builds(FetchedGroup, text, st.lists(fetched, max_size=3), code)


@pytest.mark.parametrize("version", range(2, 11))
@given(topics=st.lists(committed, max_size=3))
@settings(max_examples=15, deadline=None)
def test_a_commits_bytes_are_kios(version: int, topics: list[CommittedTopic]) -> None:
    new = response_factory(8, version)
    expected = new(
        "OffsetCommitResponse",
        topics=tuple(
            new(
                "OffsetCommitResponseTopic",
                name=topic.name,
                topic_id=topic.topic_id,
                partitions=tuple(
                    new("OffsetCommitResponsePartition", partition_index=partition, error_code=ErrorCode(error))
                    for partition, error in zip(topic.partitions, topic.errors, strict=True)
                ),
            )
            for topic in topics
        ),
    )
    assert encode_offset_commit(new, version, topics) == encode_response(expected)


@pytest.mark.parametrize("version", range(1, 11))
@given(wanted=st.lists(groups, min_size=1, max_size=3))
@settings(max_examples=15, deadline=None)
def test_a_fetchs_bytes_are_kios(version: int, wanted: list[FetchedGroup]) -> None:
    new = response_factory(9, version)
    if version < 8:
        (group, *_) = wanted
        expected = new("OffsetFetchResponse", topics=_topics(version, group, ""), error_code=group.error)
        assert encode_offset_fetch(new, version, [group]) == encode_response(expected)
        return
    expected = new(
        "OffsetFetchResponse",
        groups=tuple(
            new(
                "OffsetFetchResponseGroup",
                group_id=each.group_id,
                topics=_topics(version, each, "s"),
                error_code=each.error,
            )
            for each in wanted
        ),
    )
    assert encode_offset_fetch(new, version, wanted) == encode_response(expected)


def _topics(version: int, group: FetchedGroup, suffix: str) -> tuple[Any, ...]:
    """``suffix``: kio names the structs of multi-group versions in the plural."""
    new = response_factory(9, version)
    return tuple(
        new(
            f"OffsetFetchResponseTopic{suffix}",
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=tuple(
                new(
                    f"OffsetFetchResponsePartition{suffix}", partition_index=row.partition, committed_offset=row.offset,
                    committed_leader_epoch=row.leader_epoch, metadata=row.metadata, error_code=ErrorCode(row.error),
                )
                for row in topic.rows
            ),
        )
        for topic in group.topics
    )  # fmt: skip
