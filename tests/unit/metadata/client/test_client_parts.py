"""The client's view and routing without a network; settings and identity."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from stratalog_core.config import load
from stratalog_core.errors import Corrupt, Invalid, NotLeader, OutcomeUnknown, Unavailable
from stratalog_core.ports import OnReply, Transport
from stratalog_core.system import SystemClock, SystemFiles
from stratalog_metadata.client.proposer import Proposer
from stratalog_metadata.client.routing import BACKOFF_S_MAX, Router
from stratalog_metadata.client.view import LocalView
from stratalog_metadata.node.config import MetadataSettings
from stratalog_metadata.node.recent_changes import RecentChanges
from stratalog_metadata.protocol.messages import KeyChange
from stratalog_metadata.records import DynamicConfig, Topic, Versioned
from stratalog_metadata.state.changes import Change
from stratalog_metadata.state.commands import Command
from stratalog_metadata.state.snapshot import StateImage
from stratalog_metadata.storage import identity


def stored(name: str, version: int) -> Versioned:
    return Versioned(version, DynamicConfig(resource=name))


def key(name: str) -> str:
    return f"dynamic_config/{name}"


# --- view ------------------------------------------------------------------------------------------------------------


async def test_the_view_follows_and_reports_changes() -> None:
    view = LocalView()
    told: list[Change] = []
    stop = view.subscribe(told.extend)
    view.follow(3, [[KeyChange(key("a"), stored("a", 2))], [KeyChange(key("a"), stored("a", 3))]])
    assert view.index == 3
    assert told == [Change(key("a"), None, stored("a", 2)), Change(key("a"), stored("a", 2), stored("a", 3))]
    stop()
    view.follow(4, [[KeyChange(key("a"), None)]])
    assert len(told) == 2
    assert view.get(key("a")) is None


async def test_the_view_finds_by_kind() -> None:
    view = LocalView()
    view.jump(StateImage(index=5, term=1, records=[stored("b", 1), stored("a", 2)]))
    assert [config.resource for config in view.all(DynamicConfig)] == ["a", "b"]
    assert view.find(DynamicConfig, key("a")) == DynamicConfig(resource="a")
    assert view.find(Topic, key("a")) is None
    assert list(view.all(Topic)) == []


async def test_a_snapshot_reports_only_the_difference() -> None:
    view = LocalView()
    view.jump(StateImage(index=5, term=1, records=[stored("same", 1), stored("old", 2), stored("gone", 3)]))
    told: list[Change] = []
    view.subscribe(told.extend)
    view.jump(StateImage(index=9, term=1, records=[stored("same", 1), stored("old", 8), stored("new", 9)]))
    assert {(change.key, change.after.version if change.after else None) for change in told} == {
        (key("gone"), None),
        (key("old"), 8),
        (key("new"), 9),
    }
    view.jump(StateImage(index=7, term=1, records=[]))
    assert view.index == 9, "never backwards"


async def test_a_failed_subscriber_is_reported_and_does_not_affect_the_others(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = []
    view = LocalView(failures.append)
    told: list[Change] = []
    mistake = RuntimeError("a mistake")

    def fails(changes: object) -> None:
        raise mistake

    view.subscribe(fails)
    view.subscribe(told.extend)
    view.follow(1, [[KeyChange(key("a"), stored("a", 1))]])
    assert len(told) == 1
    assert failures == [mistake]
    assert "a mistake" in caplog.text


async def test_waiting_for_an_index_that_is_already_reached() -> None:
    view = LocalView()
    view.follow(4, [])
    await view.reached(4)


# --- recent changes --------------------------------------------------------------------------------------------------


def test_recent_changes_are_bounded_and_report_what_is_missing() -> None:
    recent = RecentChanges(10, entries_max=3, bytes_max=100_000)
    for index in range(11, 18):
        recent.add(index, [Change(key("a"), None, stored("a", index))] if index % 2 else [])
    assert recent.since(17).changes == []
    assert [len(recent.since(index).changes) for index in (11, 12, 13, 16)] == [3, 3, 2, 1]
    assert recent.since(10).too_old
    assert not recent.since(11).too_old


def test_recent_changes_are_bounded_in_bytes() -> None:
    recent = RecentChanges(0, entries_max=1000, bytes_max=200)
    for index in range(1, 50):
        recent.add(index, [Change(key("a" * 30), None, stored("a" * 30, index))])
    assert recent.since(1).too_old
    assert len(recent.since(recent.floor).changes) < 4


# --- routing ---------------------------------------------------------------------------------------------------------


def test_the_router_follows_the_leader_and_backs_off() -> None:
    router = Router(["a:1", "b:1", "c:1"], random.Random(1))
    assert router.address == "a:1"
    assert router.failed(NotLeader("", leader="c:1")) == 0.0
    assert router.address == "c:1"
    router.succeeded()
    waits = [router.failed(Unavailable()) for _ in range(12)]
    assert waits[0] < waits[-1] <= BACKOFF_S_MAX
    assert len({router.address for _ in range(3) if router.failed(Unavailable()) or True}) == 3


def test_nodes_that_redirect_to_each_other_cause_no_busy_loop() -> None:
    router = Router(["a:1", "b:1"], random.Random(1))
    assert router.failed(NotLeader("", leader="b:1")) == 0.0
    assert router.failed(NotLeader("", leader="a:1")) > 0.0


def test_no_addresses_are_refused() -> None:
    with pytest.raises(Invalid, match="HOST:PORT"):
        Router([], random.Random(1))


# --- proposing -------------------------------------------------------------------------------------------------------


class _SilentTransport:
    """A network of nodes that take requests and never answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    def channel(self, address: str) -> Any:
        return self

    def send(self, *_: object) -> None:
        self.asked.set()


async def test_requests_leave_a_silent_leader_when_another_leads() -> None:
    transport = _SilentTransport()
    proposer = Proposer(["a:1", "b:1"], cast(Transport, transport), SystemClock(), random.Random(1), LocalView())
    proposing = asyncio.create_task(proposer.propose(Command(updates=()), timeout_s=600))
    await transport.asked.wait()
    proposer.leader_moved("a:1")
    await asyncio.sleep(0)
    assert not proposing.done(), "the one that was asked leads"
    proposer.leader_moved("b:1")
    with pytest.raises(OutcomeUnknown, match="a:1 did not answer, and b:1 leads now"):
        await proposing
    await proposer.close()


async def test_a_proposal_of_the_turn_in_which_the_client_is_closed_is_not_sent() -> None:
    transport = _SilentTransport()
    proposer = Proposer(["a:1"], cast(Transport, transport), SystemClock(), random.Random(1), LocalView())
    proposing = asyncio.create_task(proposer.propose(Command(updates=()), timeout_s=600))
    closing = asyncio.create_task(proposer.close())
    await closing
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable, match="closed"):
            await proposing
    assert not transport.asked.is_set()


class _PunctualTransport:
    """Silent nodes, and channels that report a request that was not answered in its time."""

    def channel(self, address: str) -> Any:
        return self

    def send(self, method: int, parts: object, on_reply: OnReply, timeout_s: float) -> None:
        asyncio.get_running_loop().call_later(timeout_s, on_reply, OutcomeUnknown("no answer in time"))


@pytest.mark.parametrize("timeouts_s", [(0.05, 600.0), (600.0, 0.05)])
async def test_a_proposal_does_not_wait_for_the_others_of_its_turn(timeouts_s: tuple[float, float]) -> None:
    proposer = Proposer(["a:1"], cast(Transport, _PunctualTransport()), SystemClock(), random.Random(1), LocalView())
    begun = {timeout_s: asyncio.create_task(proposer.propose(Command(updates=()), timeout_s)) for timeout_s in timeouts_s}
    async with asyncio.timeout(30):
        with pytest.raises(OutcomeUnknown, match="in time"):
            await begun[0.05]
    assert not begun[600.0].done()
    await proposer.close()
    with pytest.raises(OutcomeUnknown, match="was closed"):
        await begun[600.0]


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_loaded_with_their_bounds(tmp_path: Path) -> None:
    overrides = {"data_dir": str(tmp_path), "peers": "1=a:1,2=b:2", "node_id": 2}
    settings = load(MetadataSettings, section="metadata", overrides=overrides)
    assert settings.peer_addresses() == {1: "a:1", 2: "b:2"}
    assert settings.raft().election_timeout_s == 0.5
    with pytest.raises(Invalid, match="election_timeout_ms"):
        load(MetadataSettings, section="metadata", overrides={**overrides, "election_timeout_ms": 1})


@pytest.mark.parametrize(
    "peers", [("1=a:1", "1=b:1"), ("a:1",), ("x=a:1",), ("0=a:1",), ("1=",), ("2=a:1",), ("1=a",), ("1=a..b:1",)]
)
def test_invalid_peers_are_refused(peers: tuple[str, ...]) -> None:
    with pytest.raises(Invalid, match="peers"):
        MetadataSettings(data_dir="/nowhere", peers=peers).peer_addresses()


def test_inconsistent_intervals_are_refused() -> None:
    with pytest.raises(Invalid, match="half of election_timeout_ms"):
        MetadataSettings(data_dir="/nowhere", heartbeat_ms=300, election_timeout_ms=500).raft()


# --- identity --------------------------------------------------------------------------------------------------------


def claim(files: SystemFiles, node_id: int, cluster_id: str) -> identity.Identity:
    return identity.claim(files, node_id, cluster_id, random.Random(3))


def test_a_directory_is_claimed_once(tmp_path: Path) -> None:
    files = SystemFiles(tmp_path)
    assert claim(files, 3, "").cluster_id == ""
    identity.remember(files, msgspec.structs.replace(claim(files, 3, ""), cluster_id="cluster"))
    assert claim(files, 3, "").cluster_id == "cluster"
    assert claim(files, 3, "cluster").cluster_id == "cluster"
    with pytest.raises(Invalid, match="node 3, not 4"):
        claim(files, 4, "")
    with pytest.raises(Invalid, match="cluster cluster, not other"):
        claim(files, 3, "other")


def test_a_configured_cluster_is_remembered(tmp_path: Path) -> None:
    files = SystemFiles(tmp_path)
    claim(files, 1, "")
    claim(files, 1, "given")
    with pytest.raises(Invalid):
        claim(files, 1, "other")


def test_a_damaged_identity_is_refused(tmp_path: Path) -> None:
    (tmp_path / identity.IDENTITY_FILE).write_text("{")
    with pytest.raises(Corrupt):
        claim(SystemFiles(tmp_path), 1, "")
