"""Reads of ledgers' records: those of one turn of the event loop travel as one, however many recoveries ask."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Versioned, ledger_key

_KEYS_MAX: Final = 1024
"""Records in one request; each has some hundred bytes."""

_Question = tuple[int, asyncio.Future[Versioned | None]]


class RecordReads:
    """Linearizable reads of ledgers' records."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._waiting: list[_Question] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def read(self, ledger_ids: Sequence[int]) -> list[Versioned | None]:
        """Records in order, None for those that do not exist. Raises ``Unavailable``."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        questions: list[_Question] = [(ledger_id, loop.create_future()) for ledger_id in ledger_ids]
        self._waiting += questions
        return list(await asyncio.gather(*(future for _, future in questions)))

    async def close(self) -> None:
        """Ask no more; who waits is cancelled."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), _KEYS_MAX):
            task = asyncio.get_running_loop().create_task(self._ask(waiting[first : first + _KEYS_MAX]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, questions: list[_Question]) -> None:
        try:
            found = await self._metadata.read([ledger_key(ledger_id) for ledger_id, _ in questions])
        except StratalogError as failure:
            for _, future in questions:
                if not future.done():
                    future.set_exception(failure)
        else:
            for (_, future), record in zip(questions, found, strict=True):
                if not future.done():
                    future.set_result(record)
        finally:
            for _, future in questions:
                future.cancel()
