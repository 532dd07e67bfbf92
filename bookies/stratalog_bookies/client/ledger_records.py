"""Ledger records in metadata: guarded updates, and reads of many records in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.guarded_updates import SharedGuardedUpdates, propose_guarded
from stratalog_metadata.records import Ledger, Versioned, ledger_key
from stratalog_metadata.state.commands import Command, Put, Requirement, Update, VersionIs

_KEYS_MAX: Final = 1024
"""Records per request; each has a few hundred bytes."""

_Question = tuple[int, asyncio.Future[Versioned | None]]


def change_of(record: Ledger, version: int, requirements: tuple[Requirement, ...], updates: tuple[Update, ...]) -> Command:
    """Compare-and-set of a ledger's record, with further updates under further requirements; it takes effect at most once."""
    requirement = VersionIs(key=record.key(), version=version)
    return Command(updates=(Put(record=record), *updates), requirements=(requirement, *requirements))


class LedgerRecordPuts:
    """Compare-and-set of ledgers' records."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._shared = SharedGuardedUpdates(metadata)

    async def put(
        self,
        record: Ledger,
        version: int,
        *,
        requirements: tuple[Requirement, ...] = (),
        updates: tuple[Update, ...] = (),
        timeout_s: float,
        share: bool = True,
    ) -> int:
        """Return the record's new version, which the records of ``updates`` get as well. Raises as ``propose_guarded``.

        With ``share`` the command is proposed together with others of the same turn of the event loop.
        """
        command = change_of(record, version, requirements, updates)
        if share:
            return await self._shared.propose(command, record.key(), timeout_s)
        return await propose_guarded(self._metadata, command, record.key(), timeout_s)

    async def close(self) -> None:
        """Stop sharing commands; callers that wait for one are cancelled."""
        await self._shared.close()


class LedgerRecordReads:
    """Linearizable reads of ledgers' records. The reads of one event-loop turn share a request."""

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
        """Stop reading; cancels waiting callers."""
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
