"""The effect of a command on one record."""

from __future__ import annotations

import msgspec

from stratalog_metadata.records import Versioned


class Change(msgspec.Struct, frozen=True, gc=False):
    """The effect of a command on one key: the record before and after (None: absent)."""

    key: str
    before: Versioned | None
    after: Versioned | None
