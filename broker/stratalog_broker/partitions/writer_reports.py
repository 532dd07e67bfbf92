"""Listens to a ledger writer on behalf of a partition: what a writer says that is no longer the current one is dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratalog_core.errors import StratalogError

if TYPE_CHECKING:
    from stratalog_broker.partitions.log import PartitionLog


class WriterReports:
    """``ledger_id`` is set when the writer has become the current one."""

    __slots__ = ("_log", "ledger_id", "on_confirmed", "on_first_copy")

    def __init__(self, log: PartitionLog) -> None:
        self._log = log
        self.ledger_id = -1
        # The log's own methods, which saves a call for each entry.
        self.on_first_copy = log.first_copy
        self.on_confirmed = log.confirmed

    def on_failed(self, error: StratalogError) -> None:
        self._log.writer_failed(self.ledger_id, error)
