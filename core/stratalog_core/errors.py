"""The error tree that crosses component and process borders, split by what the caller must do.

::

    StratalogError
    ├── Retriable            nothing took effect; ask again, perhaps elsewhere
    │   ├── Unavailable      the peer could not be reached or is not ready
    │   ├── NotLeader        ask the node named in detail["leader"]
    │   ├── Overloaded       a bound was hit (queue, bytes in flight); wait, then ask again
    │   └── NotEnoughBookies too few live bookies for the wanted ensemble or quorum
    ├── OutcomeUnknown       it may or may not have taken effect: re-read before doing anything else
    ├── Conflict             a requirement did not hold; detail says what was expected and found
    ├── Fenced               a newer owner exists: stop acting at once
    │   ├── LedgerFenced     (to a writer: the entry may exist all the same; only recovery decides)
    │   ├── StaleEpoch
    │   └── SessionExpired
    ├── NotFound             an explicit, definite absence; never answered because of an error
    │   ├── NoSuchLedger
    │   ├── NoSuchEntry
    │   └── NoSuchObject
    ├── Corrupt              stored or received bytes do not match their checksum or format
    ├── Invalid              the request itself is wrong: field, limit and remedy are in the message
    ├── Refused              the object store refuses the request (access, a quota, no such bucket) until somebody changes that
    └── StorageFailed        a disk failed or is full; detail["read_only"] says which

Between Stratalog's processes an error is sent as its ``code``, message and detail; an unknown code becomes a plain
``StratalogError``, so that nodes of different versions can communicate.
"""

from __future__ import annotations

from typing import Any, ClassVar

_BY_CODE: dict[str, type[StratalogError]] = {}


class StratalogError(Exception):
    """Root of the tree. ``detail`` holds only values that msgpack can encode."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str = "", /, **detail: Any) -> None:
        super().__init__(message or self.code)
        self.message = message or self.code
        self.detail: dict[str, Any] = detail

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "code" in cls.__dict__:  # subclasses without a code are sent as their parent class
            _BY_CODE[cls.code] = cls


_BY_CODE["error"] = StratalogError


class Retriable(StratalogError):
    code = "retriable"


class Unavailable(Retriable):
    code = "unavailable"


class NotLeader(Retriable):
    code = "not_leader"


class Overloaded(Retriable):
    code = "overloaded"


class NotEnoughBookies(Retriable):
    code = "not_enough_bookies"


class OutcomeUnknown(StratalogError):
    code = "outcome_unknown"


class Conflict(StratalogError):
    code = "conflict"


class Fenced(StratalogError):
    code = "fenced"


class LedgerFenced(Fenced):
    code = "ledger_fenced"


class StaleEpoch(Fenced):
    code = "stale_epoch"


class SessionExpired(Fenced):
    code = "session_expired"


class NotFound(StratalogError):
    code = "not_found"


class NoSuchLedger(NotFound):
    code = "no_such_ledger"


class NoSuchEntry(NotFound):
    code = "no_such_entry"


class NoSuchObject(NotFound):
    code = "no_such_object"


class Corrupt(StratalogError):
    code = "corrupt"


class Invalid(StratalogError):
    code = "invalid"


class Refused(StratalogError):
    code = "refused"


class StorageFailed(StratalogError):
    code = "storage_failed"


def error_from_wire(code: str, message: str, detail: dict[str, Any]) -> StratalogError:
    """Rebuild an error from another process's reply."""
    return _BY_CODE.get(code, StratalogError)(message, **detail)
