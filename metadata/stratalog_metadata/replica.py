"""This node's copy of the state machine: records, where it stands in the log, and what the store does not have yet."""

from __future__ import annotations

import msgspec

from stratalog_core.errors import Corrupt
from stratalog_core.malformed import MALFORMED
from stratalog_metadata import state
from stratalog_metadata.commands import Command
from stratalog_metadata.raft import Entry, EntryKind
from stratalog_metadata.record_map import RecordMap
from stratalog_metadata.records import Versioned
from stratalog_metadata.snapshot import StateImage
from stratalog_metadata.state import Outcome

_decode = msgspec.msgpack.Decoder(Command)


class Replica:
    """``unsaved`` holds the newest state of every key that changed since it was last taken."""

    def __init__(self, image: StateImage) -> None:
        self.index = image.index
        self.term = image.term
        self.records = RecordMap(image.records)
        self.unsaved: dict[str, Versioned | None] = {}

    def apply(self, entry: Entry) -> Outcome | None:
        """Apply the next committed entry; None if it is no command. Raises ``Corrupt`` if it cannot be understood."""
        assert entry.index == self.index + 1, f"entry {entry.index} after {self.index}"
        outcome = self._apply_command(entry) if entry.kind is EntryKind.COMMAND else None
        self.index, self.term = entry.index, entry.term
        return outcome

    def _apply_command(self, entry: Entry) -> Outcome:
        try:
            command = _decode.decode(entry.payload)
        except MALFORMED as malformed:
            # Skipping it would let this node drift from the others: stop instead.
            raise Corrupt(f"the committed command at {entry.index} cannot be read by this version: {malformed}") from malformed
        outcome = state.apply(self.records, entry.index, command)
        self.records.install(outcome.changes)
        for change in outcome.changes:
            self.unsaved[change.key] = change.after
        return outcome

    def take_unsaved(self) -> dict[str, Versioned | None]:
        taken, self.unsaved = self.unsaved, {}
        return taken

    def image(self) -> StateImage:
        return StateImage(index=self.index, term=self.term, records=list(self.records))

    def restore(self, image: StateImage) -> None:
        """A snapshot replaces everything."""
        self.index, self.term = image.index, image.term
        self.records.replace(image.records)
        self.unsaved.clear()
