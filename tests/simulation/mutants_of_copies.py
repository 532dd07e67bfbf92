"""Planted faults of how many copies there are and where: placement, ack quorums, changes of the replication factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Final

from stratalog_bookies.audit import plan
from stratalog_bookies.client import placement
from stratalog_bookies.client.placement import Candidate, Spread
from stratalog_broker import topic_configs


def _swap(owner: object, name: str, new: object) -> Any:
    """Put ``new`` in the place of the attribute; returns what was there."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def placement_ignores_hosts() -> None:
    """Ensembles span racks only, so that two copies of an entry may be on one host."""
    spread: Callable[..., list[Candidate]] = placement._spread

    def by_racks(ranked: list[Candidate], members: Collection[Candidate], count: int) -> list[Candidate]:
        chosen = spread(
            [dataclasses.replace(each, host="") for each in ranked],
            [dataclasses.replace(each, host="") for each in members],
            count,
        )
        known = {each.bookie_id: each for each in ranked}
        return [known[each.bookie_id] for each in chosen]

    _swap(placement, "_spread", by_racks)


def auditor_ignores_hosts() -> None:
    """Copies that share a host stay where they are, although another host has room."""
    best: Callable[..., Spread] = placement.best_spread
    spread_of: Callable[..., Spread] = placement.spread_of
    _swap(plan, "best_spread", lambda candidates, size: dataclasses.replace(best(candidates, size), hosts=0))
    _swap(plan, "spread_of", lambda members: dataclasses.replace(spread_of(members), hosts=0))


def acks_all_is_min_insync_replicas() -> None:
    """acks=all waits for ``min.insync.replicas`` copies, of which Kafka's default is one."""
    _swap(topic_configs, "majority", lambda nodes: 1)


IN_LOG: Final = (acks_all_is_min_insync_replicas,)
IN_LOST_DISKS: Final = (placement_ignores_hosts, auditor_ignores_hosts)
