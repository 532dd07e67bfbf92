"""What a node does no more once it has stopped: its state may be wrong, or its requests are answered."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from support.asked_request import AskedRequest
from support.embedded_quorum import embedded_quorum

from stratalog_core.errors import Corrupt, Unavailable
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.protocol import messages
from stratalog_metadata.protocol.messages import ReadRequest


async def test_a_leader_that_has_failed_decides_nothing(tmp_path: Path, transport: TcpTransport) -> None:
    """As when the other nodes have found that its state is wrong. Its controller must not end the sessions that it refuses."""
    async with embedded_quorum(tmp_path, transport) as quorum:
        ended = asyncio.Event()
        await quorum.client.open_session("a broker", 300, ended.set)
        server = quorum.server
        server._failed(Corrupt("its state differs from a majority's"))
        assert server._core is not None
        last_index = server._core.log.last_index
        async with asyncio.timeout(60):
            await ended.wait()
        assert not server.is_leader
        assert server._core.log.last_index == last_index


async def test_a_read_that_waits_when_its_node_fails_is_answered_once(
    tmp_path: Path, transport: TcpTransport, caplog: pytest.LogCaptureFixture
) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        request = AskedRequest(messages.READ, ReadRequest(keys=[]))
        quorum.server._handle(request)
        quorum.server._failed(Corrupt("its state differs from a majority's"))
        await asyncio.sleep(0)
        assert isinstance(request.answer, Unavailable)
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []
