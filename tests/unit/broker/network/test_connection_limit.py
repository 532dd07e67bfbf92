"""A connection over the limit is closed at once and logged once, and the others are served."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

import pytest
from unit.broker.mini_cluster import run_cluster

from stratalog_broker.network import registry

_LIMIT = 3


async def test_a_connection_over_the_limit_is_closed_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_REFUSALS_TOLD_S", 3600.0)
    async with run_cluster(tmp_path, connections_max=_LIMIT) as cluster:
        host, _, port = cluster.bootstrap.rpartition(":")
        with caplog.at_level(logging.INFO, "stratalog_broker"):
            writers = []
            for number in range(4 * _LIMIT):
                reader, writer = await asyncio.open_connection(host, int(port))
                writers.append(writer)
                if number >= _LIMIT:
                    with contextlib.suppress(ConnectionError):
                        assert await reader.read() == b""
        connections = cluster.brokers[1].server.connections
        assert (len(connections), connections.refused) == (_LIMIT, 3 * _LIMIT)
        assert sum("connections_max" in record.getMessage() for record in caplog.records) == 1
        assert not any("closing the connection" in record.getMessage() for record in caplog.records)
        for writer in writers:
            writer.close()
