"""Assignors: everything is assigned once, to subscribers, balanced, and with few moves."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from stratalog_broker.coordination.groups.core.consumer.assignors import (
    MemberSpec,
    assign_range,
    assign_uniform,
)
from stratalog_broker.coordination.groups.core.consumer.model import Partitions

TOPICS = [UUID(int=number) for number in range(1, 5)]
COUNTS = st.dictionaries(st.sampled_from(TOPICS), st.integers(1, 9), min_size=1)
PARTITIONS = st.frozensets(st.tuples(st.sampled_from(TOPICS), st.integers(0, 9)))
MEMBERS = st.dictionaries(
    st.sampled_from("abcdefg"),
    st.builds(
        MemberSpec, topic_ids=st.frozensets(st.sampled_from(TOPICS)), previous=PARTITIONS,
        instance_id=st.none(),
    ),
    min_size=1,
)  # fmt: skip


def spec(*topic_ids: UUID, previous: Partitions = frozenset(), instance_id: str | None = None) -> MemberSpec:
    return MemberSpec(topic_ids=frozenset(topic_ids), previous=previous, instance_id=instance_id)


def check_complete(members: dict[str, MemberSpec], counts: dict[UUID, int], found: dict[str, Partitions]) -> None:
    assert found.keys() == members.keys()
    given_out = [partition for partitions in found.values() for partition in partitions]
    wanted = {topic_id for each in members.values() for topic_id in each.topic_ids}
    expected = {(topic_id, index) for topic_id in wanted & counts.keys() for index in range(counts[topic_id])}
    assert len(given_out) == len(expected)
    assert set(given_out) == expected
    assert all(topic_id in members[member_id].topic_ids for member_id, of in found.items() for topic_id, _ in of)


@given(MEMBERS, COUNTS)
def test_uniform_assigns_everything_once_and_no_move_improves_the_balance(
    members: dict[str, MemberSpec], counts: dict[UUID, int]
) -> None:
    found = assign_uniform(members, counts)
    check_complete(members, counts, found)
    for partitions in found.values():
        for taker, other in members.items():
            movable = any(topic_id in other.topic_ids for topic_id, _ in partitions)
            assert not movable or len(partitions) - len(found[taker]) <= 1


@given(MEMBERS, COUNTS)
def test_range_assigns_everything_once_in_ranges(members: dict[str, MemberSpec], counts: dict[UUID, int]) -> None:
    found = assign_range(members, counts)
    check_complete(members, counts, found)
    for partitions in found.values():
        for topic_id in {each for each, _ in partitions}:
            indexes = sorted(index for each, index in partitions if each == topic_id)
            assert indexes == list(range(indexes[0], indexes[-1] + 1))


@given(st.integers(1, 12), st.integers(1, 40))
def test_uniform_moves_nothing_that_may_stay(size: int, count: int) -> None:
    topic = TOPICS[0]
    first = assign_uniform({str(number): spec(topic) for number in range(size)}, {topic: count})
    same = {member_id: spec(topic, previous=partitions) for member_id, partitions in first.items()}
    assert assign_uniform(same, {topic: count}) == first
    joined = assign_uniform({**same, "new": spec(topic)}, {topic: count})
    assert all(joined[member_id] <= first[member_id] for member_id in first)
    stayed = {member_id: each for member_id, each in same.items() if member_id != "0"}
    if stayed:
        left = assign_uniform(stayed, {topic: count})
        assert all(first[member_id] <= left[member_id] for member_id in stayed)


def test_range_partitions_topics_alike_and_puts_static_members_first() -> None:
    counts = {TOPICS[0]: 5, TOPICS[1]: 5}
    members = {"a": spec(*TOPICS[:2]), "b": spec(*TOPICS[:2], instance_id="z"), "c": spec(*TOPICS[:2], instance_id="y")}
    found = assign_range(members, counts)
    for topic_id in TOPICS[:2]:
        of_topic = {member_id: sorted(index for each, index in of if each == topic_id) for member_id, of in found.items()}
        assert of_topic == {"c": [0, 1], "b": [2, 3], "a": [4]}


def test_a_partition_that_two_members_had_goes_to_one() -> None:
    both = frozenset({(TOPICS[0], 0)})
    members = {"a": spec(TOPICS[0], previous=both), "b": spec(TOPICS[0], previous=both)}
    check_complete(members, {TOPICS[0]: 2}, assign_uniform(members, {TOPICS[0]: 2}))


def test_nobody_gets_nothing() -> None:
    assert assign_uniform({}, {}) == assign_range({}, {}) == {}
    assert assign_uniform({"a": spec()}, {TOPICS[0]: 3}) == {"a": frozenset()}
