"""Members of a local cluster: nodes that are added and removed while other commands change it, and its credentials."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from support.embedded_quorum import embedded_quorum

from stratalog.local import processes
from stratalog.local.launcher import LocalCluster
from stratalog.local.quorum import enter_node, remove_metadata
from stratalog.local.secrets import make_store_credentials, store_environment
from stratalog.local.state import ClusterState, ProcessState, changing, load_state, save_state
from stratalog_core.rpc.tcp import TcpTransport

SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]


async def test_a_node_that_is_no_member_is_stopped_and_forgotten(tmp_path: Path) -> None:
    """The quorum does not have it, as after an addition that failed."""
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


def _cluster(data: Path) -> LocalCluster:
    (data / "config").mkdir(parents=True)
    (data / "config" / "metadata-1.toml").write_text('[node]\n\n[metadata]\nnode_id = 1\npeers = ["1=127.0.0.1:1"]\n')
    processes = (
        ProcessState(name="metadata-1", role="metadata", address="127.0.0.1:1"),
        ProcessState(name="broker-1", role="broker", address="127.0.0.1:2"),
    )
    save_state(data, ClusterState(bootstrap="", metadata="127.0.0.1:1", store="/store", processes=processes))
    return LocalCluster(data, lambda _: None)


def test_a_node_is_entered_when_no_other_command_changes_the_cluster(tmp_path: Path) -> None:
    """The pid that another command saves meanwhile is not lost: `cluster stop` would not find the process."""
    local = _cluster(tmp_path)
    entering = threading.Thread(target=enter_node, args=[local])
    with changing(tmp_path):
        before = load_state(tmp_path)
        entering.start()
        entering.join(1)  # It ends here only if it does not wait.
        started = msgspec.structs.replace(before.process("broker-1"), pid=4711)
        save_state(tmp_path, before.replaced(started))
    entering.join(60)
    after = load_state(tmp_path)
    assert [process.name for process in after.processes] == ["metadata-1", "metadata-2", "broker-1"]
    assert after.process("broker-1").pid == 4711


def test_nodes_that_are_entered_at_the_same_time_have_different_names(tmp_path: Path) -> None:
    local = _cluster(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        entered = [found.result()[1] for found in [pool.submit(enter_node, local) for _ in range(4)]]
    assert sorted(process.name for process in entered) == [f"metadata-{number}" for number in range(2, 6)]
    assert {process.name for process in load_state(tmp_path).of_role("metadata")} >= {process.name for process in entered}


def test_credentials_that_cannot_be_written_leave_no_file(tmp_path: Path) -> None:
    """Later starts would take an empty file for the credentials."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); make_store_credentials(Path(sys.argv[1]))"
    program = f"import sys; from pathlib import Path; from stratalog.local.secrets import make_store_credentials; {limited}"
    command = [sys.executable, "-B", "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert "File too large" in done.stderr
    assert list((tmp_path / "config").iterdir()) == []
    make_store_credentials(tmp_path)
    (file,) = (tmp_path / "config").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert {*store_environment(tmp_path)} == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
