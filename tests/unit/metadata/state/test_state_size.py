"""Metadata does not grow with history: ten times the history has the same size."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from support.embedded_quorum import embedded_quorum

from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.records import (
    LEDGER_IDS,
    Fragment,
    Ledger,
    LedgerRef,
    LedgerState,
    Log,
    ManifestPointer,
    TierStatus,
    ledger_key,
)
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.commands import Allocate, Command, Delete, Put

TOPIC = UUID(int=5)
PARTITIONS = 20
BOOKIES = ("bookie-1", "bookie-2", "bookie-3")
LIFE = 40
"""Ledgers that each partition has had after a short history; the long one is ten times as long."""
LOG_SEGMENT_BYTES = 64 * 1024
MOST_LOG_BYTES = 4 * LOG_SEGMENT_BYTES
SHORT_LOG: dict[str, Any] = {"snapshot_entries": 200, "kept_entries": 20, "log_segment_bytes": LOG_SEGMENT_BYTES}
SLACK = 0.10
"""Numbers get longer as they grow (msgpack, and SQLite's pages), their count does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    records: int
    snapshot_bytes: int
    state_bytes: int
    file_bytes: int
    raft_bytes: int


def ledger(number: int, partition: int, base: int, state: LedgerState) -> Ledger:
    is_closed = state is LedgerState.CLOSED
    return Ledger(
        ledger_id=number,
        topic_id=TOPIC,
        partition=partition,
        base_offset=base,
        leader_epoch=1,
        write_quorum=3,
        ack_quorum=2,
        fragments=(Fragment(first_entry=0, bookies=BOOKIES),),
        state=state,
        last_entry=9 if is_closed else -1,
        payload_bytes=10_000 if is_closed else 0,
        end_offset=base + 100 if is_closed else base,
        closed_at_ms=1_700_000_000_000 if is_closed else 0,
    )


def log(partition: int, numbers: Sequence[tuple[int, int]]) -> Log:
    refs = tuple(LedgerRef(ledger_id=number, base_offset=base, leader_epoch=1) for number, base in numbers)
    return Log(topic_id=TOPIC, index=partition, ledgers=refs, log_start_offset=0)


async def live_one_ledger(client: QuorumClient, partition: int, life: int) -> None:
    """A partition rolls: the next ledger is opened, the one before closed, offloaded, and its hot copy dropped."""
    base = life * 100
    (number,) = (await client.propose(Command(updates=(Allocate(counter=LEDGER_IDS, count=1),)))).allocated
    opened = ledger(number, partition, base, LedgerState.OPEN)
    await client.propose(Command(updates=(Put(record=opened), Put(record=log(partition, [(number, base)])))))
    await client.propose(Command(updates=(Put(record=ledger(number, partition, base, LedgerState.CLOSED)),)))
    pointer = ManifestPointer(
        topic_id=TOPIC,
        index=partition,
        manifest_version=life,
        object_key=f"manifests/{life:020d}",
        sha256="ab" * 32,
        start_offset=0,
        end_offset=base + 100,
        cold_bytes=(life + 1) * 10_000,
    )
    done = TierStatus(topic_id=TOPIC, index=partition, worker_id="worker", offloaded_at_ms=1_700_000_000_000 + life)
    await client.propose(Command(updates=(Put(record=pointer), Put(record=done))))
    await client.propose(Command(updates=(Delete(key=ledger_key(number)), Put(record=log(partition, [])))))


def held_bytes(directory: Path) -> int:
    """Of all files; one that goes while they are counted counts for nothing."""
    total = 0
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += file.stat().st_size
    return total


async def cut_log_bytes(raft: Path) -> int:
    """Return the size of the log once it is truncated, which a busy disk delays while entries keep arriving.

    It is to hold the entries before the cut and the file being written, whatever was before.
    """
    async with asyncio.timeout(60):
        while (held := held_bytes(raft)) > MOST_LOG_BYTES:  # noqa: ASYNC110 - the node tells nobody
            await asyncio.sleep(0.05)
    return held


async def lived(path: Path, transport: TcpTransport, ledgers: int) -> Sizes:
    """Return what remains of a history of this length, in memory and, after an orderly stop, on disk."""
    async with embedded_quorum(path, transport, **SHORT_LOG) as quorum:
        for life in range(ledgers):
            await asyncio.gather(*(live_one_ledger(quorum.client, partition, life) for partition in range(PARTITIONS)))
        assert quorum.server._node is not None
        image = quorum.server._node.replica.image()
        raft_bytes = await cut_log_bytes(path / "1" / "raft")
    node = path / "1"
    # The file keeps the pages of its busiest moment for later use: what counts is what it holds.
    with contextlib.closing(sqlite3.connect(node / "state.sqlite")) as state:
        state.execute("VACUUM INTO ?", (str(path / "compact"),))
    return Sizes(
        records=len(image.records),
        snapshot_bytes=len(snapshot.encode(image)),
        state_bytes=(path / "compact").stat().st_size,
        file_bytes=sum(file.stat().st_size for file in node.glob("state.sqlite*")),
        raft_bytes=raft_bytes,
    )


async def test_metadata_does_not_grow_with_history(tmp_path: Path, transport: TcpTransport) -> None:
    short = await lived(tmp_path / "short", transport, LIFE // 10)
    long = await lived(tmp_path / "long", transport, LIFE)
    assert long.records == short.records
    assert long.snapshot_bytes <= short.snapshot_bytes * (1 + SLACK)
    assert long.state_bytes <= short.state_bytes * (1 + SLACK)
    assert long.file_bytes <= 4 * long.state_bytes
    assert long.raft_bytes <= MOST_LOG_BYTES
