"""Membership changes on real sockets and files: members added, removed, replaced, and refused after their disk was lost."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog_core.errors import Fenced, Invalid, NotFound, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.administration import QuorumAdministration
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.membership_service import ASKED_MAX
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import HelloRequest
from stratalog_metadata.records import QUORUM_KEY, DynamicConfig, Quorum, dynamic_config_key
from stratalog_metadata.state.commands import Command, Put

PATIENT: dict[str, Any] = {"election_timeout_ms": 500, "heartbeat_ms": 50}


class Bench:
    """A quorum, an administration of it, and servers started besides."""

    def __init__(self, path: Path, stack: AsyncExitStack, transport: TcpTransport, quorum: EmbeddedQuorum) -> None:
        self.path = path
        self.stack = stack
        self.transport = transport
        self.quorum = quorum
        self.administration = QuorumAdministration(quorum.addresses, transport, SystemClock(), random.Random(5))

    async def node(self, node_id: int) -> MetadataServer:
        """Start another node with the data of its directory."""
        directory = self.path / str(node_id)
        settings = MetadataSettings(data_dir=str(directory), node_id=node_id, listen="127.0.0.1:0", **PATIENT)
        background = ThreadBackground(2, "extra")
        self.stack.callback(background.close)
        server = MetadataServer(
            settings, self.transport, SystemFiles(directory), SystemClock(), random.Random(node_id), background
        )
        self.stack.push_async_callback(server.close)
        await server.bind()
        peers = {known: address for known, address in enumerate(self.quorum.addresses, 1) if known != node_id}
        await server.start({**peers, node_id: server.address})
        return server

    async def put(self, name: str) -> None:
        """Repeat it, which is harmless: an election, also one that a stall of the machine causes, may lose the outcome."""
        client = self.quorum.client
        while client.view.get(dynamic_config_key(name)) is None:
            with suppress(OutcomeUnknown, Unavailable):
                await client.propose(Command(updates=(Put(record=DynamicConfig(resource=name, configs={})),)))

    async def voters(self) -> list[int]:
        status = await self.administration.status()
        return [member.node_id for member in status.members if member.voter]

    async def leader(self) -> int:
        return self.quorum.servers.index(await self.quorum.leader()) + 1

    async def follower(self) -> int:
        leader = await self.leader()
        return next(number for number in (1, 2, 3) if number != leader)


@pytest.fixture
async def bench(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        transport = TcpTransport()
        stack.push_async_callback(transport.close)
        quorum = await stack.enter_async_context(embedded_quorum(tmp_path, transport, nodes=request.param, **PATIENT))
        yield Bench(tmp_path, stack, transport, quorum)


async def until_failed(server: MetadataServer) -> StratalogError:
    async with asyncio.timeout(60):
        while server.failure is None:  # noqa: ASYNC110 - the server has no event for it, and needs none
            await asyncio.sleep(0.02)
    return server.failure


@pytest.mark.parametrize("bench", [1], indirect=True)
async def test_one_node_grows_to_three(bench: Bench) -> None:
    await bench.put("a")
    for node_id in (2, 3):
        server = await bench.node(node_id)
        await bench.administration.add(node_id, server.address)
    assert await bench.voters() == [1, 2, 3]
    await bench.put("b")
    await bench.quorum.server.close()
    await bench.put("c")
    assert {config.resource for config in bench.quorum.client.view.all(DynamicConfig)} == {"a", "b", "c"}


@pytest.mark.parametrize("bench", [1], indirect=True)
async def test_addresses_that_are_none_leave_room_for_other_changes(bench: Bench) -> None:
    for _ in range(ASKED_MAX):
        with pytest.raises(Invalid, match="no valid host name"):
            await bench.administration.add(2, "a..b:9300")
    server = await bench.node(2)
    await bench.administration.add(2, server.address)
    assert await bench.voters() == [1, 2]


@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_a_member_that_reports_an_impossible_address_is_refused(bench: Bench) -> None:
    await bench.put("a")
    before = (await bench.administration.status()).members
    leader = await bench.leader()
    channel = bench.transport.channel(bench.quorum.addresses[leader - 1])
    for member in before:
        hello = HelloRequest(node_id=member.node_id, identity=member.identity, address="nowhere")
        if member.node_id != leader:
            with pytest.raises(Invalid, match="not HOST:PORT"):
                await channel.call(messages.HELLO, (messages.encode(hello),), 60)
    await bench.put("b")
    assert [(each.node_id, each.address) for each in (await bench.administration.status()).members] == [
        (each.node_id, each.address) for each in before
    ]
    assert [server.failure for server in bench.quorum.servers] == [None] * 3


@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_the_leader_can_be_removed(bench: Bench) -> None:
    await bench.put("a")
    leader = await bench.leader()
    await bench.administration.remove(leader)
    removed = bench.quorum.servers[leader - 1]
    assert isinstance(await until_failed(removed), Fenced)
    await bench.put("b")
    assert leader not in await bench.voters()
    await removed.close()
    with pytest.raises(Fenced, match="removed from the quorum"):
        await bench.quorum.restart(leader)


@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_a_removed_follower_learns_of_it_when_it_asks(bench: Bench) -> None:
    await bench.put("a")
    follower = await bench.follower()
    await bench.administration.remove(follower)
    assert isinstance(await until_failed(bench.quorum.servers[follower - 1]), Fenced)
    with pytest.raises(NotFound, match="is not a member"):
        await bench.administration.remove(follower)


@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_an_emptied_disk_is_refused_and_replaced(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    await bench.put("a")
    lost = await bench.follower()
    await bench.quorum.servers[lost - 1].close()
    shutil.rmtree(bench.path / str(lost))
    refused = await until_failed(await bench.node(lost))
    assert isinstance(refused, Invalid)
    assert "stratalog metadata remove" in refused.message
    assert "does not start" in caplog.text
    shutil.rmtree(bench.path / str(lost))
    await bench.administration.remove(lost)
    server = await bench.node(lost)
    await bench.administration.add(lost, server.address)
    assert await bench.voters() == [1, 2, 3]
    await bench.put("b")


async def until_at(bench: Bench, node_id: int, address: str) -> None:
    async with asyncio.timeout(60):
        while True:
            status = await bench.administration.status()
            if any(member.node_id == node_id and member.address == address for member in status.members):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("asked", [False, True], ids=["by itself", "by the operator"])
@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_a_member_moves_to_another_address_with_its_disk(bench: Bench, asked: bool) -> None:
    await bench.put("a")
    moving = await bench.follower()
    await bench.quorum.servers[moving - 1].close()
    moved = await bench.node(moving)
    assert moved.address != bench.quorum.addresses[moving - 1]
    if asked:
        await bench.administration.add(moving, moved.address)
    await until_at(bench, moving, moved.address)
    assert await bench.voters() == [1, 2, 3]
    await bench.put("b")
    # The client knows it, too: with one more node gone, it is needed for the quorum.
    other = next(number for number in (1, 2, 3) if number != moving)
    await bench.quorum.servers[other - 1].close()
    await bench.put("c")
    found = bench.quorum.client.view.find(Quorum, QUORUM_KEY)
    assert found is not None
    assert moved.address in {member.address for member in found.members}


@pytest.mark.parametrize("bench", [3], indirect=True)
async def test_a_member_does_not_move_to_anothers_address(bench: Bench) -> None:
    leader = await bench.leader()
    other = next(number for number in (1, 2, 3) if number != leader)
    with pytest.raises(Invalid, match=f"is node {leader}, not {other}"):
        await bench.administration.add(other, bench.quorum.addresses[leader - 1])


@pytest.mark.parametrize("bench", [1], indirect=True)
async def test_nodes_that_may_not_be_added_are_refused(bench: Bench, tmp_path: Path) -> None:
    server = await bench.node(2)
    with pytest.raises(Unavailable, match="start it first"):
        await bench.administration.add(2, "127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(Invalid, match="is node 2, not 3"):
        await bench.administration.add(3, server.address)
    with pytest.raises(Invalid, match="the only voter"):
        await bench.administration.remove(1)
    with pytest.raises(Invalid, match="empty data_dir"):
        async with embedded_quorum(tmp_path / "other", bench.transport) as other:
            await bench.administration.add(1, other.addresses[0])


@pytest.mark.parametrize("bench", [1], indirect=True)
async def test_commands_cannot_change_the_members(bench: Bench) -> None:
    # The leader records the members as soon as it leads: before it takes a command of others.
    await bench.put("a")
    found = bench.quorum.client.view.find(Quorum, QUORUM_KEY)
    assert found is not None
    with pytest.raises(Invalid, match="cannot be put"):
        await bench.quorum.client.propose(Command(updates=(Put(record=found),)))


async def test_a_new_quorum_needs_all_of_its_nodes(tmp_path: Path) -> None:
    """Two emptied nodes must not start a new quorum without the third one, which has the old data."""
    transport = TcpTransport()
    async with embedded_quorum(tmp_path, transport, nodes=3, **PATIENT) as quorum:
        await quorum.client.propose(Command(updates=(Put(record=DynamicConfig(resource="a", configs={})),)))
        addresses = quorum.addresses
    for number in (1, 2):
        shutil.rmtree(tmp_path / str(number))
    background = ThreadBackground(4, "emptied")
    servers = []
    for number in (1, 2):
        settings = MetadataSettings(
            data_dir=str(tmp_path / str(number)), node_id=number, listen=addresses[number - 1], **PATIENT
        )
        files = SystemFiles(tmp_path / str(number))
        servers.append(MetadataServer(settings, transport, files, SystemClock(), random.Random(number), background))
    for server in servers:
        await server.start(dict(enumerate(addresses, 1)))
    administration = QuorumAdministration(addresses, transport, SystemClock(), random.Random(5))
    with pytest.raises(Unavailable, match="no metadata node answers"):
        await administration.status(timeout_s=1.5)
    for server in servers:
        await server.close()
    await transport.close()
    background.close()
