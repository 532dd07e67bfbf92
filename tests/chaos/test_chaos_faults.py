"""Fault injection: disks with a control file, links through a proxy, and the schedule of faults."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from chaos.cluster import ChaosCluster
from chaos.faulty_files import DiskFault, FaultyFiles, clear_fault, set_fault
from chaos.history import Recorder
from chaos.links import CLIENTS, Link, between
from chaos.nemesis import Nemesis
from chaos.proxy_process import ProxyProcess
from chaos.schedule import Fault, Schedule, Step
from stratalog.exit_codes import ExitCode

WAIT_S = 60


class Disk:
    def __init__(self, directory: Path) -> None:
        self.control = directory / "control.json"
        self.files = FaultyFiles(directory / "disk", faults=self.control)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_a_disk_without_a_fault_is_a_disk(disk: Disk) -> None:
    with closing(disk.files.open("a", create=True)) as file:
        file.allocate(8)
        file.pwritev([b"one", b"two"], 0)
        file.datasync()
        assert file.pread(6, 0) == b"onetwo"
    disk.files.write_atomic("b", b"x")
    assert disk.files.read("b") == b"x"
    assert disk.files.free_bytes() > 0


def test_failing_operations_fail_until_the_fault_ends(disk: Disk) -> None:
    with closing(disk.files.open("a", create=True)) as file:
        set_fault(disk.control, DiskFault(failing=("sync", "read")))
        file.pwritev([b"one"], 0)
        for failing in (file.datasync, lambda: file.pread(3, 0), lambda: disk.files.write_atomic("b", b"x")):
            with pytest.raises(OSError, match="injected") as failed:
                failing()
            assert failed.value.errno == errno.EIO
        clear_fault(disk.control)
        file.datasync()
        assert file.pread(3, 0) == b"one"


def test_a_failed_write_leaves_a_part_of_it(disk: Disk) -> None:
    with closing(disk.files.open("a", create=True)) as file:
        set_fault(disk.control, DiskFault(failing=("write",)))
        with pytest.raises(OSError, match="injected"):
            file.pwritev([b"one", b"two"], 0)
        assert file.pread(6, 0) == b"one"


def test_a_full_disk_takes_nothing_and_gives_what_it_has(disk: Disk) -> None:
    disk.files.write_atomic("b", b"x")
    with closing(disk.files.open("a", create=True)) as file:
        file.allocate(6)
        set_fault(disk.control, DiskFault(is_full=True))
        file.pwritev([b"onetwo"], 0)
        with pytest.raises(OSError, match="no space") as failed:
            file.pwritev([b"three"], 6)
    assert failed.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="no space"):
        disk.files.open("c", create=True)
    assert disk.files.free_bytes() == 0
    assert disk.files.read("b") == b"x"


async def test_writes_without_a_thread_are_declined_during_a_fault_and_fail_when_one_begins(disk: Disk) -> None:
    page = bytes(4096)
    with closing(disk.files.open("log", create=True, direct=True)) as file:
        file.pwritev([page], 0)
        file.datasync()
        ends: asyncio.Queue[OSError | None] = asyncio.Queue()
        if not file.begin_write([page], 4096, ends.put_nowait):
            pytest.skip("this file system knows no direct writes, or the kernel no asynchronous ones")
        assert await ends.get() is None
        assert file.begin_write([page], 8192, ends.put_nowait)
        set_fault(disk.control, DiskFault(failing=("sync",)))
        failure = await ends.get()
        assert failure is not None
        assert failure.errno == errno.EIO
        assert not file.begin_write([page], 12288, ends.put_nowait)


# -- the proxy


class Echo:
    """A server that echoes every piece."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while piece := connection.recv(1024):
                    connection.sendall(piece)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    with closing(Echo()) as server:
        yield server


@pytest.fixture
def proxy(echo: Echo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyProcess]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    links = [Link(source="a", target="echo", address=echo.address), Link(source="b", target="echo", address=echo.address)]
    with closing(ProxyProcess(links, tmp_path / "proxy.log")) as running:
        yield running


def _connect(proxy: ProxyProcess, link: str) -> socket.socket:
    host, _, port = proxy.addresses[link].rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def _ask(connection: socket.socket) -> bytes:
    connection.sendall(b"ping")
    return connection.recv(1024)


def test_links_are_cut_one_by_one_and_nothing_is_lost(proxy: ProxyProcess) -> None:
    with _connect(proxy, "a>echo") as one, _connect(proxy, "b>echo") as other:
        assert _ask(one) == _ask(other) == b"ping"
        proxy.set_mode("cut", ["a>echo"])
        one.sendall(b"late")
        assert _ask(other) == b"ping"
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(1024)
        proxy.set_mode("pass", ["a>echo"])
        one.settimeout(WAIT_S)
        assert one.recv(1024) == b"late"


def test_a_connection_made_while_the_link_is_cut_works_afterwards(proxy: ProxyProcess) -> None:
    proxy.set_mode("cut-forward", ["a>echo"])
    with _connect(proxy, "a>echo") as connection:
        connection.sendall(b"ping")
        proxy.set_mode("slow", ["a>echo"])
        assert connection.recv(1024) == b"ping"


def test_requests_over_a_late_link_take_that_much_longer_and_answers_are_counted(proxy: ProxyProcess) -> None:
    with _connect(proxy, "a>echo") as one, _connect(proxy, "b>echo") as other:
        assert _ask(one) == _ask(other) == b"ping"
        before = proxy.backward_bytes("a>echo")
        proxy.set_mode("late", ["a>echo"], delay_s=0.2)
        began = time.monotonic()
        assert _ask(one) == b"ping"
        assert time.monotonic() - began >= 0.2
        assert proxy.backward_bytes("a>echo") - before == len(b"ping")


def test_a_reset_link_ends_connections_and_takes_none(proxy: ProxyProcess) -> None:
    with _connect(proxy, "a>echo") as connection:
        assert _ask(connection) == b"ping"
        proxy.set_mode("reset", ["a>echo"])
        with pytest.raises(ConnectionResetError):
            connection.recv(1024)
    # The reset may arrive while the connection is still being established.
    with pytest.raises(ConnectionError), _connect(proxy, "a>echo") as refused:
        _ask(refused)


def test_a_connection_that_broke_while_its_link_was_cut_does_not_end_the_proxy(proxy: ProxyProcess) -> None:
    with _connect(proxy, "a>echo") as connection:
        assert _ask(connection) == b"ping"
        proxy.set_mode("cut", ["a>echo"])
        connection.sendall(b"held back")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with _connect(proxy, "b>echo") as other:
        # By now the proxy has noticed that the first connection is gone, while its bytes still wait to pass.
        assert _ask(other) == b"ping"
    proxy.set_mode("reset", ["a>echo"])
    proxy.set_mode("pass", ["a>echo"])
    with _connect(proxy, "a>echo") as connection:
        assert _ask(connection) == b"ping"


# -- the schedule

NAMES = {
    "metadata": ["metadata-1", "metadata-2", "metadata-3"],
    "bookie": ["bookie-1", "bookie-2"],
    "broker": ["broker-1", "broker-2"],
    "tiering": ["tiering-1"],
    "store": ["minio"],
}
LINKS = [
    *(Link(source=CLIENTS, target=broker, address="") for broker in NAMES["broker"]),
    *(
        Link(source=source, target=target, address="")
        for role, targets in {"metadata": ["metadata"], "bookie": ["metadata"], "broker": ["metadata", "bookie", "store"],
                              "tiering": ["metadata", "bookie", "store"]}.items()
        for source in NAMES[role]
        for target in (name for other in targets for name in NAMES[other])
        if source != target
    ),
]  # fmt: skip


def _steps(seed: int, count: int) -> list[Step]:
    return list(itertools.islice(Schedule(seed, NAMES, LINKS).steps(), count))


def test_a_seed_decides_everything() -> None:
    assert _steps(7, 150) == _steps(7, 150)
    assert _steps(7, 150) != _steps(8, 150)


def test_every_role_meets_every_kind_of_fault() -> None:
    faults = [fault for step in _steps(1, 150) for fault in step.faults]
    kinds = {fault.kind for fault in faults}
    for role in NAMES:
        assert {f"kill {role}", f"pause {role}", f"long pause {role}", f"isolate {role} (cut)"} <= kinds
    for trouble in ("write error", "sync error", "read error", "full", "slow"):
        assert {f"disk {trouble} metadata", f"disk {trouble} bookie"} <= kinds
    assert {"cut clients to broker", "reset broker to store", "kill everything", "cut-backward metadata to metadata"} <= kinds
    assert all(fault.processes or fault.links for fault in faults)
    assert any(len(step.faults) > 1 for step in _steps(1, 150))


def test_the_seconds_of_a_run_are_those_of_its_faults_and_pauses() -> None:
    first = _steps(7, 5)
    seconds = sum(step.duration_s for step in first)
    schedule = partial(Schedule, 7, NAMES, LINKS)

    assert list(schedule().steps_within(seconds + 0.1)) == first
    assert list(schedule().steps_within(seconds - 0.1)) == first[:4]


def test_commands_are_undone_when_no_other_fault_is_left() -> None:
    replaced, isolated = Fault(kind="replace metadata", action="replace"), Fault(kind="isolate metadata", action="link")
    step = Step(faults=(replaced, isolated), hold_s=1, quiet_s=1)

    assert step.in_order_of_repair == [isolated, replaced]


class Quorum(ChaosCluster):
    """A cluster without processes, whose commands to change the quorum end with the given exit codes."""

    def __init__(self, directory: Path, codes: Sequence[int]) -> None:
        self._data = directory
        self._codes = list(codes)
        self.done: list[str] = []

    def command(self, *words: str) -> tuple[int, str]:
        self.done.append(" ".join(words[:3]))
        return self._codes.pop(0), ""

    def kill(self, name: str) -> None:
        self.done.append("kill")

    def launch(self, name: str) -> None:
        self.done.append(f"launch, disk {'kept' if (self._data / name).exists() else 'empty'}")

    def address(self, name: str) -> str:
        return "host:1"


def test_a_node_whose_removal_timed_out_is_removed_before_it_is_added_again(tmp_path: Path) -> None:
    (tmp_path / "metadata-2").mkdir()
    quorum = Quorum(tmp_path, [ExitCode.UNAVAILABLE, ExitCode.UNAVAILABLE, ExitCode.NOT_FOUND, ExitCode.OK])
    recorder, problems = Recorder(tmp_path / "history"), list[str]()
    nemesis = Nemesis(quorum, recorder, problems.append, 1)
    fault = Fault(kind="replace metadata", action="replace", processes=("metadata-2",))

    with closing(recorder):
        nemesis.begin(fault)
        nemesis.end(fault)

    assert quorum.done[:3] == ["metadata remove 2"] * 3
    assert quorum.done[3:6] == ["kill", "launch, disk empty", "metadata add 2=host:1"]
    assert problems == []


def test_the_links_between_two_processes_are_those_both_ways() -> None:
    assert between(LINKS, ["metadata-1"], ["metadata-2"]) == ["metadata-1>metadata-2", "metadata-2>metadata-1"]
