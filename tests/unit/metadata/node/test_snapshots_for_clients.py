"""Clients that load the records at the same time, as after a restart of all brokers, while commands are committed."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.embedded_quorum import embedded_quorum

from stratalog_core.ports import Channel
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.node import read_requests
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import SnapshotAnswer, SnapshotRequest
from stratalog_metadata.records import DynamicConfig
from stratalog_metadata.state import snapshot
from stratalog_metadata.state.commands import Command, Put

CLIENTS = 5


async def piece(channel: Channel, index: int = 0, position: int = 0) -> SnapshotAnswer:
    request = messages.encode(SnapshotRequest(index=index, position=position))
    return messages.decode(await channel.call(messages.SNAPSHOT, (request,), 60.0), SnapshotAnswer)


async def test_clients_that_load_beside_each_other_all_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_requests, "SNAPSHOT_PIECE_BYTES", 128)
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport) as quorum:

        async def commit(name: str) -> None:
            await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource=name)),)))

        await commit("a")
        channel = transport.channel(quorum.addresses[0])
        begun = []
        for number in range(CLIENTS):
            begun.append(await piece(channel))
            await commit(f"between {number}")
        for first in begun:
            content = first.content
            while len(content) < first.total_bytes:
                following = await piece(channel, first.index, len(content))
                assert following.index == first.index
                content += following.content
            assert snapshot.decode(content).index == first.index
    await transport.close()


async def test_a_snapshot_is_made_again_before_its_clients_could_not_follow(tmp_path: Path) -> None:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport, watch_entries=10) as quorum:
        channel = transport.channel(quorum.addresses[0])
        for number in range(12):
            await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource=f"{number}")),)))
            assert (await piece(channel)).index > quorum.client.view.index - 5
    await transport.close()
