"""Proposes guarded updates (``state/guarded_update.py``) until their outcome is known or their time is over.

Updates of one turn of the event loop can share a command. The core decides what an answer means; this shell sends and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from stratalog_core.errors import Conflict, OutcomeUnknown, Retriable, StratalogError
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.client.shared_commands import SharedCommands
from stratalog_metadata.state.commands import Command
from stratalog_metadata.state.guarded_update import GuardedUpdate, Superseded

RETRY_S: Final = 0.05
ATTEMPT_S: Final = 3.0
"""Longest wait for one answer: the node that was asked, or the link to it, may be gone without a sign."""
DECISIONS_MAX: Final = 8
DECIDE_AGAIN_S: Final = 0.02
Result = TypeVar("Result")


async def propose_guarded(
    metadata: MetadataClient, command: Command, key: str, timeout_s: float, *, may_have_applied: bool = False
) -> int:
    """Return the new version of the record at ``key``, which ``command`` requires at a version and puts or deletes, once the
    view has it.

    Returns ``GONE`` if the record is gone and it is not known whether ``command`` or another writer has deleted it.
    ``may_have_applied``: the command was proposed before, with an unknown outcome.

    Raises ``Superseded`` (another writer changed the record), the quorum's refusal if another requirement does not hold,
    ``Unavailable`` (nothing happened), and ``OutcomeUnknown`` only if the outcome stayed unknown for ``timeout_s``.
    """
    update = GuardedUpdate(command, key, may_have_applied=may_have_applied)
    now = asyncio.get_running_loop().time
    deadline = now() + timeout_s
    while True:
        try:
            return (await metadata.propose(command, min(max(deadline - now(), RETRY_S), ATTEMPT_S))).index
        except StratalogError as failure:
            if update.failed(failure):
                return await _read(metadata, update)
        if now() >= deadline:
            raise update.timed_out()
        await asyncio.sleep(RETRY_S)


async def _read(metadata: MetadataClient, update: GuardedUpdate) -> int:
    try:
        (found,) = await metadata.read([update.key])
    except Retriable as failure:
        raise update.not_read(failure) from failure
    version = update.read(found)
    try:
        # An earlier proposal took effect. As after ``propose``, the view has it on return.
        await metadata.refresh()
    except Retriable as failure:
        raise OutcomeUnknown(f"{update.key} was changed, and the local view did not reach it: {failure.message}") from failure
    return version


class SharedGuardedUpdates:
    """Guarded updates that share a command with others of the same turn of the event loop. ``close`` it."""

    def __init__(self, metadata: MetadataClient) -> None:
        self._metadata = metadata
        self._shared = SharedCommands(metadata)

    async def propose(self, command: Command, key: str, timeout_s: float) -> int:
        """Propose the command together with others, and alone if that fails. Returns and raises as ``propose_guarded``."""
        version = await self._shared.propose(command)
        if version is not None:
            return version
        return await propose_guarded(self._metadata, command, key, timeout_s, may_have_applied=True)

    async def close(self) -> None:
        """Stop sharing; callers that wait for a shared command are cancelled."""
        await self._shared.close()


async def decide_again(what: str, attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Return the result of ``attempt``, which reads, decides and proposes. Call it again when another writer was faster.

    Raises ``Conflict`` if ``what`` was changed by others ``DECISIONS_MAX`` times in a row.
    """
    for number in range(1, DECISIONS_MAX + 1):
        try:
            return await attempt()
        except (Conflict, Superseded):
            await asyncio.sleep(DECIDE_AGAIN_S * number)
    raise Conflict(f"{what} changed during each of {DECISIONS_MAX} attempts")
