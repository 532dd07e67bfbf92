"""The base of all records: msgpack maps tagged by ``kind``. Tags and field names are permanent."""

from __future__ import annotations

import msgspec


class RecordBase(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", omit_defaults=True):
    """One stored record: immutable, identified by :meth:`key`, replaced as a whole.

    Records are trees without cycles, so the garbage collector does not track them (``gc=False``).
    """

    def key(self) -> str:
        """``kind/...``: unique over all kinds. Keys with a common prefix are adjacent in a scan."""
        raise NotImplementedError
