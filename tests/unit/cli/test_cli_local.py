"""Layout, state and processes of a local cluster."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from click.testing import CliRunner

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode
from stratalog.local import launcher, processes
from stratalog.local.plan import Sizes, plan_cluster, to_toml
from stratalog.local.ports import VARIABLE, free_ports, is_free
from stratalog.local.secrets import make_store_credentials, store_environment
from stratalog.local.state import EMBEDDED_ROLE, ClusterState, ProcessState, load_state, save_state
from stratalog_core.errors import Conflict, Invalid, NotFound, Refused, Unavailable

ORDERLY = [
    sys.executable,
    "-c",
    "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit('ended'));"
    " print('ready', flush=True); signal.pause()",
]
SLEEPER = [sys.executable, "-c", "import signal; signal.pause()"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()",
]


def _process(name: str = "broker-1") -> ProcessState:
    return ProcessState(name=name, role="broker", address="127.0.0.1:1")


def test_free_ports_are_different_and_free() -> None:
    ports = free_ports(20, taken=[20000])
    assert len(set(ports)) == 20
    assert all(is_free(port) for port in ports)


def test_free_ports_come_from_the_range_that_the_environment_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "24000-24019")
    assert set(free_ports(3)) <= set(range(24000, 24020))
    monkeypatch.setenv(VARIABLE, "24000-24001")
    with pytest.raises(Unavailable, match=r"of 3 ports are free on 127\.0\.0\.1 from 24000 to 24001"):
        free_ports(3)


@pytest.mark.parametrize("text", ["20000", "x-y", "30000-20000", "80-90", "60000-70000"])
def test_a_range_of_ports_that_makes_no_sense_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(Invalid, match=f"{VARIABLE} is '{text}'; use FIRST-LAST, from 1024 to 65535: 20000-31999"):
        free_ports(1)


def test_a_plan_names_every_process_and_gives_each_its_address(tmp_path: Path) -> None:
    plan = plan_cluster(tmp_path, Sizes(), cluster_id="c", store=None, minio=False)
    names = [process.name for process in plan.state.processes]
    assert names == [
        "metadata-1", "metadata-2", "metadata-3", "bookie-1", "bookie-2", "bookie-3", "broker-1", "broker-2", "tiering-1",
    ]  # fmt: skip
    addresses = [process.address for process in plan.state.processes if process.address]
    assert len(set(addresses)) == 8
    assert plan.state.bootstrap == ",".join(addresses[6:8])
    assert plan.state.store == (tmp_path / "store").as_uri()


def test_a_plan_with_minio_uses_it_as_the_store(tmp_path: Path) -> None:
    plan = plan_cluster(tmp_path, Sizes(metadata=1, bookies=1, brokers=1), cluster_id="c", store=None, minio=True)
    (store,) = plan.state.of_role("store")
    assert plan.state.store == f"s3://stratalog?endpoint=http://{store.address}&region=us-east-1"


def test_configuration_files_are_toml(tmp_path: Path) -> None:
    plan = plan_cluster(tmp_path, Sizes(), cluster_id="cluster", store=None, minio=False)
    table = tomllib.loads(to_toml(plan.configurations["metadata-2"]))["metadata"]
    assert table["node_id"] == 2
    assert [peer.split("=")[0] for peer in table["peers"]] == ["1", "2", "3"]


def test_state_survives_a_round_trip_and_replaces_one_process(tmp_path: Path) -> None:
    state = ClusterState(bootstrap="b", metadata="m", store="s", processes=(_process("a"), _process("b")))
    save_state(tmp_path, state.replaced(msgspec.structs.replace(_process("b"), pid=7)))
    found = load_state(tmp_path)
    assert [process.pid for process in found.processes] == [None, 7]
    with pytest.raises(NotFound, match="there are a, b"):
        found.process("c")


def test_a_directory_without_a_cluster_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="stratalog cluster start"):
        load_state(tmp_path)
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(Invalid, match=r"cluster\.json cannot be read"):
        load_state(tmp_path)


def test_credentials_are_made_once_and_only_for_the_owner(tmp_path: Path) -> None:
    assert store_environment(tmp_path) == {}
    make_store_credentials(tmp_path)
    made = store_environment(tmp_path)
    make_store_credentials(tmp_path)
    assert store_environment(tmp_path) == made
    assert set(made) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert (tmp_path / "config" / "store.env").stat().st_mode & 0o777 == 0o600


def _until_ready(process: ProcessState, log: Path) -> None:
    while "ready" not in log.read_text():
        assert processes.running(process) is not None


def test_a_process_of_another_user_is_an_error_of_this_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = processes.launch(_process(), SLEEPER, log=tmp_path / "log", environ={})

    def denied(self: psutil.Process, _: int) -> None:
        raise psutil.AccessDenied(self.pid)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "send_signal", denied)
            with pytest.raises(Refused, match=r"broker-1 \(pid \d+\) belongs to another user: run the command as that user"):
                processes.stop([process], grace_s=60)
    finally:
        processes.kill(process)


def test_nothing_is_killed_if_one_of_the_processes_does_not_run(tmp_path: Path) -> None:
    running = processes.launch(_process("broker-1"), SLEEPER, log=tmp_path / "log", environ={})
    try:
        save_state(
            tmp_path, ClusterState(bootstrap="", metadata="", store="/store", processes=(running, _process("broker-2")))
        )  # fmt: skip
        with pytest.raises(Conflict, match="broker-2 is not running"):
            launcher.LocalCluster(tmp_path, lambda _: None).kill(["broker-1", "broker-2"])
        assert processes.running(running) is not None
    finally:
        processes.kill(running)


def test_a_process_is_stopped_by_sigterm(tmp_path: Path) -> None:
    process = processes.launch(_process(), SLEEPER, log=tmp_path / "log", environ={})
    assert processes.running(process) is not None
    assert processes.stop([process], grace_s=60) == []
    assert processes.running(process) is None


def test_a_paused_process_is_stopped_by_sigterm(tmp_path: Path) -> None:
    """A process that handles SIGTERM, as all of ours do, does so only once it is continued."""
    log = tmp_path / "log"
    process = processes.launch(_process(), ORDERLY, log=log, environ={})
    _until_ready(process, log)
    psutil.Process(process.pid).suspend()
    assert processes.stop([process], grace_s=60) == []
    assert "ended" in log.read_text()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = processes.launch(_process(), STUBBORN, log=log, environ={})
    _until_ready(process, log)
    assert processes.stop([process], grace_s=0.2) == ["broker-1"]
    assert processes.running(process) is None


def test_kill_says_whether_it_ran(tmp_path: Path) -> None:
    process = processes.launch(_process(), SLEEPER, log=tmp_path / "log", environ={})
    assert processes.kill(process)
    assert not processes.kill(process)


def test_a_pid_that_another_process_inherited_is_left_alone() -> None:
    other = subprocess.Popen(SLEEPER)
    try:
        started_earlier = psutil.Process(other.pid).create_time() - 60
        stale = msgspec.structs.replace(_process(), pid=other.pid, started_at=started_earlier)
        assert processes.running(stale) is None
        assert processes.stop([stale], grace_s=0.1) == []
        assert not processes.kill(stale)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def _state(*others: ProcessState) -> ClusterState:
    return ClusterState(bootstrap="127.0.0.1:1", metadata="127.0.0.1:2", store="/store", processes=others)


def test_a_start_that_fails_stops_only_what_it_has_started(tmp_path: Path) -> None:
    alive = processes.launch(_process(), SLEEPER, log=tmp_path / "log", environ={})
    try:
        bookie = ProcessState(name="bookie-1", role="bookie", address="127.0.0.1:3")
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "bookie-1.toml").write_text("[bookie]\njournal = 5\n")
        save_state(tmp_path, _state(alive, bookie))
        result = CliRunner().invoke(stratalog, ["cluster", "start", "--data", str(tmp_path)])
        assert "bookie-1 exited" in str(result.exception)
        assert processes.running(alive) is not None
        assert [process.pid for process in load_state(tmp_path).processes] == [alive.pid, None]
    finally:
        assert processes.kill(alive)


def test_two_starts_at_once_start_each_process_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [ProcessState(name=f"tiering-{number}", role="tiering", address="") for number in (1, 2, 3)]
    save_state(tmp_path, _state(*workers))
    launched, launch, both = list[ProcessState](), processes.launch, threading.Barrier(2)

    def launch_and_note(process: ProcessState, *args: Any, **options: Any) -> ProcessState:
        time.sleep(0.1)  # Long enough for the other start to meet it.
        launched.append(launch(process, *args, **options))
        return launched[-1]

    def start() -> None:
        both.wait()
        launcher.LocalCluster(tmp_path, lambda line: None).start((), timeout_s=10)

    monkeypatch.setattr(processes, "role_command", lambda role, path: SLEEPER)
    monkeypatch.setattr(processes, "launch", launch_and_note)
    starts = [threading.Thread(target=start) for _ in range(2)]
    try:
        for each in starts:
            each.start()
        for each in starts:
            each.join()
        assert [process.name for process in launched] == [worker.name for worker in workers]
        assert load_state(tmp_path).processes == tuple(launched)
    finally:
        for process in launched:
            processes.kill(process)


def test_a_process_that_survives_sigkill_is_not_reported_as_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a disk that hangs."""
    alive = processes.launch(_process(), SLEEPER, log=tmp_path / "log", environ={})
    try:
        save_state(tmp_path, _state(alive))
        with monkeypatch.context() as patched:
            patched.setattr(psutil.Process, "send_signal", lambda process, number: None)
            patched.setattr(launcher, "STOP_GRACE_S", 0.1)
            result = CliRunner().invoke(stratalog, ["cluster", "stop", "--data", str(tmp_path)])
        assert isinstance(result.exception, Unavailable)
        assert "broker-1 still runs after SIGKILL" in result.exception.message
        assert load_state(tmp_path).processes == (alive,), "the next command finds it"
    finally:
        assert processes.kill(alive)


def test_what_has_no_effect_on_an_existing_cluster_is_refused_or_named(tmp_path: Path) -> None:
    save_state(tmp_path, _state(ProcessState(name="up", role=EMBEDDED_ROLE, address="127.0.0.1:1")))
    result = CliRunner().invoke(stratalog, ["cluster", "start", "--data", str(tmp_path), "--brokers", "2"])
    assert "holds a cluster with 0 processes of role broker: --brokers 2 has no effect" in result.stderr
    for options in (["--store", "/elsewhere"], ["--minio"], ["--second-store", "/second"]):
        result = CliRunner().invoke(stratalog, ["cluster", "start", "--data", str(tmp_path), *options])
        assert isinstance(result.exception, Conflict), result.output
        assert options[0] in result.exception.message
    assert [process.pid for process in load_state(tmp_path).processes] == [None]


def test_the_process_of_up_is_found_in_data_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STRATALOG_DATA", raising=False)
    assert CliRunner().invoke(stratalog, ["cluster", "status"]).exit_code == ExitCode.USAGE
    (tmp_path / "data").mkdir()
    with subprocess.Popen(SLEEPER) as child:
        try:
            process = ProcessState(
                name="up", role=EMBEDDED_ROLE, address="127.0.0.1:1", pid=child.pid,
                started_at=psutil.Process(child.pid).create_time(),
            )  # fmt: skip
            state = ClusterState(bootstrap="127.0.0.1:1", metadata="127.0.0.1:2", store="/store", processes=(process,))
            save_state(Path("data"), state)
            assert "running" in CliRunner().invoke(stratalog, ["cluster", "status"]).stdout
            with pytest.raises(Conflict, match="belongs to `stratalog up`"):
                raise CliRunner().invoke(stratalog, ["cluster", "restart"]).exception or AssertionError
            assert child.poll() is None
            assert CliRunner().invoke(stratalog, ["cluster", "stop"]).exit_code == ExitCode.OK
            assert child.wait(60) != 0
        finally:
            child.kill()
    assert load_state(Path("data")).processes[0].pid is None
