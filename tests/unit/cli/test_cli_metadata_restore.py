"""``stratalog metadata restore`` on the directory of a stopped node."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.embedded_quorum import embedded_quorum
from unit.metadata.watching import until

from stratalog.app import stratalog
from stratalog_core.errors import Conflict, NotFound
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemFiles
from stratalog_metadata.records import QUORUM_KEY, Quorum
from stratalog_metadata.storage.identity import IDENTITY_FILE

WAIT_S = 60.0


async def _members(path: Path) -> list[str]:
    """Start the node of ``path/1`` and return the identities of its quorum's members."""
    transport = TcpTransport()
    async with embedded_quorum(path, transport) as quorum:
        client = quorum.client
        await until(client, lambda: client.view.get(QUORUM_KEY) is not None, WAIT_S)
        found = client.view.find(Quorum, QUORUM_KEY)
        assert found is not None
        members = [member.identity for member in found.members]
    await transport.close()
    return members


def test_the_node_of_a_directory_becomes_the_only_member(tmp_path: Path) -> None:
    before = asyncio.run(_members(tmp_path))
    done = CliRunner().invoke(stratalog, ["metadata", "restore", str(tmp_path / "1"), "--yes", "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == {"node": 1, "state": "restored"}
    after = asyncio.run(_members(tmp_path))
    assert len(before) == len(after) == 1
    assert after != before


def test_an_interrupted_restore_is_repeated(tmp_path: Path) -> None:
    """The new identity is stored last."""
    asyncio.run(_members(tmp_path))
    identity = tmp_path / "1" / IDENTITY_FILE
    before = identity.read_bytes()
    for _ in range(2):
        identity.write_bytes(before)
        done = CliRunner().invoke(stratalog, ["metadata", "restore", str(tmp_path / "1"), "--yes"])
        assert done.exit_code == 0, done.stderr
    assert len(asyncio.run(_members(tmp_path))) == 1


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_a_directory_without_a_node_is_not_found(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(stratalog, ["metadata", "restore", str(tmp_path / name), "--yes"])
    assert isinstance(done.exception, NotFound)
    assert "is no data_dir of a metadata node" in done.exception.message
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]
    assert list((tmp_path / "empty").iterdir()) == []


def test_the_directory_of_a_running_node_is_refused(tmp_path: Path) -> None:
    asyncio.run(_members(tmp_path))
    unlock = SystemFiles(tmp_path / "1").lock()
    done = CliRunner().invoke(stratalog, ["metadata", "restore", str(tmp_path / "1"), "--yes"])
    unlock()
    assert isinstance(done.exception, Conflict)
    assert "is in use by pid" in done.exception.message
