"""The cluster under test: all its connections go through the proxy, its disks can fail, and its limits and timeouts are short.

Ledgers roll, are offloaded, lose their hot copies and are compacted within seconds: a run of a minute covers it all.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from confluent_kafka.admin import AdminClient, NewTopic

from chaos import copier, transactions
from chaos.compaction import sends as compacted
from chaos.java_producer import PARTITIONS as JAVA_PARTITIONS
from chaos.java_producer import TOPIC as JAVA_TOPIC
from chaos.links import CLIENTS, links_of
from chaos.proxy_process import ProxyProcess
from chaos.tether import PARENT
from chaos.workload import PARTITIONS, TOPICS
from stratalog.local import minio, processes
from stratalog.local.launcher import LocalCluster
from stratalog.local.plan import Plan, Sizes, plan_cluster
from stratalog.local.readiness import wait_for_brokers, wait_for_registrations
from stratalog.local.secrets import store_environment
from stratalog.local.state import ProcessState, load_state, save_state
from stratalog_core.errors import Unavailable

SIZES: Final = Sizes(metadata=3, bookies=4, brokers=3, tiering=2)
_MIB: Final = 1024 * 1024
_COMMAND_S: Final = 120.0
_STOP_S: Final = 45.0
"""Three times [node] stop_timeout_s, because the machine is shared."""
_SHORT: Final[Mapping[str, Mapping[str, Any]]] = {
    "metadata": {"snapshot_entries": 300, "kept_entries": 100, "log_segment_bytes": 65_536},
    "bookie": {
        "lease_ms": 4000,
        "log_file_bytes": _MIB,
        "spare_files": 1,
        "free_bytes_min": 64 * _MIB,
        "collect_interval_s": 3.0,
        "scrub_interval_s": 20.0,
        "audit_delay_s": 12.0,
        "audit_interval_s": 3.0,
    },
    "broker": {
        "memory_bytes": 64 * _MIB,
        "ledger_idle_ms": 5000,
        "offsets_topic_partitions": 4,
        "transaction_state_log_num_partitions": 4,
    },
    "tiering": {
        "session_lease_ms": 4000,
        "deletion_lag_ms": 2000,
        "retention_interval_ms": 2000,
        "sweep_interval_ms": 15_000,
        "grace_ms": 120_000,
        "retry_ms_max": 2000,
        "segment_bytes": 4 * _MIB,
        # With other load on the machine a worker with low priority takes a minute to start.
        "niceness": 0,
    },
}
"""Settings of each role that differ from the defaults."""


class ChaosCluster:
    """Processes by name. The thread that creates this object starts them all; they are killed when it ends."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._local = LocalCluster(data, lambda line: None)
        plan = plan_cluster(
            data, SIZES, cluster_id=urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("="), store=None, minio=True
        )
        self.links = links_of(plan.state)
        (data / "logs").mkdir(parents=True)
        (data / "faults").mkdir()
        self.proxy = ProxyProcess(self.links, data / "logs" / "proxy.log")
        self._local.lay_out(_with_detours(plan, self.proxy.addresses))
        self._write_routes()
        self.bootstrap = ",".join(self.proxy.addresses[f"{CLIENTS}>{process.name}"] for process in plan.state.of_role("broker"))

    @property
    def data(self) -> Path:
        return self._data

    def names(self, *roles: str) -> list[str]:
        """Return the names of the processes of ``roles`` (none: all)."""
        return [process.name for process in load_state(self._data).processes if not roles or process.role in roles]

    def start(self, timeout_s: float) -> None:
        """Start all processes; return when they serve."""
        for name in self.names():
            self.launch(name)
        self.wait_until_whole(timeout_s)

    def wait_until_whole(self, timeout_s: float) -> None:
        """Wait until all bookies and brokers are registered. Raises ``Unavailable``, at once if a process has ended."""
        state = load_state(self._data)
        brokers = self.bootstrap.split(",")
        registered = [*self.names("bookie"), *brokers]
        wait_for_registrations(state.metadata.split(","), registered, self._check_all_run, timeout_s=timeout_s)
        wait_for_brokers(self.bootstrap, brokers, self._check_all_run, timeout_s=timeout_s)

    def _check_all_run(self) -> None:
        ended = [name for name in self.names() if not self.is_running(name)]
        if ended:
            tail = " | ".join(log_tail(self.log(ended[0])))
            raise Unavailable(f"{', '.join(ended)} exited; the end of {self.log(ended[0])}: {tail}")

    def create_topics(self) -> None:
        """Create the workload's topics, with three copies of everything."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        new = [
            NewTopic(name, num_partitions=PARTITIONS, replication_factor=3, config=dict(configs))
            for name, configs in TOPICS.items()
        ]
        new.append(
            NewTopic(JAVA_TOPIC, num_partitions=JAVA_PARTITIONS, replication_factor=3, config={"min.insync.replicas": "2"})
        )
        new.append(
            NewTopic(transactions.TOPIC, transactions.PARTITIONS, replication_factor=3, config=dict(transactions.CONFIGS))
        )
        new += [
            NewTopic(name, compacted.PARTITIONS, replication_factor=3, config=dict(configs))
            for name, configs in compacted.TOPICS.items()
        ]
        new += [NewTopic(name, 1, replication_factor=3, config=dict(copier.CONFIGS)) for name in (copier.INPUT, copier.OUTPUT)]
        for future in admin.create_topics(new).values():
            future.result(60)

    # -- one process

    def is_running(self, name: str) -> bool:
        return processes.running(self._process(name)) is not None

    def pids(self) -> list[int]:
        """Return the pids of the processes, also of those that have ended since they were started."""
        return [process.pid for process in load_state(self._data).processes if process.pid is not None]

    def launch(self, name: str) -> None:
        """Start the process unless it runs; return at once."""
        process = self._process(name)
        if processes.running(process) is not None:
            return
        credentials = store_environment(self._data)
        environ = {PARENT: str(os.getpid()), **credentials}
        if process.role == "store":
            command = [sys.executable, "-m", "chaos.tether", *minio.minio_command(self._data, process.address)]
            environ |= minio.minio_environment(credentials)
        else:
            command = self._role_command(process)
        started = processes.launch(process, command, log=self.log(name), environ=environ)
        save_state(self._data, load_state(self._data).replaced(started))
        if process.role == "store":
            minio.make_bucket(process.address, credentials, timeout_s=60)

    def kill(self, name: str) -> None:
        """Send SIGKILL and wait until the process has ended: it may first have to complete a write to a slow disk."""
        deadline = time.monotonic() + _STOP_S
        while processes.kill(self._process(name)) and time.monotonic() < deadline:
            pass

    def stop(self, name: str) -> bool:
        """Send SIGTERM and wait. False: the process had to be killed."""
        return not processes.stop([self._process(name)], grace_s=_STOP_S)

    def is_ready(self, name: str) -> bool:
        """Return whether the process serves, by its own health check."""
        config = self._data / "config" / f"{name}.toml"
        return self._run("ready", self._process(name).role, "--config", str(config))[0] == 0

    def command(self, *words: str) -> tuple[int, str]:
        """Run a ``stratalog`` command with the cluster's directory; return exit code and output."""
        return self._run(*words, "--data", str(self._data))

    def _run(self, *words: str) -> tuple[int, str]:
        """Run a command. The command's own connections do not go through the proxy."""
        command = [sys.executable, "-m", "stratalog", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        return done.returncode, done.stdout

    def address(self, name: str) -> str:
        return self._process(name).address

    def clock_control(self, name: str) -> Path:
        """The file that sets this process's clock; see :mod:`chaos.jumping_clock`."""
        return self.control(name).with_suffix(".clock")

    def pause(self, name: str) -> None:
        """Send SIGSTOP."""
        self._signal(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Send SIGCONT."""
        self._signal(name, signal.SIGCONT)

    def control(self, name: str) -> Path:
        """The file that controls this process's disk faults; see :mod:`chaos.faulty_files`."""
        return self._data / "faults" / f"{name}.json"

    def log(self, name: str) -> Path:
        return self._data / "logs" / f"{name}.log"

    def close(self) -> None:
        """Stop all processes: gracefully if possible, else by force."""
        for name in self.names():
            self.resume(name)
        self._local.stop(())
        self.proxy.close()

    def destroy(self) -> None:
        """Kill all processes at once."""
        for name in self.names():
            self.kill(name)
        self.proxy.close()

    def _process(self, name: str) -> ProcessState:
        return load_state(self._data).process(name)

    def _signal(self, name: str, number: signal.Signals) -> None:
        found = processes.running(self._process(name))
        if found is not None:
            found.send_signal(number)

    def _role_command(self, process: ProcessState) -> list[str]:
        config = self._data / "config"
        return [
            *(sys.executable, "-m", "chaos.faulty_role", process.role),
            *("--config", str(config / f"{process.name}.toml")),
            *("--routes", str(config / f"{process.name}.routes.json")),
            *("--faults", str(self.control(process.name))),
        ]

    def _write_routes(self) -> None:
        for name in self.names("metadata", "bookie", "broker", "tiering"):
            routes = {link.address: self.proxy.addresses[link.name] for link in self.links if link.source == name}
            (self._data / "config" / f"{name}.routes.json").write_text(json.dumps(routes))


def _with_detours(plan: Plan, addresses: Mapping[str, str]) -> Plan:
    """Return the plan with our settings: brokers advertise the proxy's addresses, and each process has its own store link."""
    configurations = {}
    for process in plan.state.processes:
        if process.role != "store":
            tables = {name: {**table, **_SHORT.get(name, {})} for name, table in plan.configurations[process.name].items()}
            _detour(process.name, tables, addresses)
            configurations[process.name] = tables
    return replace(plan, configurations=configurations)


def _detour(name: str, tables: dict[str, dict[str, Any]], addresses: Mapping[str, str]) -> None:
    if "broker" in tables:
        tables["broker"]["advertised"] = addresses[f"{CLIENTS}>{name}"]
    to_store = addresses.get(f"{name}>{minio.NAME}")
    if to_store:
        tables["node"]["store"] = minio.store_url(to_store)
    elif "store" in tables["node"]:
        del tables["node"]["store"]


def log_tail(path: Path, lines: int = 5) -> Sequence[str]:
    """Return the last lines of a log, for messages."""
    return path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else ()
