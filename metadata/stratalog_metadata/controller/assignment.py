"""Assigns partitions without a live owner to brokers. Pure.

A partition with a live owner stays. The others go one by one to the broker with the fewest partitions, so counts become as
even as possible without moving a partition that works. A broker that returns under a new session keeps its partitions at a new
epoch, up to its fair share. A partition with an explicit assignment goes to the first live broker of it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from uuid import UUID

import msgspec

from stratalog_metadata.records import NO_OWNER, Partition


def assign(
    partitions: Sequence[Partition],
    live: Mapping[int, int],
    *,
    leaving: Collection[int] = (),
    preferred: Mapping[UUID, Collection[int]] = MappingProxyType({}),
) -> list[Partition]:
    """The records to change. ``live`` maps broker ids to their sessions.

    ``leaving`` brokers get nothing while there are others. ``preferred`` maps topic ids to the brokers that are tried first.
    """
    if not live:
        return [_owned(partition, NO_OWNER, 0) for partition in partitions if _is_orphaned(partition)]
    unassigned = [partition for partition in partitions if not _has_live_owner(partition, live)]
    if not unassigned:
        return []
    counts = Counter(dict.fromkeys(live, 0))
    counts.update(partition.owner for partition in partitions if _has_live_owner(partition, live))
    takers = {broker_id: session_id for broker_id, session_id in live.items() if broker_id not in leaving} or live
    fair_share = -(-len(partitions) // len(takers))
    moved, rest = [], []
    for partition in unassigned:
        wanted = [broker_id for broker_id in preferred.get(partition.topic_id, ()) if broker_id in takers]
        if partition.owner in takers and counts[partition.owner] < fair_share:
            wanted = [partition.owner]
        assigned = next((broker_id for broker_id in partition.replicas if broker_id in takers), None)
        if assigned is not None:
            wanted = [assigned]
        if wanted:
            chosen = min(wanted, key=lambda broker_id: (counts[broker_id], broker_id))
            counts[chosen] += 1
            moved.append(_owned(partition, chosen, takers[chosen]))
        else:
            rest.append(partition)
    moved.extend(_spread(rest, counts, takers))
    return moved


def _spread(partitions: Sequence[Partition], counts: Mapping[int, int], live: Mapping[int, int]) -> list[Partition]:
    loads = [(counts[broker_id], broker_id) for broker_id in sorted(live)]
    heapq.heapify(loads)
    moved = []
    for partition in partitions:
        load, broker_id = loads[0]
        heapq.heapreplace(loads, (load + 1, broker_id))
        moved.append(_owned(partition, broker_id, live[broker_id]))
    return moved


def _has_live_owner(partition: Partition, live: Mapping[int, int]) -> bool:
    """Whether the owner lives. An owner that was written by hand (session 0) counts while its broker lives."""
    session_id = live.get(partition.owner)
    return session_id is not None and partition.owner_session in (0, session_id)


def _is_orphaned(partition: Partition) -> bool:
    """Whether the partition has an owner from the controller, who must be fenced while no broker lives."""
    return partition.owner != NO_OWNER and partition.owner_session != 0


def _owned(partition: Partition, owner: int, session_id: int) -> Partition:
    return msgspec.structs.replace(
        partition,
        owner=owner,
        leader_epoch=partition.leader_epoch + 1,
        owner_session=session_id,
        next_owner=NO_OWNER,
        handed=b"",
        reassigned_from=None,
    )
