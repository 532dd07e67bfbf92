"""The controller: ends the sessions of dead processes and gives every partition a live owner. Runs on the quorum's leader.

No I/O: changes, renewals and ticks in, at most one command in flight. One command ends all expired sessions and reassigns the
partitions of their brokers, up to a bound; the next one continues. It requires every partition to be unchanged and every new
owner's session to be alive, so after a race it fails as a whole and is planned again.

Live owners are asked to hand partitions over (``handovers.py``) when a broker leaves or load is uneven.

Always: a partition's epoch rises whenever its owner, or its owner's session, changes. The controller keeps no state that a new
leader would need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from stratalog_metadata.controller.assignment import assign
from stratalog_metadata.controller.handovers import BalanceRules, Handovers
from stratalog_metadata.controller.leases import LeaseTable
from stratalog_metadata.controller.load_history import LoadHistory
from stratalog_metadata.records import Broker, DrainedBroker, Partition, Session, broker_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, ExpireSession, Put, Requirement, SessionAlive, Update, VersionIs
from stratalog_metadata.state.record_map import RecordMap

TICK_S: Final = 0.1
MOVED_AT_ONCE_MAX: Final = 50_000
"""Maximum of partitions that one command gives other owners: about 12 MB. An entry beyond the size of a frame could never be
sent to the followers, and nothing after it would be committed.
"""
NO_RULES: Final = BalanceRules(interval_s=0)


class Controller:
    """Pass it every change that is applied while this node leads; ``decide`` returns the command to propose."""

    def __init__(self, records: RecordMap, now: float, rules: BalanceRules = NO_RULES) -> None:
        sessions = [stored.record for stored in records.of_kind("session")]
        self._records = records
        self._leases = LeaseTable(
            ((s.session_id, s.lease_ms / 1000, s.grace_ms / 1000) for s in sessions if isinstance(s, Session)), now
        )
        self._partitions_changed = True
        self._deciding = False
        self.loads = LoadHistory()
        self._handovers = Handovers(records, rules, self.loads, now)

    def observe(self, changes: Iterable[Change], now: float) -> None:
        """Record applied changes."""
        for change in changes:
            before = change.before.record if change.before is not None else None
            after = change.after.record if change.after is not None else None
            if isinstance(after, Session):
                self._leases.opened(after.session_id, after.lease_ms / 1000, now, after.grace_ms / 1000)
            elif isinstance(before, Session):
                self._leases.ended(before.session_id)
            elif isinstance(after, Partition):
                self._partitions_changed = self._partitions_changed or not self._is_served(after)
                self._handovers.partition_changed(after, now)
            elif isinstance(before, Partition):
                self._handovers.partition_gone(change.key)
            elif isinstance(before, Broker | DrainedBroker) or isinstance(after, Broker | DrainedBroker):
                self._brokers_changed(before, after, now)

    def _is_served(self, partition: Partition) -> bool:
        """Whether the partition's owner lives; then not all partitions have to be examined."""
        stored = self._records.get(broker_key(partition.owner))
        owner = stored.record if stored is not None else None
        return isinstance(owner, Broker) and partition.owner_session in (0, owner.session_id)

    def _brokers_changed(self, before: object, after: object, now: float) -> None:
        self._partitions_changed = True
        self._handovers.brokers_changed(now)
        if isinstance(before, Broker) and after is None:
            self.loads.forget(before.broker_id)

    def renew(self, session_ids: Sequence[int], now: float, carrier: object = None) -> list[int]:
        """Renew sessions and return those that are alive. ``carrier`` is the connection of the renewal."""
        return [session_id for session_id in session_ids if self._leases.renew(session_id, now, carrier)]

    def carrier_lost(self, carrier: object, now: float) -> list[int]:
        """Record a lost connection. Returns the sessions that are suspect because of it."""
        return self._leases.carrier_lost(carrier, now)

    def next_deadline(self) -> float:
        return self._leases.next_deadline()

    def decide(self, now: float) -> Command | None:
        """The command to propose now, or None. Call ``decided`` before the next call."""
        expired = self._leases.tick(now)
        if self._deciding:
            return None
        command = None
        if expired or self._partitions_changed:
            self._partitions_changed = False
            command = self._plan(expired)
        if command is None:
            command = self._handovers.plan(now)
        self._deciding = command is not None
        return command

    def decided(self, *, succeeded: bool) -> None:
        """Record the outcome of the last command. After a failure it is planned again."""
        self._deciding = False
        if not succeeded:
            self._partitions_changed = True
            self._handovers.refused()

    def _plan(self, expired: frozenset[int]) -> Command | None:
        updates: list[Update] = [ExpireSession(session_id=session_id) for session_id in sorted(expired)]
        live = self._live_brokers(expired)
        partitions = {s.record.key(): s for s in self._records.of_kind("partition") if isinstance(s.record, Partition)}
        moved = assign(
            [stored.record for stored in partitions.values() if isinstance(stored.record, Partition)],
            live,
            leaving=self._handovers.leaving(),
            preferred=self._handovers.preferred_owners(),
        )
        self._partitions_changed = len(moved) > MOVED_AT_ONCE_MAX
        del moved[MOVED_AT_ONCE_MAX:]
        updates.extend(Put(record=partition) for partition in moved)
        requirements: list[Requirement] = [
            VersionIs(key=key, version=partitions[key].version) for key in (partition.key() for partition in moved)
        ]
        chosen = {partition.owner_session for partition in moved} - {0}
        requirements.extend(SessionAlive(session_id=session_id) for session_id in sorted(chosen))
        return Command(updates=tuple(updates), requirements=tuple(requirements)) if updates else None

    def _live_brokers(self, expired: frozenset[int]) -> dict[int, int]:
        """Sessions of live brokers by broker id."""
        brokers = [stored.record for stored in self._records.of_kind("broker")]
        return {b.broker_id: b.session_id for b in brokers if isinstance(b, Broker) and b.session_id not in expired}
