"""Exit codes of the ``stratalog`` command, and which failure ends in which.

A script can tell by the code whether to retry (3), to give up (1, 2, 4, 5) or to look at the data (6).
"""

from __future__ import annotations

from enum import IntEnum

from stratalog_core.errors import Conflict, Corrupt, Fenced, Invalid, NotFound, OutcomeUnknown, Retriable, StratalogError


class ExitCode(IntEnum):
    """Permanent numbers; 2 is what click uses for wrong usage."""

    OK = 0
    FAILED = 1
    """The command ran and did not succeed; the message says what to do."""
    USAGE = 2
    """Arguments or configuration are wrong."""
    UNAVAILABLE = 3
    """A server could not be reached or did not answer in time: retry."""
    NOT_FOUND = 4
    """The topic, group, process or object does not exist."""
    CONFLICT = 5
    """It exists already, or somebody else changed it meanwhile."""
    DAMAGED = 6
    """Stored data does not match its checksums."""
    INTERRUPTED = 130


_BY_ERROR: tuple[tuple[type[StratalogError], ExitCode], ...] = (
    (Corrupt, ExitCode.DAMAGED),
    (NotFound, ExitCode.NOT_FOUND),
    (Conflict, ExitCode.CONFLICT),
    (Fenced, ExitCode.CONFLICT),
    (Invalid, ExitCode.USAGE),
    (Retriable, ExitCode.UNAVAILABLE),
    (OutcomeUnknown, ExitCode.UNAVAILABLE),
)


def exit_code_of(error: StratalogError) -> ExitCode:
    """The code that a failure ends in."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)
