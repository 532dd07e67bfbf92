"""``stratalog cluster remove`` of a node that the quorum does not have, as after an addition that failed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from support.embedded_quorum import embedded_quorum

from stratalog.local import processes
from stratalog.local.launcher import LocalCluster
from stratalog.local.quorum import remove_metadata
from stratalog.local.state import ClusterState, ProcessState, load_state, save_state
from stratalog_core.rpc.tcp import TcpTransport

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


async def test_a_node_that_is_no_member_is_stopped_and_forgotten(tmp_path: Path) -> None:
    transport = TcpTransport()
    async with embedded_quorum(tmp_path / "metadata", transport) as quorum:
        (address,) = quorum.addresses
        member = ProcessState(name="metadata-1", role="metadata", address=address)
        stranger = ProcessState(name="metadata-7", role="metadata", address="127.0.0.1:1")
        stranger = processes.launch(stranger, SLEEPER, log=tmp_path / "log", environ={})
        try:
            save_state(
                tmp_path, ClusterState(bootstrap="", metadata=address, store="/store", processes=(member, stranger))
            )  # fmt: skip
            said: list[str] = []
            local = LocalCluster(tmp_path, said.append)
            await asyncio.to_thread(remove_metadata, local, "metadata-7", timeout_s=30.0)
            assert processes.running(stranger) is None
            assert load_state(tmp_path).processes == (member,)
        finally:
            processes.kill(stranger)
    await transport.close()
