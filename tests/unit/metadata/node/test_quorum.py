"""Real nodes on real sockets and files: one embedded, and three of which one dies."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog_core.errors import Conflict, Corrupt, Invalid, OutcomeUnknown, StratalogError, Unavailable
from stratalog_core.rpc.tcp import TcpChannel, TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground
from stratalog_metadata.client.quorum_client import QuorumClient
from stratalog_metadata.node import server as server_module
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.peers import Peers
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import StatusAnswer, StatusRequest
from stratalog_metadata.raft import Message
from stratalog_metadata.raft.elections import Elections
from stratalog_metadata.raft.messages import TimeoutNow, VoteRequest
from stratalog_metadata.records import (
    CLUSTER_KEY,
    Broker,
    Cluster,
    Counter,
    DynamicConfig,
    Lease,
    Partition,
    Session,
    counter_key,
    dynamic_config_key,
    lease_key,
    session_key,
)
from stratalog_metadata.state.commands import Allocate, Command, Put, VersionIs
from stratalog_metadata.storage.state_store import SnapshotFileStore

TOPIC = UUID(int=11)
FAST: dict[str, Any] = {"election_timeout_ms": 200, "heartbeat_ms": 40}


def put(name: str, **configs: str) -> Command:
    return Command(updates=(Put(record=DynamicConfig(resource=name, configs=configs)),))


def names(client: QuorumClient) -> set[str]:
    return {config.resource for config in client.view.all(DynamicConfig)}


async def status(transport: TcpTransport, address: str) -> StatusAnswer:
    body = await transport.channel(address).call(messages.STATUS, (messages.encode(StatusRequest()),), 60.0)
    return messages.decode(body, StatusAnswer)


async def until(condition: asyncio.Future[None], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        await condition


def when(client: QuorumClient, predicate: object) -> asyncio.Future[None]:
    """Done once the view fulfils the predicate."""
    assert callable(predicate)
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def check(_: object = None) -> None:
        if predicate() and not future.done():
            stop()
            future.set_result(None)

    stop = client.view.subscribe(check)
    check()
    return future


# --- one node --------------------------------------------------------------------------------------------------------


async def test_a_proposal_is_in_the_view_when_it_returns(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        applied = await quorum.client.propose(put("a", key="value"))
        found = quorum.client.view.get("dynamic_config/a")
        assert found is not None
        assert found.version == applied.index
        assert quorum.client.view.index >= applied.index


async def test_a_conflict_is_in_the_view_when_it_is_raised(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum, a_client(quorum, transport) as other:
        applied = await other.propose(put("a"))
        command = Command(updates=(), requirements=(VersionIs(key="dynamic_config/a", version=0),))
        with pytest.raises(Conflict) as refused:
            await quorum.client.propose(command)
        assert refused.value.detail["found"] == applied.index
        assert quorum.client.view.get("dynamic_config/a") is not None


def a_client(quorum: EmbeddedQuorum, transport: TcpTransport) -> StartedClient:
    return StartedClient(QuorumClient(quorum.addresses, transport, SystemClock(), random.Random(3)))


class StartedClient:
    def __init__(self, client: QuorumClient) -> None:
        self._client = client

    async def __aenter__(self) -> QuorumClient:
        await self._client.start()
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


async def test_a_restart_keeps_everything(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        await asyncio.gather(*(quorum.client.propose(put(str(number))) for number in range(200)))
        cluster = quorum.client.view.find(Cluster, CLUSTER_KEY)
        allocated = (await quorum.client.propose(Command(updates=(Allocate(counter="x", count=7),)))).allocated
    async with embedded_quorum(tmp_path, transport) as quorum:
        assert names(quorum.client) == {str(number) for number in range(200)}
        assert quorum.client.view.find(Cluster, CLUSTER_KEY) == cluster
        again = await quorum.client.propose(Command(updates=(Allocate(counter="x", count=1),)))
        assert again.allocated == (allocated[0] + 7,)


async def test_an_abrupt_end_keeps_everything(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        for number in range(20):
            await quorum.client.propose(put(str(number)))
        await quorum.server.close(hand_over=False)
    async with embedded_quorum(tmp_path, transport) as quorum:
        assert names(quorum.client) == {str(number) for number in range(20)}


async def test_proposals_of_one_turn_share_a_request_and_fail_separately(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        wrong = Command(updates=(), requirements=(VersionIs(key=CLUSTER_KEY, version=77),))
        results = await asyncio.gather(
            *(quorum.client.propose(command) for command in (put("a"), wrong, put("b"))), return_exceptions=True
        )
        assert isinstance(results[1], Conflict)
        assert names(quorum.client) == {"a", "b"}


async def test_the_log_is_truncated_and_the_state_remains(tmp_path: Path, transport: TcpTransport) -> None:
    short: dict[str, Any] = {"snapshot_entries": 100, "kept_entries": 10, "log_segment_bytes": 4096}
    async with embedded_quorum(tmp_path, transport, **short) as quorum:
        proposed = await propose_until_cut(quorum, transport, after=100)
    assert not (tmp_path / "1" / "raft" / "log-0000000001").exists()
    async with embedded_quorum(tmp_path, transport, **short) as quorum:
        assert len(names(quorum.client)) == proposed


async def propose_until_cut(quorum: EmbeddedQuorum, transport: TcpTransport, after: int) -> int:
    """Propose until the leader's log begins behind the entry at ``after``; returns how many proposals that took."""
    leader = (await quorum.leader()).address
    for first in range(0, 10_000, 50):
        await asyncio.gather(*(keep_proposing(quorum.client, str(first + number)) for number in range(50)))
        if (await status(transport, leader)).log_first_index > after:
            return first + 50
    raise AssertionError("the log is never cut")


async def test_linearizable_reads_and_scans(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        await quorum.client.propose(put("a"))
        await quorum.client.propose(put("b"))
        a, missing = await quorum.client.read(["dynamic_config/a", "dynamic_config/z"])
        assert a is not None
        assert missing is None
        found = await quorum.client.scan("dynamic_config/")
        assert [stored.record.key() for stored in found] == ["dynamic_config/a", "dynamic_config/b"]


async def test_another_clients_changes_reach_the_view(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum, a_client(quorum, transport) as other:
        seen = when(quorum.client, lambda: "from the other" in names(quorum.client))
        await other.propose(put("from the other"))
        await until(seen)


async def test_a_view_that_is_too_far_behind_takes_a_snapshot(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, watch_entries=10) as quorum:
        await asyncio.gather(*(quorum.client.propose(put(str(number))) for number in range(500)))
        assert len(names(quorum.client)) == 500
        async with a_client(quorum, transport) as other:
            assert names(other) == names(quorum.client)


async def test_malformed_requests_are_refused(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        channel = transport.channel(quorum.addresses[0])
        for method in range(messages.PROPOSE, messages.STATUS):
            with pytest.raises(Invalid):
                await channel.call(method, (b"\xc1 not msgpack",), 60.0)
        with pytest.raises(Invalid, match="0x01ff"):
            await channel.call(0x01FF, (b"",), 60.0)
        bad_command = messages.encode(messages.ProposeRequest(commands=[b"\x80"]))
        with pytest.raises(Invalid, match="malformed command"):
            await channel.call(messages.PROPOSE, (bad_command,), 60.0)
        await quorum.client.propose(put("still works"))


async def test_the_client_reports_that_no_node_answers(transport: TcpTransport) -> None:
    client = QuorumClient(["127.0.0.1:1"], transport, SystemClock(), random.Random(1))
    with pytest.raises(Unavailable):
        await client.start(timeout_s=0.2)
    with pytest.raises(Unavailable):
        await client.propose(put("a"), timeout_s=0.2)


async def test_another_nodes_directory_is_refused(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport):
        pass
    (tmp_path / "1").rename(tmp_path / "2")
    background = ThreadBackground(2, "test")
    settings = MetadataSettings(data_dir=str(tmp_path / "2"), node_id=2, listen="127.0.0.1:0")
    files = SystemFiles(tmp_path / "2")
    server = MetadataServer(settings, transport, files, SystemClock(), random.Random(1), background)
    with pytest.raises(Invalid, match="metadata node 1, not 2"):
        await server.start()
    await server.close()
    background.close()


async def test_a_lost_log_is_refused(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        await quorum.client.propose(put("a"))
    for path in (tmp_path / "1" / "raft").iterdir():
        path.unlink()
    with pytest.raises(Corrupt, match="vote or log is missing"):
        async with embedded_quorum(tmp_path, transport):
            pass


async def test_a_failing_disk_stops_the_node_loudly(
    tmp_path: Path, transport: TcpTransport, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with embedded_quorum(tmp_path, transport) as quorum:
        assert quorum.server._node is not None
        log = quorum.server._node._storage.log
        assert log._file is not None
        log._file.close()
        with pytest.raises((OutcomeUnknown, Unavailable)):
            await quorum.client.propose(put("a"), timeout_s=2.0)
        async with asyncio.timeout(60):
            while quorum.server.failure is None:  # noqa: ASYNC110 - the server has no event for it, and needs none
                await asyncio.sleep(0.01)
    assert "the metadata node is stopping" in caplog.text


async def test_the_file_store_serves_as_well(tmp_path: Path, transport: TcpTransport) -> None:
    settings = MetadataSettings(data_dir=str(tmp_path), listen="127.0.0.1:0", snapshot_entries=100, kept_entries=10)
    for round_ in range(2):
        background = ThreadBackground(2, "test")
        files = SystemFiles(tmp_path)
        store = SnapshotFileStore(files)
        server = MetadataServer(settings, transport, files, SystemClock(), random.Random(1), background, store)
        await server.start()
        client = QuorumClient([server.address], transport, SystemClock(), random.Random(1))
        await client.start()
        assert len(names(client)) == round_ * 150
        await asyncio.gather(*(client.propose(put(str(number))) for number in range(150)))
        await client.close()
        await server.close()
        background.close()


# --- sessions --------------------------------------------------------------------------------------------------------


async def test_a_session_lives_as_long_as_it_is_renewed(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum, a_client(quorum, transport) as holder:
        expired: list[str] = []
        session_id = await holder.open_session("holder", 7_000, lambda: expired.append("once"))
        lease_ends_at = holder._sessions._held[session_id].deadline
        await holder.propose(Command(updates=(Put(record=Lease(name="work", session_id=session_id)),)))
        while SystemClock().monotonic() <= lease_ends_at:  # noqa: ASYNC110 - after that only renewals can keep it
            await asyncio.sleep(0.1)
        assert not expired
        await quorum.client.refresh()
        assert quorum.client.view.get(lease_key("work")) is not None
        gone = when(quorum.client, lambda: quorum.client.view.get(lease_key("work")) is None)
        await holder.close()
        await until(gone)
        assert not expired, "who closes its client knows"


async def test_closing_a_session_ends_it_at_once(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        session_id = await quorum.client.open_session("holder", 60_000, lambda: None)
        await quorum.client.propose(Command(updates=(Put(record=Lease(name="work", session_id=session_id)),)))
        await quorum.client.close_session(session_id)
        assert quorum.client.view.get(lease_key("work")) is None
        assert not list(quorum.client.view.all(Session))


async def test_a_holder_that_cannot_renew_stops_before_the_quorum_ends_its_session(
    tmp_path: Path, transport: TcpTransport
) -> None:
    """By its own clock: on one event loop that stands still, both are noticed at the same moment, in any order."""
    stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    wires = CutTransport()
    async with embedded_quorum(tmp_path, transport) as quorum, a_client(quorum, wires) as holder:
        session_id = await holder.open_session("holder", 2_000, lambda: stopped.set_result(None))
        await until(when(quorum.client, lambda: quorum.client.view.get(session_key(session_id)) is not None))
        ended = when(quorum.client, lambda: quorum.client.view.get(session_key(session_id)) is None)
        wires.cut(quorum.addresses[0])
        stops_at = holder._sessions._held[session_id].deadline
        await until(ended)
        assert SystemClock().monotonic() >= stops_at
        await until(stopped)
    await wires.close()


class CutTransport(TcpTransport):
    """A real transport that reaches nobody once it is cut, so that its client learns nothing from the quorum either."""

    def __init__(self) -> None:
        super().__init__()
        self._is_cut = False

    def cut(self, address: str) -> None:
        connection = self.channel(address)._connection
        assert connection is not None
        self._is_cut = True
        connection.abort()

    def channel(self, address: str) -> TcpChannel:
        return super().channel("127.0.0.1:1" if self._is_cut else address)


async def test_the_holder_is_told_when_somebody_else_ends_its_session(tmp_path: Path, transport: TcpTransport) -> None:
    expired: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with embedded_quorum(tmp_path, transport) as quorum, a_client(quorum, transport) as holder:
        session_id = await holder.open_session("holder", 800, lambda: expired.set_result(None))
        await quorum.client.close_session(session_id)
        await until(expired)


# --- the controller, for real ----------------------------------------------------------------------------------------


async def register(client: QuorumClient, broker_id: int, lease_ms: int = 60_000) -> int:
    session_id = await client.open_session(f"broker {broker_id}", lease_ms, lambda: None)
    record = Broker(broker_id=broker_id, host="127.0.0.1", port=9092, session_id=session_id)
    await client.propose(Command(updates=(Put(record=record),)))
    return session_id


def owners(client: QuorumClient) -> set[int]:
    return {partition.owner for partition in client.view.all(Partition)}


async def test_a_dead_brokers_partitions_get_a_live_owner(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum, a_client(quorum, transport) as dying:
        client = quorum.client
        await register(client, 1)
        await register(dying, 2, lease_ms=6_000)
        both = when(client, lambda: owners(client) == {1, 2})
        partitions = tuple(Put(record=Partition(topic_id=TOPIC, index=index)) for index in range(100))
        await client.propose(Command(updates=partitions))
        await until(both)
        moved = when(client, lambda: owners(client) == {1})
        await dying.close()
        await until(moved)
        assert sorted({partition.leader_epoch for partition in client.view.all(Partition)}) == [1, 2]


# --- three nodes -----------------------------------------------------------------------------------------------------


async def test_three_nodes_survive_the_leaders_death(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=3, **FAST) as quorum:
        for number in range(20):
            await keep_proposing(quorum.client, str(number))
        await (await quorum.leader()).close(hand_over=False)
        async with asyncio.timeout(60):
            await keep_proposing(quorum.client, "after")
        assert names(quorum.client) >= {str(number) for number in range(20)}
        assert "after" in names(quorum.client)


async def keep_proposing(client: QuorumClient, name: str) -> None:
    """Act as a caller does: after OutcomeUnknown read the state; repeat the command only because repeating is harmless."""
    while client.view.get(dynamic_config_key(name)) is None:
        try:
            await client.propose(put(name))
        except (OutcomeUnknown, Unavailable):
            await client.refresh()


async def test_a_leader_that_is_shut_down_hands_over_without_a_gap(
    tmp_path: Path, transport: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Message] = []
    send = Peers.send

    def record(peers: Peers, outgoing: Sequence[Message]) -> None:
        sent.extend(outgoing)
        send(peers, outgoing)

    monkeypatch.setattr(Peers, "send", record)
    monkeypatch.setattr(server_module, "HAND_OVER_TIMEOUT_S", 60.0)
    # Until there is a leader, the nodes ask for votes one by one; after that, not for a minute.
    monkeypatch.setattr(Elections, "_first_timeout", lambda elections: 10.0 * elections._settings.node_id - 9.5)
    async with embedded_quorum(tmp_path, transport, nodes=3, election_timeout_ms=60_000) as quorum:
        await quorum.client.propose(put("before"))
        leader = await quorum.leader()
        sent.clear()
        await leader.close()
        monkeypatch.setattr(server_module, "HAND_OVER_TIMEOUT_S", 0.5)  # the last two nodes may close at the same time
        await keep_proposing(quorum.client, "after")
        (order,) = [message for message in sent if isinstance(message, TimeoutNow)]
        votes = [message for message in sent if isinstance(message, VoteRequest)]
        asked = {(vote.sender, vote.pre, vote.transfer) for vote in votes}
        assert asked == {(order.receiver, False, True)}, "nobody waited for an election timeout"


async def test_a_node_that_was_away_catches_up(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=3) as quorum:
        away = await close_a_follower(quorum)
        await asyncio.gather(*(keep_proposing(quorum.client, str(number)) for number in range(50)))
        await check_catching_up(quorum, transport, away)


async def test_a_node_that_was_away_for_long_gets_a_snapshot(tmp_path: Path, transport: TcpTransport) -> None:
    short: dict[str, Any] = {"snapshot_entries": 100, "kept_entries": 20}
    async with embedded_quorum(tmp_path, transport, nodes=3, **short) as quorum:
        away = await close_a_follower(quorum)
        await propose_until_cut(quorum, transport, after=100)
        await check_catching_up(quorum, transport, away)


async def close_a_follower(quorum: EmbeddedQuorum) -> int:
    away = next(node_id for node_id, server in enumerate(quorum.servers, start=1) if not server.is_leader)
    await quorum.servers[away - 1].close(hand_over=False)
    return away


async def check_catching_up(quorum: EmbeddedQuorum, transport: TcpTransport, away: int) -> None:
    """A view that only the returned node feeds is complete once the node is."""
    await quorum.restart(away)
    client = QuorumClient([quorum.addresses[away - 1]], transport, SystemClock(), random.Random(3))
    await client.start()
    assert names(client) == names(quorum.client)
    await client.close()


async def test_without_a_quorum_commands_are_refused(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=3, **FAST) as quorum:
        leader = await quorum.leader()
        for server in quorum.servers:
            if server is not leader:
                await server.close(hand_over=False)
        with pytest.raises((OutcomeUnknown, Unavailable)):
            await quorum.client.propose(put("never answered"), timeout_s=1.0)
        with pytest.raises(Unavailable):
            await quorum.client.refresh(timeout_s=0.5)


async def test_a_command_is_never_applied_twice_whichever_node_dies(tmp_path: Path, transport: TcpTransport) -> None:
    """Counted by a counter: known successes are exactly once, unknown ones at most once."""
    async with embedded_quorum(tmp_path, transport, nodes=3, **FAST) as quorum:
        known, unknown = 0, 0

        async def count() -> None:
            nonlocal known, unknown
            try:
                await quorum.client.propose(Command(updates=(Allocate(counter="x", count=1),)), timeout_s=60.0)
                known += 1
            except OutcomeUnknown:
                unknown += 1

        leader = await quorum.leader()
        first = [asyncio.ensure_future(count()) for _ in range(50)]
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(leader.close(hand_over=False))
        second = [asyncio.ensure_future(count()) for _ in range(50)]
        await asyncio.gather(*first, *second, closing)
        assert known + unknown == 100
        reached = await counter_reached(quorum.client)
        assert known <= reached <= known + unknown


async def counter_reached(client: QuorumClient) -> int:
    await client.refresh(timeout_s=60.0)
    found = client.view.find(Counter, counter_key("x"))
    return found.next_value - Counter(name="x").next_value if found is not None else 0


async def test_all_nodes_know_the_cluster(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, nodes=3, cluster_id="abcdefghijklmnopqrstuv") as quorum:
        await quorum.client.propose(put("a"))
        cluster = quorum.client.view.find(Cluster, CLUSTER_KEY)
        assert cluster is not None
        assert cluster.cluster_id == "abcdefghijklmnopqrstuv"
        async with asyncio.timeout(60):
            while True:  # Followers learn of both from the leader's next message.
                shown = [await status(transport, address) for address in quorum.addresses]
                if {one.cluster_id for one in shown} == {"abcdefghijklmnopqrstuv"} and len({one.leader for one in shown}) == 1:
                    break


async def test_a_peer_of_another_cluster_is_refused(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport, cluster_id="one") as quorum:
        envelope = messages.RaftEnvelope(cluster_id="other", messages=msgspec.Raw(b"\x90"))
        with pytest.raises(StratalogError, match="cluster one"):
            await transport.channel(quorum.addresses[0]).call(messages.RAFT, (messages.encode(envelope),), 60.0)
