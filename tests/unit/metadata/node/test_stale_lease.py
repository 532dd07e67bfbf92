"""A leader that was suspended, and finds messages in its sockets before it knows how much time has passed.

Another node may lead by now, and may have changed the members.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from support.asked_request import AskedRequest
from support.embedded_quorum import EmbeddedQuorum, embedded_quorum

from stratalog_core.errors import Fenced, StratalogError
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock
from stratalog_metadata.node.server import MetadataServer
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import HelloAnswer, HelloRequest, RaftEnvelope

PATIENT: dict[str, Any] = {"election_timeout_ms": 500, "heartbeat_ms": 50}


class SuspendedClock(SystemClock):
    """A clock that skips the time for which the process was suspended."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def monotonic(self) -> float:
        return SystemClock.monotonic() + self.skipped_s


def message_of_a_new_member(server: MetadataServer) -> bytes | StratalogError | None:
    """The answer to a node that joined while this one was suspended."""
    body = RaftEnvelope(cluster_id="", messages=msgspec.Raw(msgspec.msgpack.encode([])), node_id=4, identity="new")
    asked = AskedRequest(messages.RAFT, body)
    server._handle(asked)
    return asked.answer


def leads(server: MetadataServer) -> bool:
    asked = AskedRequest(messages.HELLO, HelloRequest())
    server._handle(asked)
    assert isinstance(asked.answer, bytes)
    return messages.decode(asked.answer, HelloAnswer).leads


async def leading(quorum: EmbeddedQuorum) -> MetadataServer:
    """The leader, once it says that it is."""
    leader = await quorum.leader()
    while not leads(leader):
        await quorum.client.refresh(60.0)
        leader = await quorum.leader()
    return leader


async def test_a_leader_that_was_suspended_ends_no_new_member(tmp_path: Path, transport: TcpTransport) -> None:
    clock = SuspendedClock()
    async with embedded_quorum(tmp_path, transport, nodes=3, clock=clock, **PATIENT) as quorum:
        leader = await leading(quorum)
        assert isinstance(message_of_a_new_member(leader), Fenced)
        clock.skipped_s = 10.0
        assert message_of_a_new_member(leader) == b""


async def test_a_leader_that_was_suspended_does_not_say_that_it_leads(tmp_path: Path, transport: TcpTransport) -> None:
    clock = SuspendedClock()
    async with embedded_quorum(tmp_path, transport, nodes=3, clock=clock, **PATIENT) as quorum:
        leader = await leading(quorum)
        clock.skipped_s = 10.0
        assert not leads(leader)
