"""Passes a ledger writer's reports to its partition, with the ledger's id, so that failures of old writers can be ignored."""

from __future__ import annotations

from typing import Protocol

from stratalog_core.errors import StratalogError


class ReportedPartition(Protocol):
    """A partition that receives a ledger writer's reports."""

    def first_copy(self, entry_id: int) -> None: ...

    def confirmed(self, lac: int) -> None: ...

    def writer_failed(self, writer_ledger_id: int, error: StratalogError) -> None: ...


class WriterReports:
    """``ledger_id`` is set once the writer is the current one."""

    __slots__ = ("_log", "ledger_id", "on_confirmed", "on_first_copy")

    def __init__(self, log: ReportedPartition) -> None:
        self._log = log
        self.ledger_id = -1
        # Bound directly to the log's methods: saves a call per entry.
        self.on_first_copy = log.first_copy
        self.on_confirmed = log.confirmed

    def on_failed(self, error: StratalogError) -> None:
        self._log.writer_failed(self.ledger_id, error)
