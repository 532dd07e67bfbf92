"""What tiering needs of the ledgers: the border to whoever can read them (the bookies' client, in a cluster)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from stratalog_metadata.records import Ledger
from stratalog_tiering.core.offload_job import SourceEntry


class EntryHead(Protocol):
    """The first bytes of an entry as a ledger reader gives them."""

    @property
    def head(self) -> bytes: ...


class LedgerSource(Protocol):
    """Reads sealed ledgers, and tells their storage when they are gone."""

    async def read(self, ledger: Ledger, first: int, last: int, max_bytes: int) -> Sequence[SourceEntry]:
        """Entries from ``first`` on, at least one, at most to ``last``, sound by their checksums.

        Raises ``NoSuchEntry`` only on explicit absence everywhere, else ``Unavailable``.
        """
        ...

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> Sequence[EntryHead]:
        """The first bytes of every entry from ``first`` to ``last``, enough for a batch's header. Raises as ``read`` does."""
        ...

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        """Tell bookies that these ledgers are gone from metadata. What this misses, their own collection finds."""
        ...
