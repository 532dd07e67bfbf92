"""Checks that a command's requirements hold when it takes effect, and that no session ends before its holder's deadline.

Both are checked against the simulation's own records and clocks, not against the state of the code under test: with separate
versions of all records, and on the monotonic clock of the holder's machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from stratalog_metadata.raft import Entry, EntryKind
from stratalog_metadata.records import ManifestPointer, Partition, Session, Versioned, session_key
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command, EpochIs, Requirement, SessionAlive, VersionIs

if TYPE_CHECKING:
    from simulation.world.clock import SimulatedClock
    from simulation.world.loop import Process
    from stratalog_metadata.client.sessions import SessionKeeper
    from stratalog_metadata.state.machine import Outcome

_decode: Final = msgspec.msgpack.Decoder(Command).decode


class PromiseChecker:
    """Called for every command in order, before any other check."""

    def __init__(self, require: Callable[[bool, str], None]) -> None:
        self._require = require
        self._versions: dict[str, int] = {}
        self._partitions: dict[str, tuple[int, int]] = {}
        self._holders: list[tuple[Process, SimulatedClock, SessionKeeper]] = []
        self._broken: set[Process] = set()

    def restored(self, stored: Iterable[Versioned]) -> None:
        """Go on from these records, those of metadata that was restored."""
        self._versions, self._partitions = {}, {}
        for each in stored:
            self._take(Change(each.record.key(), None, each))

    def holds_sessions(self, process: Process, clock: SimulatedClock, keeper: SessionKeeper) -> None:
        """Register the keeper in which this process holds its sessions."""
        self._holders.append((process, clock, keeper))

    def connection_broke(self, process: Process) -> None:
        """Note that a connection of this process broke: sessions with a grace may end early."""
        self._broken.add(process)

    def applied(self, entry: Entry, outcome: Outcome) -> None:
        """Check an entry that the first node has applied."""
        if entry.kind is EntryKind.COMMAND and outcome.changes:
            requirements = _decode(entry.payload).requirements
            for requirement in requirements:
                if not self._holds(requirement):
                    self._require(False, f"command {entry.index} took effect although it requires {requirement}")
            self._check_pointers(entry.index, outcome.changes, requirements)
        for change in outcome.changes:
            self._take(change)

    def _check_pointers(self, index: int, changes: Sequence[Change], requirements: Sequence[Requirement]) -> None:
        """Require that every manifest pointer is set by compare-and-set."""
        compared = {requirement.key for requirement in requirements if isinstance(requirement, VersionIs)}
        for change in changes:
            if change.after is not None and isinstance(change.after.record, ManifestPointer):
                self._require(change.key in compared, f"command {index} set {change.key} without comparing its version")

    def _holds(self, requirement: Requirement) -> bool:
        match requirement:
            case VersionIs(key=key, version=version):
                return self._versions.get(key, 0) == version
            case EpochIs(key=key, owner=owner, leader_epoch=leader_epoch):
                return self._partitions.get(key, (-1, -1)) == (owner, leader_epoch)
            case SessionAlive(session_id=session_id):
                return session_key(session_id) in self._versions

    def _take(self, change: Change) -> None:
        self._versions.pop(change.key, None)
        self._partitions.pop(change.key, None)
        if change.after is not None:
            self._versions[change.key] = change.after.version
            if isinstance(change.after.record, Partition):
                self._partitions[change.key] = change.after.record.owner, change.after.record.leader_epoch
        elif change.before is not None and isinstance(change.before.record, Session):
            self._session_ended(change.before.record)

    def _session_ended(self, session: Session) -> None:
        self._holders = [holder for holder in self._holders if holder[0].alive]
        for process, clock, keeper in self._holders:
            held = keeper._held.get(session.session_id)
            left_s = held.deadline - clock.monotonic() if held is not None else 0.0
            if session.grace_ms and process in self._broken:
                continue
            self._require(left_s <= 0, f"the session of {process.name} ended, and it believes in it for {left_s:.3f} s more")
