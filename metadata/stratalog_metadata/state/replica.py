"""One node's copy of the state machine: the records, the last applied entry, and the changes that are not stored yet.

Always: entries are applied in the order of the log, each once. It does no I/O: the node's shell stores ``unsaved``.
"""

from __future__ import annotations

import msgspec

from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_metadata.raft import Entry, EntryKind
from stratalog_metadata.raft.membership import decode_members
from stratalog_metadata.records import QUORUM_KEY, Quorum, Versioned
from stratalog_metadata.state import machine as state
from stratalog_metadata.state.commands import Command
from stratalog_metadata.state.digest import StateDigest
from stratalog_metadata.state.machine import Outcome
from stratalog_metadata.state.record_map import RecordMap
from stratalog_metadata.state.snapshot import StateImage

_decode = msgspec.msgpack.Decoder(Command)


class Replica:
    """``unsaved`` has the newest state of every key that changed since ``take_unsaved``; ``digest`` covers all records."""

    def __init__(self, image: StateImage) -> None:
        self.index = image.index
        self.term = image.term
        self.records = RecordMap(image.records)
        self.digest = StateDigest(image.records)
        self.unsaved: dict[str, Versioned | None] = {}

    def apply(self, entry: Entry) -> Outcome | None:
        """Apply the next committed entry. None if it has no effect. Raises ``Corrupt`` if this version cannot decode it."""
        assert entry.index == self.index + 1, f"entry {entry.index} after {self.index}"
        outcome = None
        if entry.kind is EntryKind.COMMAND:
            outcome = self._apply_command(entry)
        elif entry.kind is EntryKind.MEMBERS:
            quorum = Quorum(members=decode_members(entry.payload).members)
            outcome = self._install(state.members_changed(self.records, entry.index, quorum))
        self.index, self.term = entry.index, entry.term
        self.digest.passed(entry.index)
        return outcome

    def _apply_command(self, entry: Entry) -> Outcome:
        try:
            command = _decode.decode(entry.payload)
        except MALFORMED as malformed:
            # If this node skipped it, its state would differ from the others'.
            raise Corrupt(f"the committed command at {entry.index} cannot be read by this version: {malformed}") from malformed
        return self._install(state.apply(self.records, entry.index, command))

    def _install(self, outcome: Outcome) -> Outcome:
        self.records.install(outcome.changes)
        self.digest.install(outcome.changes)
        for change in outcome.changes:
            self.unsaved[change.key] = change.after
        return outcome

    def quorum(self) -> tuple[int, Quorum] | None:
        """The last applied configuration and the index of its entry; None before the first."""
        stored = self.records.get(QUORUM_KEY)
        return (stored.version, stored.record) if stored is not None and isinstance(stored.record, Quorum) else None

    def take_unsaved(self) -> dict[str, Versioned | None]:
        taken, self.unsaved = self.unsaved, {}
        return taken

    def image(self) -> StateImage:
        return StateImage(index=self.index, term=self.term, records=list(self.records))

    def restore(self, image: StateImage) -> None:
        """Replace everything by a snapshot."""
        self.index, self.term = image.index, image.term
        self.records.replace(image.records)
        self.digest.restart(image.records)
        self.unsaved.clear()
