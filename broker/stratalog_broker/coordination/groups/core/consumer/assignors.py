"""The assignors of the server: *uniform* balances and is sticky, *range* gives each member neighbouring partitions (KIP-848).

Both are deterministic: they depend on their arguments only. Racks are not taken into account, as in Apache Kafka 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from stratalog_broker.coordination.groups.core.consumer.model import Partition, Partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSpec:
    """A member to which partitions are assigned. ``previous`` is its last target."""

    topic_ids: frozenset[UUID]
    previous: Partitions = frozenset()
    instance_id: str | None = None


Members = Mapping[str, MemberSpec]
PartitionCounts = Mapping[UUID, int]
Assignor = Callable[[Members, PartitionCounts], dict[str, Partitions]]
"""Returns each member's partitions. Every partition of a topic with a subscriber is assigned once."""


def assign_range(members: Members, counts: PartitionCounts) -> dict[str, Partitions]:
    """Give each member a range of each topic, so that topics with the same members and counts are partitioned alike."""
    assigned: dict[str, set[Partition]] = {member_id: set() for member_id in members}
    # Static members come first, in the order of their instance ids: their ranges survive a restart.
    order = sorted(members, key=lambda each: (members[each].instance_id is None, members[each].instance_id or "", each))
    for topic_id, subscribers in _subscribers(members, counts, order).items():
        size, larger = divmod(counts[topic_id], len(subscribers))
        first = 0
        for rank, member_id in enumerate(subscribers):
            end = first + size + (rank < larger)
            assigned[member_id] |= {(topic_id, index) for index in range(first, end)}
            first = end
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


def assign_uniform(members: Members, counts: PartitionCounts) -> dict[str, Partitions]:
    """Balance the number of partitions per member, and move as few as that needs.

    With equal subscriptions the numbers differ by one at most. With others, no single partition can move from a member to one
    that has at least two less.
    """
    assigned, unassigned = _kept(members, counts)
    if len({spec.topic_ids for spec in members.values()}) <= 1:
        _fill_equally(assigned, unassigned)
    else:
        subscribers = _subscribers(members, counts, sorted(members))
        _fill(assigned, unassigned, subscribers)
        moved = True
        while moved:  # each move brings two numbers closer together, so this ends
            moved = sum(_balance(assigned, topic_id, of_topic) for topic_id, of_topic in subscribers.items()) > 0
    return {member_id: frozenset(partitions) for member_id, partitions in assigned.items()}


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_range}
"""By the names under which clients and ``group.consumer.assignors`` choose them."""


def _subscribers(members: Members, counts: PartitionCounts, order: Iterable[str]) -> dict[UUID, list[str]]:
    """Return the members that subscribe to each existing topic; topics with the fewest subscribers come first."""
    found: dict[UUID, list[str]] = {}
    for member_id in order:
        for topic_id in members[member_id].topic_ids & counts.keys():
            found.setdefault(topic_id, []).append(member_id)
    return dict(sorted(found.items(), key=lambda item: (len(item[1]), item[0])))


def _kept(members: Members, counts: PartitionCounts) -> tuple[dict[str, list[Partition]], list[Partition]]:
    """Return what each member may keep, sorted, and the partitions that nobody has."""
    free = {
        (topic_id, index)
        for topic_id in sorted({topic_id for spec in members.values() for topic_id in spec.topic_ids} & counts.keys())
        for index in range(counts[topic_id])
    }
    kept: dict[str, list[Partition]] = {}
    for member_id in sorted(members):
        spec = members[member_id]
        kept[member_id] = sorted(each for each in spec.previous if each in free and each[0] in spec.topic_ids)
        free.difference_update(kept[member_id])
    return kept, sorted(free)


def _fill_equally(assigned: dict[str, list[Partition]], unassigned: list[Partition]) -> None:
    if not assigned:
        return
    total = len(unassigned) + sum(map(len, assigned.values()))
    size, larger = divmod(total, len(assigned))
    # Members that have more than the others keep one of the larger shares, so that fewer partitions move.
    order = sorted(assigned, key=lambda member_id: -len(assigned[member_id]))
    quotas = {member_id: size + (rank < larger) for rank, member_id in enumerate(order)}
    for member_id, quota in quotas.items():
        unassigned += assigned[member_id][quota:]
        del assigned[member_id][quota:]
    unassigned.sort(reverse=True)
    for member_id in sorted(assigned):
        while len(assigned[member_id]) < quotas[member_id]:
            assigned[member_id].append(unassigned.pop())


def _fill(assigned: dict[str, list[Partition]], unassigned: list[Partition], subscribers: dict[UUID, list[str]]) -> None:
    """Give each partition to the subscriber that has the fewest."""
    by_topic: dict[UUID, list[Partition]] = {}
    for partition in unassigned:
        by_topic.setdefault(partition[0], []).append(partition)
    for topic_id, members in subscribers.items():
        heap = [(len(assigned[member_id]), member_id) for member_id in members]
        heapq.heapify(heap)
        for partition in by_topic.get(topic_id, ()):
            count, member_id = heap[0]
            assigned[member_id].append(partition)
            heapq.heapreplace(heap, (count + 1, member_id))


def _balance(assigned: dict[str, list[Partition]], topic_id: UUID, members: list[str]) -> bool:
    """Move partitions of one topic from the members with the most to those with the fewest; return whether one moved."""
    movable = {member_id: [each for each in assigned[member_id] if each[0] == topic_id] for member_id in members}
    fewest = [(len(assigned[member_id]), member_id) for member_id in members]
    most = [(-len(assigned[member_id]), member_id) for member_id in members if movable[member_id]]
    heapq.heapify(fewest)
    heapq.heapify(most)
    moved = False
    while (giver := _top(most, assigned, -1)) is not None and (taker := _top(fewest, assigned, 1)) is not None:
        if len(assigned[giver]) - len(assigned[taker]) <= 1:
            break
        partition = movable[giver].pop()
        assigned[giver].remove(partition)
        assigned[taker].append(partition)
        movable[taker].append(partition)
        moved = True
        for member_id in (giver, taker):
            heapq.heappush(fewest, (len(assigned[member_id]), member_id))
            if movable[member_id]:
                heapq.heappush(most, (-len(assigned[member_id]), member_id))
    return moved


def _top(heap: list[tuple[int, str]], assigned: dict[str, list[Partition]], sign: int) -> str | None:
    """Return the member at the top of a heap, after dropping entries whose number is out of date."""
    while heap and heap[0][0] != sign * len(assigned[heap[0][1]]):
        heapq.heappop(heap)
    return heap[0][1] if heap else None
