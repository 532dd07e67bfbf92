"""Changes of ledgers' records: those of one turn of the event loop go into one command, however many opened or closed are.

A command costs every node of the quorum and every watcher about as much as what it holds. One that is refused, or whose outcome
is not known, is done again record by record: each says by itself what became of it (``ledger_records.py``).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from stratalog_bookies.client.ledger_records import put_ledger
from stratalog_core.errors import StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.api import MetadataClient
from stratalog_metadata.commands import Command, Put, Requirement, Update, VersionIs
from stratalog_metadata.records import Ledger

TOGETHER_MAX: Final = 256
"""Records in one command: some hundred kilobytes. If one of them fails it, so many are done again."""
_ATTEMPT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class _Change:
    record: Ledger
    version: int
    requirements: tuple[Requirement, ...]
    updates: tuple[Update, ...]
    done: asyncio.Future[int | None]
    """The new version; None: not done together, or not known to be."""

    def keys(self) -> set[str]:
        """What the change writes."""
        written = {update.record.key() if isinstance(update, Put) else getattr(update, "key", "") for update in self.updates}
        return written | {self.record.key()}


class RecordPuts:
    """Compare-and-set of many ledgers' records."""

    def __init__(self, metadata: MetadataClient, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._waiting: list[_Change] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def put(
        self,
        record: Ledger,
        version: int,
        *,
        requirements: tuple[Requirement, ...],
        updates: tuple[Update, ...] = (),
        timeout_s: float,
    ) -> int:
        """The record's new version, which its ``updates`` got as well. Raises as ``put_ledger`` does."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._flush)
        change = _Change(record, version, requirements, updates, loop.create_future())
        self._waiting.append(change)
        done = await change.done
        if done is not None:
            return done
        return await put_ledger(
            self._metadata, self._clock, record, version, requirements=requirements, updates=updates, timeout_s=timeout_s
        )  # fmt: skip

    async def close(self) -> None:
        """Propose no more together; who waits is cancelled."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush(self) -> None:
        waiting, self._waiting = _once_each(self._waiting), []
        for first in range(0, len(waiting), TOGETHER_MAX):
            changes = waiting[first : first + TOGETHER_MAX]
            if len(changes) == 1:
                _settle(changes, None)
                continue
            task = asyncio.get_running_loop().create_task(self._propose(changes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _propose(self, changes: list[_Change]) -> None:
        updates: list[Update] = []
        requirements: list[Requirement] = []
        for change in changes:
            updates += (Put(record=change.record), *change.updates)
            requirements += (VersionIs(key=change.record.key(), version=change.version), *change.requirements)
        command = Command(updates=tuple(updates), requirements=tuple(dict.fromkeys(requirements)))
        try:
            applied = await self._metadata.propose(command, timeout_s=_ATTEMPT_S)
        except StratalogError:
            _settle(changes, None)
        else:
            _settle(changes, applied.index)
        finally:
            for change in changes:
                change.done.cancel()


def _once_each(changes: list[_Change]) -> list[_Change]:
    """One change for each record. In one command a second one would undo the first unseen; alone it is refused."""
    together: list[_Change] = []
    written: set[str] = set()
    for change in changes:
        keys = change.keys()
        if written.isdisjoint(keys):
            written |= keys
            together.append(change)
        else:
            _settle([change], None)
    return together


def _settle(changes: list[_Change], version: int | None) -> None:
    for change in changes:
        if not change.done.done():
            change.done.set_result(version)
