"""Reports of a ledger writer to its partition; a failure of a writer that is no longer the current one is dropped."""

from __future__ import annotations

from typing import Protocol

from stratalog_core.errors import StratalogError


class ReportedPartition(Protocol):
    """The partition that a ledger writer writes for."""

    def first_copy(self, entry_id: int) -> None: ...

    def confirmed(self, lac: int) -> None: ...

    def writer_failed(self, writer_ledger_id: int, error: StratalogError) -> None: ...


class WriterReports:
    """``ledger_id`` is set when the writer has become the current one."""

    __slots__ = ("_log", "ledger_id", "on_confirmed", "on_first_copy")

    def __init__(self, log: ReportedPartition) -> None:
        self._log = log
        self.ledger_id = -1
        # The log's own methods, which saves a call for each entry.
        self.on_first_copy = log.first_copy
        self.on_confirmed = log.confirmed

    def on_failed(self, error: StratalogError) -> None:
        self._log.writer_failed(self.ledger_id, error)
