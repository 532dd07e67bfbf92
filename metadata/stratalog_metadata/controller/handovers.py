"""Orders to hand partitions over to other live brokers: which, how many at once, and when they are withdrawn.

No I/O. An order is ``Partition.next_owner``; the owner carries it out (it seals its ledger and writes the new owner), so no
partition is taken from a live owner. Orders for leaving brokers (stopping or drained) are given at once, up to a bound. Orders
for balance are given in rounds, a few at a time, after a quiet interval. An order that is not carried out in time, or whose
target has gone, is withdrawn.

Its state beyond the records (order times, recent moves, load reports) may be lost with the leader.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

import msgspec

from stratalog_metadata.controller.balance import NOTHING_MOVED, Place, Placed, plan_moves
from stratalog_metadata.controller.load_history import LoadHistory
from stratalog_metadata.records import (
    NO_OWNER,
    TOPIC_DEFAULTS_KEY,
    Broker,
    DrainedBroker,
    DynamicConfig,
    Partition,
    Topic,
    Versioned,
    configs_in_force,
)
from stratalog_metadata.state.commands import Command, Put, Requirement, SessionAlive, Update, VersionIs
from stratalog_metadata.state.record_map import RecordMap

AT_ONCE_MAX: Final = 1000
"""Maximum of open orders: owners carry out some at a time, and planning more examines all partitions."""
OVERDUE_S: Final = 10.0
SETTLED_S: Final = 120.0
"""Seconds before a partition that was moved for balance may be moved for balance again."""
PREFERRED_RACK: Final = "preferred.leader.rack"
"""Topic config: brokers in this rack own the topic's partitions while any of them lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceRules:
    """Seconds between rounds, and of quiet after brokers come or go (``interval_s``, 0: never); ``moves_max`` per round."""

    interval_s: float = 10.0
    moves_max: int = 20
    preferred_rack: str = ""


class Handovers:
    """Tracks partitions and brokers for the controller; ``plan`` returns the next command, if any."""

    def __init__(self, records: RecordMap, rules: BalanceRules, loads: LoadHistory, now: float) -> None:
        self._records = records
        self._rules = rules
        self._loads = loads
        self._ordered: dict[str, float] = {}
        self._balanced: dict[str, float] = {}
        self._last_round = NOTHING_MOVED
        self._is_due = True
        self._round_at = now + rules.interval_s
        for stored in records.of_kind("partition"):
            self.partition_changed(stored.record, now)

    # --- what has happened -------------------------------------------------------------------------------------------

    def partition_changed(self, record: object, now: float) -> None:
        if isinstance(record, Partition):
            self._is_due = True
            if record.next_owner == NO_OWNER:
                self._ordered.pop(record.key(), None)
            else:
                self._ordered.setdefault(record.key(), now)

    def partition_gone(self, key: str) -> None:
        self._ordered.pop(key, None)
        self._balanced.pop(key, None)

    def brokers_changed(self, now: float) -> None:
        """Record that a broker came, left, or changed whether it is leaving: balance waits for a quiet interval."""
        self._is_due = True
        self._round_at = now + self._rules.interval_s

    def refused(self) -> None:
        """Record that the last command had no effect."""
        self._is_due = True

    # --- what to do --------------------------------------------------------------------------------------------------

    def plan(self, now: float) -> Command | None:
        is_round = self._rules.interval_s > 0 and now >= self._round_at
        overdue = [key for key, since in self._ordered.items() if now - since >= OVERDUE_S]
        if not (self._is_due or is_round or overdue):
            return None
        self._is_due = False
        if is_round:
            self._round_at = now + self._rules.interval_s
        brokers = self._brokers()
        withdrawn = self._withdrawals(brokers, frozenset(overdue))
        return withdrawn or self._orders(brokers, now, is_round=is_round and not self._ordered)

    def leaving(self) -> frozenset[int]:
        """Ids of brokers that get no partitions: drained or stopping."""
        drained = {s.record.broker_id for s in self._records.of_kind("drained_broker") if isinstance(s.record, DrainedBroker)}
        stopping = {b.broker_id for b in self._brokers().values() if b.stopping}
        return frozenset(drained | stopping)

    def preferred_owners(self) -> dict[UUID, list[int]]:
        """Ids of the live brokers in each topic's preferred rack, by topic id."""
        brokers = self._brokers().values()
        racks = self.preferred_racks()
        return {topic_id: [b.broker_id for b in brokers if b.rack == rack] for topic_id, rack in racks.items()}

    def preferred_racks(self) -> dict[UUID, str]:
        """Preferred racks by topic id, without topics that have none."""
        topics = [stored.record for stored in self._records.of_kind("topic") if isinstance(stored.record, Topic)]
        stored = self._records.get(TOPIC_DEFAULTS_KEY)
        defaults = stored.record.configs if stored is not None and isinstance(stored.record, DynamicConfig) else {}
        racks = {
            topic.topic_id: configs_in_force(topic, defaults).get(PREFERRED_RACK, self._rules.preferred_rack)
            for topic in topics
        }
        return {topic_id: rack for topic_id, rack in racks.items() if rack}

    def _brokers(self) -> dict[int, Broker]:
        found = (stored.record for stored in self._records.of_kind("broker"))
        return {broker.broker_id: broker for broker in found if isinstance(broker, Broker)}

    def _withdrawals(self, brokers: Mapping[int, Broker], overdue: frozenset[str]) -> Command | None:
        """Withdraw orders that are overdue, or whose target is dead or leaving."""
        leaving = self.leaving()
        updates, requirements = [], []
        for key in self._ordered:
            stored = self._records.get(key)
            if stored is None or not isinstance(stored.record, Partition):
                continue
            target = stored.record.next_owner
            if key in overdue or target not in brokers or target in leaving:
                updates.append(Put(record=msgspec.structs.replace(stored.record, next_owner=NO_OWNER)))
                requirements.append(VersionIs(key=key, version=stored.version))
        return Command(updates=tuple(updates), requirements=tuple(requirements)) if updates else None

    def _orders(self, brokers: Mapping[int, Broker], now: float, *, is_round: bool) -> Command | None:
        free = AT_ONCE_MAX - len(self._ordered)
        leaving = self.leaving()
        # O(partitions): not after each move.
        if free < AT_ONCE_MAX // 2 or not (is_round or leaving & brokers.keys()):
            return None
        movable = self._movable(brokers)
        self._balanced = {key: at for key, at in self._balanced.items() if now - at < SETTLED_S}
        plan = plan_moves(
            self._placed(movable, now),
            {b.broker_id: Place(rack=b.rack, is_leaving=b.broker_id in leaving) for b in brokers.values()},
            leaving_max=free,
            others_max=min(free, self._rules.moves_max) if is_round else 0,
            before=self._last_round,
        )
        if is_round:
            self._last_round = plan
            self._balanced |= {movable[move.position].record.key(): now for move in plan.moves}
        return _command([(movable[move.position], brokers[move.target]) for move in plan.moves])

    def _movable(self, brokers: Mapping[int, Broker]) -> list[Versioned]:
        """Partitions with a live owner and without an open order."""
        found = []
        for stored in self._records.of_kind("partition"):
            partition = stored.record
            assert isinstance(partition, Partition)
            owner = brokers.get(partition.owner)
            if owner is not None and partition.owner_session == owner.session_id and partition.next_owner == NO_OWNER:
                found.append(stored)
        return found

    def _placed(self, partitions: Iterable[Versioned], now: float) -> list[Placed]:
        records = [stored.record for stored in partitions if isinstance(stored.record, Partition)]
        racks = self.preferred_racks()
        carried = self._loads.rates(records, now)
        return [
            Placed(
                owner=partition.owner,
                rates=rates,
                rack=racks.get(partition.topic_id, ""),
                assigned=partition.replicas,
                may_level=not self._balanced or partition.key() not in self._balanced,
            )
            for partition, rates in zip(records, carried, strict=True)
        ]


def _command(orders: Iterable[tuple[Versioned, Broker]]) -> Command | None:
    updates: list[Update] = []
    requirements: list[Requirement] = []
    sessions = set()
    for stored, target in orders:
        assert isinstance(stored.record, Partition)
        updates.append(Put(record=msgspec.structs.replace(stored.record, next_owner=target.broker_id)))
        requirements.append(VersionIs(key=stored.record.key(), version=stored.version))
        sessions.add(target.session_id)
    requirements.extend(SessionAlive(session_id=session_id) for session_id in sorted(sessions))
    return Command(updates=tuple(updates), requirements=tuple(requirements)) if updates else None
