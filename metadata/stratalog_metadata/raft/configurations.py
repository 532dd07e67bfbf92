"""The configurations in one node's log. The last one is in force, committed or not.

Always: they are in the order of the log; the first one is in force at the log's base; truncating the log drops the
configurations of the removed entries (Ongaro's dissertation, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stratalog_core.errors import Invalid
from stratalog_metadata.raft.membership import Membership, decode_members
from stratalog_metadata.raft.messages import Entry, EntryKind


class Configurations:
    """Starts with ``base``, in force since ``base_index``, and the configurations in ``entries``."""

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
        """The configuration in force at ``index``, which is at least the log's base."""
        return self.found_at(index)[1]

    def found_at(self, index: int) -> tuple[int, Membership]:
        """Index from which on the configuration that is in force at ``index`` is in force, and the configuration."""
        return next(known for known in reversed(self._history) if known[0] <= index)

    def let_campaign(self, node_id: int, identity: str, commit: int) -> bool:
        """Whether this node votes in the last committed configuration, or in a later one that may still be committed.

        A node that is being removed may hold the only copy of the entry that removes it, so it must be able to lead
        (dissertation, section 4.2.2).
        """
        first = max((position for position, (index, _) in enumerate(self._history) if index <= commit), default=0)
        known = (membership.find(node_id) for _, membership in self._history[first:])
        return any(own is not None and own.voter and own.identity == identity for own in known)

    def check(self, kept: int, entries: Sequence[Entry]) -> None:
        """Raises ``Invalid`` if a configuration in ``entries``, appended after index ``kept``, is malformed or changes two
        voters at once.
        """
        known = [membership for index, membership in self._history[1:] if index <= kept]
        new = [decode_members(entry.payload) for entry in entries if entry.kind is EntryKind.MEMBERS]
        for earlier, later in pairwise([*known, *new]):
            if not later.follows(earlier):
                raise Invalid(f"voters {sorted(earlier.voters)} cannot become {sorted(later.voters)} at once")

    def appended(self, entries: Sequence[Entry]) -> bool:
        """Record appended entries. Returns whether the configuration has changed."""
        found = [(entry.index, decode_members(entry.payload)) for entry in entries if entry.kind is EntryKind.MEMBERS]
        if found:
            self._history.extend(found)
            self._is_validated = False
        return bool(found)

    def truncated_after(self, index: int) -> bool:
        """Record that entries after ``index`` were removed. Returns whether the configuration has changed."""
        before = len(self._history)
        self._is_validated = False
        self._history = [self._history[0], *(known for known in self._history[1:] if known[0] <= index)]
        return len(self._history) != before

    def compacted(self, index: int) -> None:
        """Record that entries up to ``index`` were compacted away; their effect remains."""
        self._is_validated = False
        while len(self._history) > 1 and self._history[1][0] <= index:
            del self._history[0]

    def restored(self, index: int, membership: Membership | None) -> None:
        """Record that a snapshot replaced the log. None: its leader runs a version that cannot change members."""
        self._is_validated = False
        self._history = [(index, membership or self._history[0][1])]

    def validate_state(self, last_index: int) -> None:
        assert self.current_index <= last_index
        if self._is_validated:
            return
        indexes = [index for index, _ in self._history]
        assert indexes == sorted(set(indexes))
        # On a node that joined and is still receiving the log from its start, the first one may be later than the others.
        assert all(later.follows(earlier) for (_, earlier), (_, later) in pairwise(self._history[1:])), "two voters at once"
        self._is_validated = True
