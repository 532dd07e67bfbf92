"""Joins commands of one turn of the event loop into one, which costs nodes and watchers about as much as a single one.

Commands that share a command take effect as if applied one after the other in their order; those that would not are left out.
If the shared command is refused or its outcome is unknown, nothing is reported: each caller proposes its own command then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from stratalog_core.errors import StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.state.commands import Command, Delete, Put, Requirement, SessionAlive, Update

TOGETHER_MAX: Final = 256
"""Maximum of commands in one: some hundred kilobytes of records. If it fails, all of them are proposed again."""
_ATTEMPT_S: Final = 3.0
"""Longest wait for an answer; each caller has its own time left after it."""
_log = logging.getLogger(__name__)


class _Asked(NamedTuple):
    command: Command
    answer: asyncio.Future[int | None]

    def go_alone(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)

    def settle(self, task: asyncio.Task[int | None]) -> None:
        """Report the outcome of the task."""
        if task.cancelled():
            self.answer.cancel()
        elif not self.answer.done():
            failure = task.exception()
            if failure is None:
                self.answer.set_result(task.result())
            else:
                self.answer.set_exception(failure)


class SharedCommands:
    """Joins commands that only put and delete records. Commands that allocate ids are left out."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._asked: list[_Asked] = []
        self._tasks: set[asyncio.Task[int | None]] = set()

    async def propose(self, command: Command) -> int | None:
        """The version of the written records, once the view has them; None: propose the command alone.

        None means that it was not proposed, was refused together with others, or has an unknown outcome. So the command must
        require something that its own effect changes, such as the version of a record that it writes.
        """
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._flush)
        asked = _Asked(command, loop.create_future())
        self._asked.append(asked)
        return await asked.answer

    async def close(self) -> None:
        """Stop. Callers that wait are cancelled."""
        unsent, self._asked = self._asked, []
        for asked in unsent:
            asked.answer.cancel()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _flush(self) -> None:
        sharing, self._asked = _independent(self._asked), []
        for first in range(0, len(sharing), TOGETHER_MAX):
            together = sharing[first : first + TOGETHER_MAX]
            if len(together) == 1:
                together[0].go_alone()
                continue
            task = asyncio.get_running_loop().create_task(self._propose(together))
            self._tasks.add(task)
            task.add_done_callback(partial(self._answered, together))

    async def _propose(self, together: Sequence[_Asked]) -> int | None:
        try:
            return (await self._metadata.propose(_joined(together), timeout_s=_ATTEMPT_S)).index
        except StratalogError as failure:
            _log.info("proposing %d commands as one failed: %s", len(together), failure)
            return None

    def _answered(self, together: Sequence[_Asked], task: asyncio.Task[int | None]) -> None:
        self._tasks.discard(task)
        for asked in together:
            asked.settle(task)


def _joined(together: Sequence[_Asked]) -> Command:
    """The joint command: all updates in order, each requirement once."""
    updates = [update for asked in together for update in asked.command.updates]
    requirements = dict.fromkeys(requirement for asked in together for requirement in asked.command.requirements)
    return Command(updates=tuple(updates), requirements=tuple(requirements))


def _independent(waiting: Sequence[_Asked]) -> list[_Asked]:
    """The commands that neither write nor require what an earlier one writes; the others are sent back.

    All requirements of a command are checked first, so a second writer of a key would undo the first one unnoticed.
    """
    sharing: list[_Asked] = []
    written: set[str] = set()
    for asked in waiting:
        writes = {_written(update) for update in asked.command.updates}
        required = {_required(requirement) for requirement in asked.command.requirements}
        if "" in writes or not written.isdisjoint(writes | required):
            asked.go_alone()
        else:
            written |= writes
            sharing.append(asked)
    return sharing


def _written(update: Update) -> str:
    """Key of the written record; empty for other updates."""
    if isinstance(update, Put):
        return update.record.key()
    return update.key if isinstance(update, Delete) else ""


def _required(requirement: Requirement) -> str:
    return "" if isinstance(requirement, SessionAlive) else requirement.key
