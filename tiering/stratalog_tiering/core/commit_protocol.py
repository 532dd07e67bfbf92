"""The commit of a manifest version as a decision, sans-IO: what an answer, or its absence, allows to be done.

::

    propose ─ applied ───────────────────────────────→ COMMITTED
       │ ├─── Conflict ──────────→ re-read ─┬ ours ──→ COMMITTED    (an earlier attempt of ours had won)
       │ │                                  └ other ─→ LOST         (delete what we wrote, and nothing else)
       │ ├─── OutcomeUnknown ────→ re-read ─┬ ours ──→ COMMITTED
       │ │                                  ├ other version → LOST  (our requirement can never hold again)
       │ │                                  └ unchanged → propose again, at most ``ATTEMPTS_MAX`` times, else UNKNOWN
       │ └─── Unavailable ───────→ propose again, else UNKNOWN
       └───── Fenced ────────────────────────────────→ UNKNOWN      (stop; whoever works next sweeps up)

Proposing again is safe: each proposal requires the pointer's version that the edit started from, so at most one applies.
After UNKNOWN nothing is deleted.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from stratalog_core.errors import Conflict, OutcomeUnknown, StratalogError, Unavailable
from stratalog_metadata.records import ManifestPointer, Versioned
from stratalog_metadata.state.commands import ABSENT

ATTEMPTS_MAX: Final = 5


class Next(Enum):
    """What the shell does next; the last three are final."""

    PROPOSE = "propose"
    READ_POINTER = "read_pointer"
    COMMITTED = "committed"
    LOST = "lost"
    UNKNOWN = "unknown"


class ManifestCommit:
    """One commit under way. ``expected_version`` is the version of the pointer record that the command requires."""

    def __init__(self, object_key: str, expected_version: int) -> None:
        self._object_key = object_key
        self._expected_version = expected_version
        self._attempts = 0
        self._refused = False

    def proposed(self, failure: StratalogError | None) -> Next:
        """The command was applied (None), or proposing it raised."""
        self._attempts += 1
        if failure is None:
            return Next.COMMITTED
        if isinstance(failure, Conflict):
            self._refused = True
            return Next.READ_POINTER
        if isinstance(failure, OutcomeUnknown):
            return Next.READ_POINTER
        if isinstance(failure, Unavailable):
            return self._again()
        return Next.UNKNOWN

    def pointer_read(self, found: Versioned | None) -> Next:
        """A linearizable read of the pointer record."""
        pointer = found.record if found is not None else None
        if isinstance(pointer, ManifestPointer) and pointer.object_key == self._object_key:
            return Next.COMMITTED
        version = found.version if found is not None else ABSENT
        if self._refused or version != self._expected_version:
            return Next.LOST
        return self._again()

    def pointer_not_read(self) -> Next:
        """The read did not answer either."""
        return Next.UNKNOWN

    def _again(self) -> Next:
        return Next.PROPOSE if self._attempts < ATTEMPTS_MAX else Next.UNKNOWN
