"""Which live broker owns which partition: pure.

Partitions with a live owner stay where they are. The others go to the broker with the fewest, one after the other, so that
counts end up as even as they can without moving anything that works. A broker that came back under a new session keeps
what it owned, at a new epoch, as far as its fair share goes. A partition with an explicit assignment goes to the first broker
of it that lives.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from uuid import UUID

import msgspec

from stratalog_core.ids import NO_OWNER
from stratalog_metadata.records import Partition


def assign(
    partitions: Sequence[Partition],
    live: Mapping[int, int],
    *,
    leaving: Collection[int] = (),
    preferred: Mapping[UUID, Collection[int]] = MappingProxyType({}),
) -> list[Partition]:
    """The records that change. ``live`` maps broker ids to their sessions.

    ``leaving`` brokers are given nothing as long as there are others; those that a topic id's ``preferred`` names come first.
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
    """Written by hand (session 0), the owner counts as long as it lives."""
    session_id = live.get(partition.owner)
    return session_id is not None and partition.owner_session in (0, session_id)


def _is_orphaned(partition: Partition) -> bool:
    """While no broker lives: whether the controller gave it an owner, who must be fenced."""
    return partition.owner != NO_OWNER and partition.owner_session != 0


def _owned(partition: Partition, owner: int, session_id: int) -> Partition:
    return msgspec.structs.replace(
        partition,
        owner=owner,
        leader_epoch=partition.leader_epoch + 1,
        owner_session=session_id,
        next_owner=NO_OWNER,
        handed=b"",
    )
