"""Replays the Raft log's segments after a restart, and tells a torn tail from corruption.

Pure: content in, entries out. A record may replace earlier ones by repeating their index with another term. It is usually a
later term; but a leader may also bring back an old entry of its own where a leader in between left one that was never
committed (figure 8 of the Raft paper). If both reach a node in one turn, the record of the entry in between is never written:
the same entry then follows itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stratalog_core.errors import Corrupt
from stratalog_metadata.raft.tail import LogTail
from stratalog_metadata.storage import raft_log_format as log_format
from stratalog_metadata.storage.identity import REPLACE
from stratalog_metadata.storage.raft_log_format import StoredEntry


@dataclass(slots=True)
class RecoveredSegment:
    """``end`` is the end of its last complete record; ``highest`` the largest index that it ever held."""

    end: int
    highest: int
    reset: bool


@dataclass(slots=True)
class LogReplay:
    """Pass it the segments from the oldest to the newest; ``tail`` is the log so far."""

    tail: LogTail = field(default_factory=LogTail)
    _begun: bool = False

    def replay(self, name: str, content: bytes, *, newest: bool) -> RecoveredSegment | None:
        """Replay a segment. None if it is the newest and its creation was interrupted. Raises ``Corrupt``."""
        view = memoryview(content)
        header = log_format.unpack_segment(view)
        if header is None:
            if newest and not log_format.was_durable(content, 0):
                return None
            raise Corrupt(f"{name}: the header of this raft log segment is damaged")
        if header.reset or not self._begun:
            self.tail = LogTail(header.base_index, header.base_term)
        elif (header.base_index, header.base_term) != (self.tail.last_index, self.tail.last_term):
            raise Corrupt(f"{name}: begins after {header.base_index}, but the segment before ends at {self.tail.last_index}")
        self._begun = True
        return self._replay_records(name, content, header, newest)

    def _replay_records(self, name: str, content: bytes, header: log_format.SegmentHeader, newest: bool) -> RecoveredSegment:
        view = memoryview(content)
        segment = RecoveredSegment(log_format.SEGMENT_HEADER_BYTES, header.base_index, header.reset)
        while segment.end < len(content):
            stored = log_format.unpack_record(view, segment.end)
            if stored is None:
                if not newest or log_format.was_durable(content, segment.end):
                    raise Corrupt(f"{name}: the record at byte {segment.end} was durable once and is damaged")
                if not log_format.is_torn(view, segment.end):
                    raise Corrupt(
                        f"{name}: the record at byte {segment.end} is damaged, and not by a write that was cut off: this node"
                        f" may have acknowledged it. Restore the directory as it was last, or replace the node: {REPLACE}"
                    )
                break
            self._take(name, segment.end, stored)
            segment.end += stored.record_bytes
            segment.highest = max(segment.highest, stored.entry.index)
        return segment

    def _take(self, name: str, position: int, stored: StoredEntry) -> None:
        entry, tail = stored.entry, self.tail
        if entry.index < 1 or entry.term < stored.previous_term:
            raise Corrupt(f"{name}: the record at byte {position} has index {entry.index}, term {entry.term}")
        if entry.index <= tail.base_index:
            # The entries that it replaces were compacted away with an older segment, or start this one.
            self.tail = LogTail(entry.index - 1, stored.previous_term, [entry])
            return
        if entry.index <= tail.last_index:
            if tail.term_at(entry.index) == entry.term and tail.between(entry.index, entry.index) != (entry,):
                raise Corrupt(f"{name}: the record at byte {position} repeats entry {entry.index} of term {entry.term}")
            tail.truncate_after(entry.index - 1)
        if entry.index != tail.last_index + 1 or stored.previous_term != tail.last_term or entry.term < tail.last_term:
            raise Corrupt(f"{name}: the record at byte {position} does not follow entry {tail.last_index}")
        tail.extend([entry])
