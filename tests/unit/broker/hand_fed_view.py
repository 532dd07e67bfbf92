"""A view of the metadata that a test changes by hand."""

from __future__ import annotations

from stratalog_metadata.client.view import LocalView
from stratalog_metadata.protocol.messages import KeyChange
from stratalog_metadata.records import Record, Versioned


class HandFedView(LocalView):
    """Each call is one command."""

    def put(self, *records: Record) -> None:
        index = self.index + 1
        self.follow(index, [[KeyChange(record.key(), Versioned(version=index, record=record)) for record in records]])

    def remove(self, *keys: str) -> None:
        self.follow(self.index + 1, [[KeyChange(key, None) for key in keys]])
