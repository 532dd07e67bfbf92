"""Another process may read a node's database while the node runs. A long reader only delays the truncation of the log."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import StatusAnswer, StatusRequest
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state.commands import Command, Put
from stratalog_metadata.storage import state_store

TIMEOUT_S = 60
ENTRIES_MAX = 100


async def put_many(quorum: EmbeddedQuorum) -> None:
    for number in range(2 * ENTRIES_MAX):
        await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource=f"{number % 7}")),)))


async def log_first_index(quorum: EmbeddedQuorum, transport: TcpTransport) -> int:
    channel = transport.channel(quorum.addresses[0])
    body = await channel.call(messages.STATUS, (messages.encode(StatusRequest()),), TIMEOUT_S)
    return messages.decode(body, StatusAnswer).log_first_index


async def test_a_reader_of_the_database_delays_only_the_truncation_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(state_store, "BUSY_S_MAX", 0.05)
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport, snapshot_entries=ENTRIES_MAX, kept_entries=10) as quorum:
        with closing(sqlite3.connect(f"{(tmp_path / '1/state.sqlite').as_uri()}?mode=ro", uri=True)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM records").fetchall()
            async with asyncio.timeout(TIMEOUT_S):
                while "another process reads" not in caplog.text:
                    await put_many(quorum)
            assert quorum.server.failure is None
            assert await log_first_index(quorum, transport) == 1
        async with asyncio.timeout(TIMEOUT_S):
            while await log_first_index(quorum, transport) == 1:
                await put_many(quorum)
    await transport.close()
