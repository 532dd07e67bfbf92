"""Planted faults of the number and placement of copies: placement, ack quorums, changes of the replication factor."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Final

from stratalog_bookies.client import LedgerSpec
from stratalog_bookies.client.core import placement
from stratalog_bookies.client.core.placement import Candidate, Spread
from stratalog_bookies.client.ledger_ids import LedgerIds
from stratalog_bookies.repair.core import audit_plan
from stratalog_bookies.repair.core.audit_progress import Progress
from stratalog_broker.cluster.replicas import newest_ledger
from stratalog_broker.partitions.ledger_opening import LedgerOpening
from stratalog_broker.partitions.log import PartitionLog
from stratalog_metadata.records import Topic
from stratalog_metadata.topic_rules import topic_configs


def _swap(owner: object, name: str, new: object) -> Any:
    """Replace the attribute with ``new``; return the old value."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    return old


def placement_ignores_hosts() -> None:
    """Ensembles spread over racks only, so that two copies of an entry may be on one host."""
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
    """Copies that share a host stay there, although another host has room."""
    best: Callable[..., Spread] = placement.best_spread
    spread_of: Callable[..., Spread] = placement.spread_of
    _swap(audit_plan, "best_spread", lambda candidates, size: dataclasses.replace(best(candidates, size), hosts=0))
    _swap(audit_plan, "spread_of", lambda members: dataclasses.replace(spread_of(members), hosts=0))


def placements_are_not_checked_after_a_move() -> None:
    """The auditor never checks the placement of a ledger again that was placed well before one of its copies moved."""
    _swap(Progress, "moved", Progress.completed)


def acks_all_is_min_insync_replicas() -> None:
    """acks=all waits for ``min.insync.replicas`` copies; Kafka's default is one."""
    _swap(topic_configs, "majority", lambda nodes: 1)


def ledgers_keep_the_factor_of_the_one_before() -> None:
    """A partition's next ledger has as many copies as its newest one, whatever its topic now requires."""
    spec_of: Callable[..., LedgerSpec] = LedgerOpening._spec

    def spec(self: LedgerOpening, topic: Topic, base_offset: int) -> LedgerSpec:
        newest = newest_ledger(self._view, self._identity.topic_id, self._identity.partition)
        wanted = spec_of(self, topic, base_offset)
        if newest is None:
            return wanted
        copies = newest.write_quorum
        return dataclasses.replace(wanted, ensemble_size=copies, write_quorum=copies, ack_quorum=newest.ack_quorum)

    _swap(LedgerOpening, "_spec", spec)


def open_ledgers_take_over_a_smaller_ack_quorum() -> None:
    """After its topic's factor was lowered, a ledger is confirmed with fewer copies than its record requires."""
    follow: Callable[..., None] = PartitionLog._follow_quorums

    def follow_quorums(self: PartitionLog) -> None:
        if self._writer is not None:
            self._writer._core._ack_quorum = 1 if self.topic.replication_factor == 2 else self.configs.ack_quorum
        follow(self)

    _swap(PartitionLog, "_follow_quorums", follow_quorums)


IN_LOG: Final = (
    acks_all_is_min_insync_replicas,
    ledgers_keep_the_factor_of_the_one_before,
    open_ledgers_take_over_a_smaller_ack_quorum,
)


def one_block_of_ids_is_enough_for_all_who_wait() -> None:
    """A caller that has waited for a block of ledger ids takes one without looking whether any are left."""

    async def take(self: LedgerIds) -> int:
        if not self._usable():
            await asyncio.shield(self._refilling())
        return self._free.popleft()

    LedgerIds.take = take  # type: ignore[method-assign]


IN_LOST_DISKS: Final = (
    placement_ignores_hosts,
    auditor_ignores_hosts,
    placements_are_not_checked_after_a_move,
    one_block_of_ids_is_enough_for_all_who_wait,
)
