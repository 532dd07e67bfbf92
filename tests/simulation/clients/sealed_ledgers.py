"""Ledgers that are sealed already, for scenarios without brokers and bookies: as owners append them and workers read them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from stratalog_core.errors import StratalogError, Unavailable
from stratalog_metadata.client.api import MetadataView
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    NONE_UNDECIDED,
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    Partition,
    ledger_key,
    manifest_pointer_key,
)
from stratalog_metadata.state.commands import Command, EpochIs, Put, Requirement, VersionIs


class Entry(NamedTuple):
    entry_id: int
    payload: memoryview


class EntryHead(NamedTuple):
    entry_id: int
    head: bytes


class LedgersOfProcess:
    """See :class:`stratalog_tiering.offload.ports.LedgerSource`."""

    def __init__(self, entries: Callable[[int], Sequence[bytes]], chance: random.Random) -> None:
        """``entries`` returns the entries of a ledger by its id."""
        self._entries = entries
        self._random = chance

    async def read(self, ledger: Ledger, first: int, last: int, max_bytes: int) -> Sequence[Entry]:
        await asyncio.sleep(self._random.expovariate(1 / 0.005))
        if self._random.random() < 0.02:
            raise Unavailable("the simulated bookies do not answer")
        entries = self._entries(ledger.ledger_id)
        return [Entry(number, memoryview(entries[number])) for number in range(first, last + 1)]

    async def read_headers(self, ledger: Ledger, first: int, last: int) -> Sequence[EntryHead]:
        return [EntryHead(entry.entry_id, bytes(entry.payload)) for entry in await self.read(ledger, first, last, 0)]

    async def read_lac(self, ledger: Ledger) -> int:
        return ledger.last_entry

    async def delete(self, ledger_ids: Sequence[int]) -> None:
        pass


def end_of(view: MetadataView, log: Log) -> int:
    """Return the offset at which the next ledger begins, hot and cold history considered."""
    pointer = view.find(ManifestPointer, manifest_pointer_key(log.topic_id, log.index))
    last = view.find(Ledger, ledger_key(log.ledgers[-1].ledger_id)) if log.ledgers else None
    return max(last.end_offset if last is not None else 0, pointer.end_offset if pointer is not None else 0)


async def append_sealed(
    client: QuorumClient,
    log: Log,
    version: int,
    ledger_id: int,
    batches: Sequence[bytes],
    offsets: range,
    now_ms: int,
    partition: Partition | None = None,
    undecided_from: int = NONE_UNDECIDED,
) -> None:
    """Append a ledger of ``batches`` with ``offsets`` to ``log``, which was read at ``version``.

    ``partition`` must still be as it was read: the log of a deleted topic does not change while the topic can be restored.
    None: the scenario deletes no topics.

    A failure is ignored: if the command took effect, the view shows the ledger, and the next one follows it.
    """
    leader_epoch = partition.leader_epoch if partition is not None else 0
    ledger = Ledger(
        ledger_id=ledger_id, topic_id=log.topic_id, partition=log.index, base_offset=offsets.start,
        leader_epoch=leader_epoch, write_quorum=1, ack_quorum=1, fragments=(Fragment(first_entry=0, bookies=("bookie",)),),
        state=LedgerState.CLOSED, last_entry=len(batches), payload_bytes=sum(map(len, batches)), end_offset=offsets.stop,
        closed_at_ms=now_ms, undecided_from=undecided_from,
    )  # fmt: skip
    ref = LedgerRef(ledger_id=ledger_id, base_offset=offsets.start, leader_epoch=leader_epoch)
    longer = msgspec.structs.replace(log, ledgers=(*log.ledgers, ref))
    requirements: list[Requirement] = [VersionIs(key=log.key(), version=version)]
    if partition is not None:
        requirements.append(EpochIs(key=partition.key(), owner=partition.owner, leader_epoch=leader_epoch))
    with contextlib.suppress(StratalogError):
        await client.propose(Command(updates=(Put(record=ledger), Put(record=longer)), requirements=tuple(requirements)))
