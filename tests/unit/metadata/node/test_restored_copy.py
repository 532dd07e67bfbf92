"""A backup of one node is the whole quorum after a restore: the other disks, whose votes it remembers, are lost."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.embedded_quorum import embedded_quorum

from stratalog.local.ports import free_ports
from stratalog_core.errors import Fenced, Invalid, OutcomeUnknown, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.administration import QuorumAdministration
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import StatusAnswer, StatusRequest
from stratalog_metadata.records import (
    DeletedTopic,
    DynamicConfig,
    Partition,
    deleted_topic_key,
    dynamic_config_key,
)
from stratalog_metadata.state.commands import Command, Put
from stratalog_metadata.storage.restored_copy import EPOCHS_LEFT_OUT, become_only_member
from stratalog_metadata.storage.state_store import SQLITE_FILE, SqliteStore

PATIENT: dict[str, Any] = {"election_timeout_ms": 500, "heartbeat_ms": 50}


async def put(client: QuorumClient, name: str) -> None:
    """Repeat it, which is harmless: an election, also one that a stall of the machine causes, may lose the outcome."""
    while client.view.get(dynamic_config_key(name)) is None:
        with suppress(OutcomeUnknown, Unavailable):
            await client.propose(Command(updates=(Put(record=DynamicConfig(resource=name, configs={})),)))


async def until_applied(transport: TcpTransport, address: str, index: int) -> None:
    """Wait until the node at ``address`` has applied the entry at ``index``."""
    channel, request = transport.channel(address), messages.encode(StatusRequest())
    async with asyncio.timeout(60):
        while messages.decode(await channel.call(messages.STATUS, (request,), 60), StatusAnswer).applied_index < index:
            pass


def become_alone(directory: Path) -> None:
    become_only_member(SystemFiles(directory), lambda: SqliteStore(directory / SQLITE_FILE), random.Random(7))


@asynccontextmanager
async def server(
    directory: Path, node_id: int, addresses: dict[int, str], transport: TcpTransport
) -> AsyncIterator[MetadataServer]:
    settings = MetadataSettings(data_dir=str(directory), node_id=node_id, listen=addresses[node_id], **PATIENT)
    background = ThreadBackground(2, "restored")
    started = MetadataServer(settings, transport, SystemFiles(directory), SystemClock(), random.Random(node_id), background)
    try:
        await started.start(addresses)
        yield started
    finally:
        await started.close()
        background.close()


async def backed_up(path: Path, transport: TcpTransport, *, in_order: bool) -> None:
    """Run a quorum of three with one record, and copy a follower's directory while that node is stopped.

    ``in_order``: it has saved its state. Else the copy has it in its log only.
    """
    async with embedded_quorum(path, transport, nodes=3, **PATIENT) as quorum:
        await put(quorum.client, "a")
        leader = quorum.servers.index(await quorum.leader())
        follower = (leader + 1) % 3
        await until_applied(transport, quorum.addresses[follower], quorum.client.view.index)
        await quorum.servers[follower].close(hand_over=in_order)
        shutil.copytree(path / str(follower + 1), path / "backup")
        (path / "copied").write_text(str(follower + 1))
        await quorum.restart(follower + 1)


@pytest.mark.parametrize("in_order", [True, False])
async def test_a_copy_of_one_of_three_nodes_serves_and_is_joined_by_new_nodes(
    tmp_path: Path, transport: TcpTransport, in_order: bool
) -> None:
    await backed_up(tmp_path, transport, in_order=in_order)
    copied = int((tmp_path / "copied").read_text())
    survivor, lost = (node_id for node_id in (1, 2, 3) if node_id != copied)
    for node_id in (copied, lost):
        shutil.rmtree(tmp_path / str(node_id))
    shutil.copytree(tmp_path / "backup", tmp_path / str(copied))
    become_alone(tmp_path / str(copied))

    addresses = {node_id: f"127.0.0.1:{port}" for node_id, port in zip((1, 2, 3), free_ports(3), strict=True)}
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(server(tmp_path / str(copied), copied, addresses, transport))
        client = QuorumClient([addresses[copied]], transport, SystemClock(), random.Random(5))
        stack.push_async_callback(client.close)
        await client.start()
        assert client.view.get(dynamic_config_key("a")) is not None
        await put(client, "b")

        # A node of the old quorum is refused, and takes the restored one for a voter no more.
        old = await stack.enter_async_context(server(tmp_path / str(survivor), survivor, addresses, transport))
        async with asyncio.timeout(60):
            while old.failure is None:  # noqa: ASYNC110 - the server has no event for it, and needs none
                await asyncio.sleep(0.02)
        assert isinstance(old.failure, Fenced)
        await old.close()

        administration = QuorumAdministration([addresses[copied]], transport, SystemClock(), random.Random(5))
        shutil.rmtree(tmp_path / str(survivor))
        for node_id in (survivor, lost):
            await stack.enter_async_context(server(tmp_path / str(node_id), node_id, addresses, transport))
            await administration.add(node_id, addresses[node_id])
        assert [member.voter for member in (await administration.status()).members] == [True] * 3
        await put(client, "c")


def test_a_directory_that_belongs_to_no_quorum_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="belongs to no quorum"):
        become_alone(tmp_path)


async def test_leader_epochs_rise_above_those_that_the_lost_quorum_used(tmp_path: Path, transport: TcpTransport) -> None:
    """Else owners would write under epochs of earlier owners, whose records, markers and stored states seem newer."""
    live, deleted = Partition(topic_id=UUID(int=1), index=0, owner=1, leader_epoch=7), UUID(int=2)
    async with embedded_quorum(tmp_path, transport, nodes=1, **PATIENT) as quorum:
        gone = DeletedTopic(topic_id=deleted, name="gone", deleted_at_ms=5, leader_epochs=(3, 9))
        await quorum.client.propose(Command(updates=(Put(record=live), Put(record=gone))))
    become_alone(tmp_path / "1")
    async with embedded_quorum(tmp_path, transport, nodes=1, **PATIENT) as quorum:
        view = quorum.client.view
        assert view.find(Partition, live.key()) == msgspec.structs.replace(live, leader_epoch=7 + EPOCHS_LEFT_OUT)
        found = view.find(DeletedTopic, deleted_topic_key(deleted))
        assert found is not None
        assert found.leader_epochs == (3 + EPOCHS_LEFT_OUT, 9 + EPOCHS_LEFT_OUT)
