"""The changes of the last commands, encoded once for all watchers: a bounded ring.

Always: it has either all changes after an index or reports that it does not (``too_old``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

from stratalog_metadata.protocol.messages import KeyChange, WatchAnswerParts
from stratalog_metadata.state.changes import Change

ANSWER_BYTES_MAX: Final = 8 * 1024 * 1024
_encoder = msgspec.msgpack.Encoder()


class RecentChanges:
    """Covers the commands after ``floor``, up to ``index``."""

    def __init__(self, index: int, entries_max: int, bytes_max: int) -> None:
        self.floor = index
        self.index = index
        self._entries: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._entries_max = entries_max
        self._bytes_max = bytes_max

    def add(self, index: int, changes: Sequence[Change]) -> None:
        """Append the changes of the command at ``index``."""
        self.index = index
        if not changes:
            return
        encoded = _encoder.encode([KeyChange(change.key, change.after) for change in changes])
        self._entries.append((index, encoded))
        self._bytes += len(encoded)
        while len(self._entries) > self._entries_max or self._bytes > self._bytes_max:
            self.floor, dropped = self._entries.popleft()
            self._bytes -= len(dropped)

    def restart(self, index: int) -> None:
        """Start again after a snapshot at ``index``."""
        self.floor = self.index = index
        self._entries.clear()
        self._bytes = 0

    def is_recent(self, index: int) -> bool:
        """Whether the changes after ``index`` take less than half of the bounds, so that a client has time to follow."""
        if index < self.floor:
            return False
        sizes = [len(encoded) for _, encoded in self._after(index)]
        return 2 * len(sizes) < self._entries_max and 2 * sum(sizes) < self._bytes_max

    def since(self, index: int) -> WatchAnswerParts:
        """Changes after ``index``, limited in size."""
        if index < self.floor:
            return WatchAnswerParts(index=self.index, too_old=True)
        changes: list[msgspec.Raw] = []
        total = 0
        for at, encoded in self._after(index):
            total += len(encoded)
            if total > ANSWER_BYTES_MAX and changes:
                return WatchAnswerParts(index=at - 1, changes=changes)
            changes.append(msgspec.Raw(encoded))
        return WatchAnswerParts(index=self.index, changes=changes)

    def _after(self, index: int) -> list[tuple[int, bytes]]:
        newest_first = []
        for entry in reversed(self._entries):
            if entry[0] <= index:
                break
            newest_first.append(entry)
        newest_first.reverse()
        return newest_first
