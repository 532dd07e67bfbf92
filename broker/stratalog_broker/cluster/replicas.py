"""A partition's replicas as reported to Kafka clients. They are derived, because copies are on bookies, not on brokers.

A partition has as many replicas as its topic has copies, or as there are brokers if those are fewer: its owner and further
brokers, in the order of an explicit assignment if there is one. The owner is in sync, and one more broker for each further live
copy of the newest hot ledger; all live ones if everything is in the object store or nothing was written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import islice
from uuid import UUID

from stratalog_broker.protocol.metadata import PartitionState
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.records import (
    NO_OWNER,
    Bookie,
    Broker,
    Ledger,
    Log,
    Partition,
    Topic,
    ledger_key,
    log_key,
    partition_key,
)

_Lists = tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Leader, replicas, in-sync replicas, offline replicas."""


class Replicas:
    """A snapshot of a view's brokers and bookies; create one per response. It caches lists: most partitions share a few."""

    def __init__(self, view: MetadataView) -> None:
        self._view = view
        self._brokers = sorted(broker.broker_id for broker in view.all(Broker))
        self._bookies = {bookie.bookie_id: bookie for bookie in view.all(Bookie) if bookie.session_id}
        self._lists = cache(self._lists_of)

    def of(self, topic: Topic, index: int) -> PartitionState:
        """Return the state of one partition of a topic."""
        partition = self._view.find(Partition, partition_key(topic.topic_id, index))
        if partition is None:
            return PartitionState(NO_OWNER, -1)
        copies = topic.replication_factor
        newest = newest_ledger(self._view, topic.topic_id, index)
        live_copies = copies if newest is None else self._live_copies(newest)
        leader, *lists = self._lists(partition.owner, partition.replicas, copies, live_copies)
        return PartitionState(leader, partition.leader_epoch, *lists)

    def _live_copies(self, ledger: Ledger) -> int:
        """Return the live copies of the last fragment; for striped entries, the fewest that one of them may have."""
        live = ledger.write_quorum
        for name in ledger.fragments[-1].bookies:
            bookie = self._bookies.get(name)
            if bookie is None or bookie.has_failed_for(ledger.ledger_id):
                live -= 1
        return live

    def _lists_of(self, owner: int, assigned: tuple[int, ...], copies: int, live_copies: int) -> _Lists:
        replicas = replicas_of(owner, assigned, self._brokers, copies)
        offline = tuple(replica for replica in replicas if replica not in self._brokers)
        if owner not in self._brokers:
            return NO_OWNER, replicas, (), offline
        others = [replica for replica in replicas if replica != owner and replica not in offline]
        synced = {owner, *others[: max(live_copies - 1, 0)]}
        return owner, replicas, tuple(replica for replica in replicas if replica in synced), offline


def replicas_of(owner: int, assigned: Sequence[int], brokers: Sequence[int], copies: int) -> tuple[int, ...]:
    """Return the replicas, the owner always among them: in the order of the assignment, or else the owner first.

    ``brokers`` are the live ones, sorted by id. Those with the next higher ids follow the owner, which spreads them evenly.
    """
    first = bisect_right(brokers, owner)
    others = (*brokers[first:], *brokers[:first])
    named = (owner,) if owner != NO_OWNER else ()
    if owner in assigned[:copies]:
        named = ()
    return tuple(islice(dict.fromkeys((*named, *assigned, *others)), copies))


def newest_ledger(view: MetadataView, topic_id: UUID, index: int) -> Ledger | None:
    """Return the last of the partition ledgers; None if all data is cold or nothing was ever written."""
    log = view.find(Log, log_key(topic_id, index))
    return view.find(Ledger, ledger_key(log.ledgers[-1].ledger_id)) if log is not None and log.ledgers else None
