"""The state machine: ``apply`` says what a command does to the records, and does nothing itself.

Pure and deterministic: the same records, index and command give the same outcome on every node. Requirements are checked
against the records before the command; a command takes effect whole or not at all. Every record that it writes gets
the command's index as its version.

Beyond the requirements that a command brings, these always hold: a record that names a session names a live one; a
session begins and ends only by ``OpenSession`` and ``ExpireSession``; a counter never falls or goes; a cluster keeps its id;
the counter of ledger ids is greater than the greatest id that any bookie has reported, and a new ledger's id is at least the
counter's ``lost_below``. The last two hold after a restore from an old copy, too, as soon as the bookies have registered.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stratalog_core.errors import Conflict, Invalid, SessionExpired, StaleEpoch, StratalogError
from stratalog_metadata.records import (
    CLUSTER_KEY,
    LEDGER_IDS,
    QUORUM_KEY,
    SESSION_IDS,
    Bookie,
    Broker,
    Cluster,
    Counter,
    Lease,
    Ledger,
    Partition,
    Quorum,
    Record,
    Session,
    TieringWorker,
    Versioned,
    counter_key,
    session_key,
)
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import (
    Allocate,
    Applied,
    Command,
    Delete,
    EpochIs,
    ExpireSession,
    OpenSession,
    Put,
    Requirement,
    SessionAlive,
    Update,
    VersionIs,
)
from stratalog_metadata.state.record_map import RecordMap

SESSION_KINDS = ("bookie", "broker", "lease", "tiering_worker")
"""Kinds of records that live with a session."""
LEASE_MS_MIN = 100
LEASE_MS_MAX = 3_600_000
ALLOCATE_MAX = 1_000_000
COUNTER_MAX = 2**63 - 1
LEADER_EPOCH_MAX = 2**31 - 1
"""The greatest epoch that Kafka's protocol can carry."""
COMMAND_UPDATES_MAX = 200_000
LOST_LEDGER_IDS_MAX = 2**40
"""A bookie that reports an id further beyond the counter is not believed: it would use up the counter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``result`` is the answer to the proposer; ``changes`` are to be installed (none after an error)."""

    result: Applied | StratalogError
    changes: tuple[Change, ...] = ()


def apply(records: RecordMap, index: int, command: Command) -> Outcome:
    """The outcome of the command at ``index`` on ``records``, which are not changed."""
    try:
        for requirement in command.requirements:
            _check(records, requirement)
        work = _Work(records, index)
        for update in command.updates:
            work.carry_out(update)
    except StratalogError as refused:
        return Outcome(result=refused)
    return Outcome(result=Applied(index=index, allocated=tuple(work.allocated)), changes=work.changes())


def _check(records: RecordMap, requirement: Requirement) -> None:
    match requirement:
        case VersionIs():
            _check_version(records, requirement)
        case EpochIs():
            _check_epoch(records, requirement)
        case SessionAlive():
            if records.get(session_key(requirement.session_id)) is None:
                raise _expired(requirement.session_id)


def _check_version(records: RecordMap, requirement: VersionIs) -> None:
    found = records.get(requirement.key)
    version = 0 if found is None else found.version
    if version != requirement.version:
        raise Conflict(
            f"{requirement.key} is at version {version}, not {requirement.version}",
            key=requirement.key,
            expected=requirement.version,
            found=version,
        )


def _check_epoch(records: RecordMap, requirement: EpochIs) -> None:
    found = records.get(requirement.key)
    partition = found.record if found is not None and isinstance(found.record, Partition) else None
    epoch = (partition.owner, partition.leader_epoch) if partition is not None else (-1, -1)
    if epoch != (requirement.owner, requirement.leader_epoch):
        raise StaleEpoch(
            f"{requirement.key} has owner {epoch[0]} at epoch {epoch[1]},"
            f" not {requirement.owner} at {requirement.leader_epoch}",
            key=requirement.key,
            expected=[requirement.owner, requirement.leader_epoch],
            found=list(epoch),
        )


def _expired(session_id: int) -> SessionExpired:
    return SessionExpired(f"session {session_id} has expired", session_id=session_id)


def _check_cluster(found: Versioned | None, record: Cluster) -> None:
    if found is not None and isinstance(found.record, Cluster) and found.record.cluster_id != record.cluster_id:
        raise Invalid(f"this is cluster {found.record.cluster_id}, which cannot become {record.cluster_id}")


def _check_counter(found: Versioned | None, record: Counter) -> None:
    before = found.record if found is not None and isinstance(found.record, Counter) else Counter(name=record.name)
    if not 0 <= record.next_value <= COUNTER_MAX:
        raise Invalid(f"counter {record.name} cannot be set to {record.next_value}; maximum is {COUNTER_MAX}")
    if before.next_value > record.next_value:
        raise Invalid(f"counter {record.name} is at {before.next_value} and cannot decrease to {record.next_value}")
    if not before.lost_below <= record.lost_below <= record.next_value:
        raise Invalid(
            f"lost_below of counter {record.name} is {record.lost_below};"
            f" allowed are {before.lost_below}..{record.next_value}: it never falls"
        )


def members_changed(records: RecordMap, index: int, quorum: Quorum) -> Outcome:
    """The outcome of the log entry of kind MEMBERS at ``index``."""
    change = Change(QUORUM_KEY, records.get(QUORUM_KEY), Versioned(index, quorum))
    return Outcome(result=Applied(index=index), changes=(change,))


class _Work:
    """A command being applied: an overlay over the records."""

    __slots__ = ("_after", "_index", "_records", "allocated")

    def __init__(self, records: RecordMap, index: int) -> None:
        self._records = records
        self._index = index
        self._after: dict[str, Versioned | None] = {}
        self.allocated: list[int] = []

    def changes(self) -> tuple[Change, ...]:
        befores = ((key, self._records.get(key), after) for key, after in self._after.items())
        return tuple(Change(key, before, after) for key, before, after in befores if before is not after)

    def carry_out(self, update: Update) -> None:
        match update:
            case Put():
                self._put_checked(update.record)
            case Delete():
                self._delete(update.key)
            case Allocate():
                self._allocate(update.counter, update.count, 0)
            case OpenSession():
                self._open_session(update)
            case ExpireSession():
                self._expire_session(update.session_id)

    def _get(self, key: str) -> Versioned | None:
        return self._after[key] if key in self._after else self._records.get(key)

    def _put(self, record: Record) -> None:
        self._after[record.key()] = Versioned(self._index, record)

    def _put_checked(self, record: Record) -> None:
        if isinstance(record, Quorum):
            raise Invalid("the quorum's members cannot be put: use `stratalog metadata add`")
        if isinstance(record, Session):
            raise Invalid("a session cannot be put: propose OpenSession")
        if isinstance(record, Partition) and not -1 <= record.leader_epoch <= LEADER_EPOCH_MAX:
            raise Invalid(f"leader_epoch is {record.leader_epoch}; maximum is {LEADER_EPOCH_MAX}")
        found = self._get(record.key())
        if isinstance(record, Cluster):
            _check_cluster(found, record)
        if isinstance(record, Counter):
            _check_counter(found, record)
        if isinstance(record, Ledger) and found is None:
            self._check_new_ledger(record.ledger_id)
        session_id = _session_of(record)
        if session_id and self._get(session_key(session_id)) is None:
            raise _expired(session_id)
        self._put(record)
        if isinstance(record, Bookie):
            self._skip_lost_ids(record.greatest_ledger_id)

    def _check_new_ledger(self, ledger_id: int) -> None:
        counter = self._ledger_ids()
        if ledger_id < counter.lost_below:
            raise Conflict(
                f"ledger id {ledger_id} may have been used before metadata was restored; minimum is {counter.lost_below}:"
                " allocate another one",
                key=counter.key(),
                expected=counter.lost_below,
                found=ledger_id,
            )

    def _skip_lost_ids(self, greatest: int) -> None:
        """Raise the counter of ledger ids above an id that a bookie knows and that this history has not allocated."""
        counter = self._ledger_ids()
        if counter.next_value <= greatest < min(counter.next_value + LOST_LEDGER_IDS_MAX, COUNTER_MAX):
            self._put(Counter(name=LEDGER_IDS, next_value=greatest + 1, lost_below=greatest + 1))

    def _ledger_ids(self) -> Counter:
        found = self._get(counter_key(LEDGER_IDS))
        return found.record if found is not None and isinstance(found.record, Counter) else Counter(name=LEDGER_IDS)

    def _delete(self, key: str) -> None:
        if key.startswith("session/"):
            raise Invalid("a session cannot be deleted: propose ExpireSession")
        if key == QUORUM_KEY:
            raise Invalid("the quorum's members cannot be deleted: use `stratalog metadata remove`")
        if key == CLUSTER_KEY:
            raise Invalid("a cluster's id cannot be deleted: all its nodes, disks and objects carry it")
        if key.startswith("counter/"):
            raise Invalid(f"{key} cannot be deleted: it would allocate the same numbers again")
        self._after[key] = None

    def _allocate(self, name: str, count: int, first_ever: int) -> int:
        if not 1 <= count <= ALLOCATE_MAX:
            raise Invalid(f"count of {name} is {count}; it must be 1..{ALLOCATE_MAX}")
        found = self._get(counter_key(name))
        counter = found.record if found is not None and isinstance(found.record, Counter) else None
        first = counter.next_value if counter is not None else first_ever
        if first + count > COUNTER_MAX:
            raise Invalid(f"counter {name} is at {first} and has fewer than {count} numbers left")
        self._put(Counter(name=name, next_value=first + count, lost_below=counter.lost_below if counter is not None else 0))
        self.allocated.append(first)
        return first

    def _open_session(self, update: OpenSession) -> None:
        if not LEASE_MS_MIN <= update.lease_ms <= LEASE_MS_MAX:
            raise Invalid(f"lease_ms is {update.lease_ms}; it must be {LEASE_MS_MIN}..{LEASE_MS_MAX}")
        if not 0 <= update.grace_ms <= update.lease_ms:
            raise Invalid(f"grace_ms is {update.grace_ms}; it must be 0..{update.lease_ms}, the lease")
        # Ids start at 1: 0 in a bookie's record means that it has no session.
        session_id = self._allocate(SESSION_IDS, 1, 1)
        session = Session(
            session_id=session_id, holder=update.holder, lease_ms=update.lease_ms, grace_ms=update.grace_ms
        )  # fmt: skip
        self._put(session)

    def _expire_session(self, session_id: int) -> None:
        key = session_key(session_id)
        if self._get(key) is None:
            return
        self._after[key] = None
        for kind in SESSION_KINDS:
            for stored in self._records.of_kind(kind):
                self._end_with_session(stored.record.key(), session_id)
        for touched in [key for key in self._after if key.partition("/")[0] in SESSION_KINDS]:
            self._end_with_session(touched, session_id)

    def _end_with_session(self, key: str, session_id: int) -> None:
        found = self._get(key)
        if found is None or _session_of(found.record) != session_id:
            return
        if isinstance(found.record, Bookie):
            self._put(msgspec.structs.replace(found.record, session_id=0))
        else:
            self._after[key] = None


def _session_of(record: Record) -> int:
    """Id of the session that the record lives with; 0 if there is none."""
    return record.session_id if isinstance(record, Bookie | Broker | Lease | TieringWorker) else 0
