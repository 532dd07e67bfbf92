"""Sealing a partition's full ledgers, in the order in which they were filled. One task seals one ledger.

A failure loses the partition: the next takeover recovers the ledger. The seal of the last ledger before a handover carries the
release, which names the next owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from stratalog_bookies.client import LedgerWriter
from stratalog_broker.partitions.index_cache import IndexCache
from stratalog_broker.partitions.instructions import Seal
from stratalog_broker.partitions.ledger_index import LedgerIndex
from stratalog_broker.partitions.release import Release
from stratalog_core.errors import Overloaded
from stratalog_metadata.records import Ledger


class LedgerSealing:
    """Seals the ledgers of one partition for one owner.

    ``release`` returns what the next seal releases the partition with, if anything; ``on_failed`` is called with a failure.
    """

    def __init__(
        self, indexes: IndexCache, release: Callable[[], Release | None], on_failed: Callable[[Exception], None]
    ) -> None:
        self._indexes = indexes
        self._release = release
        self._on_failed = on_failed
        self._unsealed: dict[int, tuple[Ledger, LedgerIndex]] = {}
        self._waiters: list[asyncio.Future[int]] = []
        self.last: asyncio.Task[None] | None = None
        """The task that seals the newest of the ledgers. It does not fail."""

    def begin(self, writer: LedgerWriter, instruction: Seal) -> None:
        """Seal a ledger after those before it."""
        self._unsealed[instruction.ledger_id] = writer.ledger, instruction.index
        self.last = asyncio.get_running_loop().create_task(self._seal(writer, instruction, self.last))

    @property
    def is_sealing(self) -> bool:
        """Whether a ledger is being sealed."""
        return self.last is not None and not self.last.done()

    @property
    def has_unsealed(self) -> bool:
        """Whether a ledger is being sealed, or could not be."""
        return bool(self._unsealed)

    def unsealed(self, ledger_id: int) -> tuple[Ledger, LedgerIndex] | None:
        """Return the record and index of a ledger that is being sealed; None for any other."""
        return self._unsealed.get(ledger_id)

    async def next_end(self) -> int:
        """Wait until a ledger is sealed, and return its end. Raises what ``fail_waiters`` is given."""
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    def fail_waiters(self, failure: Exception) -> None:
        """Raise ``failure`` in those who wait for a seal, because the partition is lost."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(failure)

    async def _seal(self, writer: LedgerWriter, instruction: Seal, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        try:
            release = self._release()
            if release is not None and release.last_entry:
                with contextlib.suppress(Overloaded):
                    writer.append(release.last_entry)
            updates = release[:2] if release is not None else ()
            ledger = await writer.seal(instruction.end_offset, *updates, undecided_from=instruction.undecided_from)
        except Exception as failure:
            writer.abandon()
            self._on_failed(failure)
            return
        self._indexes.put(ledger.ledger_id, instruction.index)
        del self._unsealed[ledger.ledger_id]
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(instruction.end_offset)
