"""The configurations that one node's log holds: the last one in it is in force, whether it is committed or not.

Always: they stand in the order of the log; the first is in force at the log's base; a truncation takes back what was
truncated (dissertation, 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stratalog_core.errors import Invalid
from stratalog_metadata.raft.membership import Membership, decode_members
from stratalog_metadata.raft.messages import Entry, EntryKind


class Configurations:
    """``base`` is in force since ``base_index``; ``entries`` follow."""

    __slots__ = ("_history", "_is_validated")

    def __init__(self, base_index: int, base: Membership, entries: Sequence[Entry]) -> None:
        self._is_validated = False
        self._history: list[tuple[int, Membership]] = [(base_index, base)]
        self.appended(entries)

    @property
    def current(self) -> Membership:
        return self._history[-1][1]

    @property
    def current_index(self) -> int:
        """Index of the entry that brought the configuration in force; after a snapshot, of the snapshot."""
        return self._history[-1][0]

    def at(self, index: int) -> Membership:
        """What was in force at ``index``, which must not be behind the log's base."""
        return next(membership for since, membership in reversed(self._history) if since <= index)

    def let_campaign(self, node_id: int, identity: str, commit: int) -> bool:
        """Whether this very disk votes in the last committed configuration, or in one that may still become so.

        Who is being removed may hold the only copy of what removes it: it must be able to lead (dissertation, 4.2.2).
        """
        first = max((position for position, (index, _) in enumerate(self._history) if index <= commit), default=0)
        known = (membership.find(node_id) for _, membership in self._history[first:])
        return any(own is not None and own.voter and own.identity == identity for own in known)

    def check(self, kept: int, entries: Sequence[Entry]) -> None:
        """Whether ``entries`` may follow the log up to index ``kept``. Raises ``Invalid``: malformed, or two voters at once."""
        known = [membership for index, membership in self._history[1:] if index <= kept]
        new = [decode_members(entry.payload) for entry in entries if entry.kind is EntryKind.MEMBERS]
        for earlier, later in pairwise([*known, *new]):
            if not later.follows(earlier):
                raise Invalid(f"voters {sorted(earlier.voters)} cannot become {sorted(later.voters)} at once")

    def appended(self, entries: Sequence[Entry]) -> bool:
        """Entries have been appended; says whether the configuration has changed."""
        found = [(entry.index, decode_members(entry.payload)) for entry in entries if entry.kind is EntryKind.MEMBERS]
        if found:
            self._history.extend(found)
            self._is_validated = False
        return bool(found)

    def truncated_after(self, index: int) -> bool:
        """Entries beyond ``index`` are gone; says whether the configuration has changed."""
        before = len(self._history)
        self._is_validated = False
        self._history = [self._history[0], *(known for known in self._history[1:] if known[0] <= index)]
        return len(self._history) != before

    def compacted(self, index: int) -> None:
        """Entries up to ``index`` are gone, but not their effect."""
        self._is_validated = False
        while len(self._history) > 1 and self._history[1][0] <= index:
            del self._history[0]

    def restored(self, index: int, membership: Membership | None) -> None:
        """A snapshot has replaced everything; None: by a leader of a version that could not change its members."""
        self._is_validated = False
        self._history = [(index, membership or self._history[0][1])]

    def validate_state(self, last_index: int) -> None:
        assert self.current_index <= last_index
        if self._is_validated:
            return
        indexes = [index for index, _ in self._history]
        assert indexes == sorted(set(indexes))
        # The first may be later than what follows it, on a node that joined and is still being sent the log from its start.
        assert all(later.follows(earlier) for (_, earlier), (_, later) in pairwise(self._history[1:])), "two voters at once"
        self._is_validated = True
