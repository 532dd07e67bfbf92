"""What all records share. Records are msgpack maps tagged by ``kind``; tags and field names are permanent."""

from __future__ import annotations

import msgspec


class RecordBase(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", omit_defaults=True):
    """One stored record: immutable, identified by :meth:`key`, replaced as a whole.

    Records are trees, so the garbage collector need not look at the many thousands of them (``gc=False``).
    """

    def key(self) -> str:
        """``kind/...``: unique over all kinds; keys with a common prefix are neighbours in a scan."""
        raise NotImplementedError
