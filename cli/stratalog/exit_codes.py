"""Exit codes of the ``stratalog`` command, and the code of each error.

The code tells a script whether to try again (3), to give up (1, 2, 4, 5) or to inspect the data (6, 7). An outcome that is
unknown has code 3, too: the command may have taken effect.
"""

from __future__ import annotations

from enum import IntEnum

from stratalog_core.errors import (
    Conflict,
    Corrupt,
    Fenced,
    Invalid,
    NotFound,
    OutcomeUnknown,
    Refused,
    Retriable,
    StratalogError,
)


class ExitCode(IntEnum):
    """The numbers never change. 2 is click's code for wrong usage."""

    OK = 0
    FAILED = 1
    """The command failed; the message says what to do."""
    USAGE = 2
    """Invalid arguments or configuration, or an object store that refuses access."""
    UNAVAILABLE = 3
    """A server could not be reached, or did not answer in time; the command may have taken effect all the same."""
    NOT_FOUND = 4
    """The topic, group, process or object does not exist."""
    CONFLICT = 5
    """It already exists, or it was changed concurrently."""
    DAMAGED = 6
    """Stored data does not match its checksums."""
    FINDINGS = 7
    """``tier scrub``, ``tier restore-coordinators`` or ``job audit|erase|compact`` reports problems that it did not repair."""
    INTERRUPTED = 130
    TERMINATED = 143
    """Ended by SIGTERM. A role that SIGTERM stops in an orderly way exits with 0."""


_BY_ERROR: tuple[tuple[type[StratalogError], ExitCode], ...] = (
    (Corrupt, ExitCode.DAMAGED),
    (NotFound, ExitCode.NOT_FOUND),
    (Conflict, ExitCode.CONFLICT),
    (Fenced, ExitCode.CONFLICT),
    (Invalid, ExitCode.USAGE),
    (Refused, ExitCode.USAGE),
    (Retriable, ExitCode.UNAVAILABLE),
    (OutcomeUnknown, ExitCode.UNAVAILABLE),
)


def exit_code_of(error: StratalogError) -> ExitCode:
    """Return the exit code for an error."""
    return next((code for kind, code in _BY_ERROR if isinstance(error, kind)), ExitCode.FAILED)
