"""Writing a ledger's record so that the outcome is known: no guess is ever made about a command that was not answered."""

from __future__ import annotations

import asyncio
from typing import Final

from stratalog_core.errors import Conflict, Fenced, OutcomeUnknown, Retriable, StratalogError
from stratalog_core.ports import Clock
from stratalog_metadata.client.api import MetadataClient
from stratalog_metadata.records import Ledger, Versioned
from stratalog_metadata.state.commands import Command, Put, Requirement, Update, VersionIs

_RETRY_S: Final = 0.05
_ATTEMPT_S: Final = 3.0
"""An answer is not waited for longer than this: the link, or the node that was asked, may be gone without a word."""


class Superseded(StratalogError):
    """The ledger's record is no longer the one that the change was made from. ``found`` is what is there now."""

    code = "ledger_superseded"

    def __init__(self, found: Versioned | None) -> None:
        super().__init__("the ledger's record was changed by somebody else")
        self.found = found


def change_of(record: Ledger, version: int, requirements: tuple[Requirement, ...], updates: tuple[Update, ...]) -> Command:
    """Compare-and-set of a ledger's record, with further updates under further requirements; it takes effect once at most."""
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
    """Propose ``change_of`` the same; returns the new version.

    After ``OutcomeUnknown`` the record is re-read: ours there means that the command took effect, the old version that it did
    not yet, and then the very same command is proposed again, which the requirement on the version lets take effect once.
    So is one that is not answered within a few seconds; the client goes on with another node then.

    Raises :class:`Superseded` if the record is another one, what the quorum answers if another requirement does not hold,
    ``Unavailable`` if surely nothing happened, and ``OutcomeUnknown`` only if it stayed unknown until the time was over.
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
    """A refused command: was it ours that had taken effect before, is it somebody else's, or does another requirement fail?"""
    try:
        found = (await metadata.read([record.key()]))[0]
    except Retriable as unreachable:
        raise OutcomeUnknown(f"a change of {record.key()} was refused and cannot be re-read: {unreachable}") from refusal
    if found is not None and found.record == record:
        return found.version
    if (found.version if found is not None else 0) != version:
        raise Superseded(found)
    raise refusal
