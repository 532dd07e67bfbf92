"""Ledger records in metadata: guarded updates with a known outcome, and batched reads.

An update whose answer is lost is never assumed to have happened or not: the record is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from stratalog_core.errors import Conflict, Fenced, OutcomeUnknown, Retriable, StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.shared_commands import SharedCommands
from stratalog_metadata.records import Ledger, Versioned, ledger_key
from stratalog_metadata.state.commands import Command, Put, Requirement, Update, VersionIs

_RETRY_S: Final = 0.05
_ATTEMPT_S: Final = 3.0
"""Maximum wait for one answer: the connection or the node may have died silently."""

_KEYS_MAX: Final = 1024
"""Records per request; each has a few hundred bytes."""

_Question = tuple[int, asyncio.Future[Versioned | None]]


class Superseded(StratalogError):
    """The ledger's record is not the one that the change started from. ``found`` is the current one."""

    code = "ledger_superseded"

    def __init__(self, found: Versioned | None) -> None:
        super().__init__("the ledger's record was changed concurrently")
        self.found = found


def change_of(record: Ledger, version: int, requirements: tuple[Requirement, ...], updates: tuple[Update, ...]) -> Command:
    """Compare-and-set of a ledger's record, with further updates under further requirements; it takes effect at most once."""
    requirement = VersionIs(key=record.key(), version=version)
    return Command(updates=(Put(record=record), *updates), requirements=(requirement, *requirements))


async def put_ledger(
    metadata: MetadataClient,
    clock: Clock,
    record: Ledger,
    version: int,
    *,
    requirements: tuple[Requirement, ...] = (),
    updates: tuple[Update, ...] = (),
    timeout_s: float,
) -> int:
    """Commit ``change_of`` these arguments; returns the new version.

    After ``OutcomeUnknown`` the record is read again: if it is the new one, the command took effect; if it has the old version,
    the same command is proposed again, which is safe because it requires the old version. A command without an answer within a
    few seconds is treated the same way; the client then uses another node.

    Raises :class:`Superseded` if the record is a third one, the quorum's answer if another requirement does not hold,
    ``Unavailable`` if definitely nothing happened, and ``OutcomeUnknown`` if the outcome is still unknown after ``timeout_s``.
    """
    command = change_of(record, version, requirements, updates)
    deadline = clock.monotonic() + timeout_s
    unsure: OutcomeUnknown | None = None
    while True:
        left_s = deadline - clock.monotonic()
        try:
            return (await metadata.propose(command, timeout_s=min(max(left_s, _RETRY_S), _ATTEMPT_S))).index
        except OutcomeUnknown as unknown:
            unsure = unknown
        except (Conflict, Fenced) as refusal:
            return await _judge(metadata, record, version, refusal)
        except Retriable:
            if clock.monotonic() >= deadline:
                if unsure is not None:
                    raise unsure from None
                raise
        if clock.monotonic() >= deadline:
            raise unsure or OutcomeUnknown()
        await asyncio.sleep(_RETRY_S)


async def _judge(metadata: MetadataClient, record: Ledger, version: int, refusal: StratalogError) -> int:
    """Decide about a refused command: it had taken effect before, the record was changed concurrently, or another requirement
    fails.
    """
    try:
        found = (await metadata.read([record.key()]))[0]
    except Retriable as unreachable:
        raise OutcomeUnknown(f"a change of {record.key()} was refused and cannot be re-read: {unreachable}") from refusal
    if found is not None and found.record == record:
        return found.version
    if (found.version if found is not None else 0) != version:
        raise Superseded(found)
    raise refusal


class LedgerRecordPuts:
    """Updates of many ledgers' records: those of one turn share a command if possible, else each gets its own."""

    def __init__(self, metadata: MetadataClient, clock: Clock) -> None:
        self._metadata = metadata
        self._clock = clock
        self._shared = SharedCommands(metadata)

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
        done = await self._shared.propose(change_of(record, version, requirements, updates))
        if done is not None:
            return done
        return await put_ledger(
            self._metadata, self._clock, record, version, requirements=requirements, updates=updates, timeout_s=timeout_s
        )  # fmt: skip

    async def close(self) -> None:
        """Stop sharing commands; cancels waiting callers."""
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
