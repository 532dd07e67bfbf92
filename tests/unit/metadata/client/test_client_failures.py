"""A process with a part that cannot follow the metadata log ends, and stops being an owner at once."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from support.embedded_quorum import embedded_quorum

from stratalog.exit_codes import ExitCode
from stratalog_core.errors import StratalogError
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.records import DynamicConfig, Session
from stratalog_metadata.state.commands import Command, ExpireSession, Put

TIMEOUT_S = 60
PUT = Command(updates=(Put(record=DynamicConfig(resource="a", configs={})),))
ROLE = """
import asyncio, sys
from pathlib import Path
from stratalog.roles import metadata
from stratalog.roles.runtime import Configuration, run
from stratalog_metadata.state.commands import Command, Put
from stratalog_metadata.records import DynamicConfig

def fails(changes):
    raise KeyError("no such partition")

async def start(node):
    node.find_metadata_at(await metadata.start(node))
    client = await node.metadata()
    client.view.subscribe(fails)
    await client.propose(Command(updates=(Put(record=DynamicConfig(resource="a", configs={})),)))
    return "nowhere"

tables = {"metadata": {"data_dir": sys.argv[1], "listen": "127.0.0.1:0"}}
run(Configuration(file=None, overrides=tables), "test", start)
"""


def fails(changes: object) -> None:
    raise KeyError("no such partition")


async def test_a_failed_subscriber_ends_all_sessions_and_refuses_commands(tmp_path: Path, transport: TcpTransport) -> None:
    async with embedded_quorum(tmp_path, transport) as quorum:
        client, expired = quorum.client, list[str]()
        first = await client.open_session("owner", 60_000, lambda: expired.append("owner"))
        await client.open_session("another", 60_000, lambda: expired.append("another"))
        assert client.failure is None
        client.view.subscribe(fails)
        await client.propose(PUT)
        assert expired == ["owner", "another"]
        assert client.failure is not None
        for refused in (client.propose(PUT), client.open_session("again", 60_000, lambda: None)):
            with pytest.raises(StratalogError, match=r"may be stale.*no such partition.*restart it"):
                await refused
        await client.close_session(first)
        assert [session.holder for session in client.view.all(Session)] == ["another"]


async def test_a_session_holder_that_fails_to_stop_does_not_keep_the_others(tmp_path: Path, transport: TcpTransport) -> None:
    def on_expired() -> None:
        raise RuntimeError("still serving")

    async with embedded_quorum(tmp_path, transport) as quorum:
        client, expired = quorum.client, asyncio.Event()
        session_id = await client.open_session("fails", 60_000, on_expired)
        await client.open_session("another", 60_000, expired.set)
        await client.propose(Command(updates=(ExpireSession(session_id=session_id),)))
        async with asyncio.timeout(TIMEOUT_S):
            await expired.wait()
        assert client.failure is not None


def test_a_process_that_cannot_follow_the_log_ends_with_an_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROLE, str(tmp_path)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == ExitCode.FAILED
    assert "test failed: part of this process could not follow the metadata log" in done.stderr
