"""Behind ``stratalog cluster``: lays out, starts, stops, kills, restarts and reports on a local cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from stratalog.local import minio, processes
from stratalog.local.plan import Plan, to_toml
from stratalog.local.readiness import wait_for_brokers, wait_for_registrations
from stratalog.local.secrets import make_store_credentials, store_environment
from stratalog.local.state import EMBEDDED_ROLE, ClusterState, ProcessState, changing, load_state, save_state, state_path
from stratalog_core.errors import Conflict, Unavailable

STOP_GRACE_S = 20.0
_STOP_ORDER = (EMBEDDED_ROLE, "broker", "tiering", "bookie", "metadata", "store")
_LOG_TAIL_LINES = 5

Say = Callable[[str], None]


class LocalCluster:
    """The cluster of directory ``data``. Saves each change of a process at once, so that ``stop`` always finds all."""

    def __init__(self, data: Path, say: Say) -> None:
        self._data = data.absolute()
        self._say = say
        self._launched: list[str] = []

    @property
    def data(self) -> Path:
        """The cluster's directory, absolute."""
        return self._data

    @property
    def state(self) -> ClusterState:
        return load_state(self._data)

    def exists(self) -> bool:
        return state_path(self._data).exists()

    def lay_out(self, plan: Plan) -> None:
        """Write configuration files and ``cluster.json``. Raises ``Conflict`` if the directory already holds a cluster."""
        directory = self._data / "config"
        directory.mkdir(parents=True, exist_ok=True)
        with changing(self._data):
            if self.exists():
                raise Conflict(
                    f"{self._data} holds a cluster: start it again with `stratalog cluster start`, or remove the directory"
                )
            for name, tables in plan.configurations.items():
                (directory / f"{name}.toml").write_text(to_toml(tables))
            if plan.state.of_role("store"):
                make_store_credentials(self._data)
            save_state(self._data, plan.state)

    def start(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Start those of ``names`` (empty: all) that are not running. Return when every running broker serves.

        Raises ``Unavailable`` with the end of its log if one of them exits.
        """
        state = self.state
        watched = [state.process(name).name for name in names] or [process.name for process in state.processes]
        for name in watched:
            self._launch(name, timeout_s)
        self._wait_for_registrations(watched, timeout_s)
        self._wait_for_brokers(watched, timeout_s)

    def start_all(self, *, timeout_s: float) -> None:
        """Start the processes that are not running. On a failure, stop those that this call started. Raises as ``start``."""
        try:
            self.start((), timeout_s=timeout_s)
        except BaseException:
            if self._launched:
                self.stop(self._launched)
            raise

    def _refuse_embedded(self, process: ProcessState) -> None:
        if process.role == EMBEDDED_ROLE:
            raise Conflict(f"{self._data} belongs to `stratalog up`: start it with that, or use another --data")

    def _launch(self, name: str, timeout_s: float) -> None:
        """Start the process, unless it runs: another command may have started it meanwhile."""
        with changing(self._data):
            process = self.state.process(name)
            if processes.running(process) is not None:
                return
            self._launch_process(process)
            self._launched.append(name)
        if process.role == "store":
            credentials = store_environment(self._data)
            minio.make_bucket(process.address, credentials, timeout_s=timeout_s, object_lock=self.state.object_lock)

    def _launch_process(self, process: ProcessState) -> None:
        self._refuse_embedded(process)
        credentials = store_environment(self._data)
        if process.role == "store":
            environ = minio.minio_environment(credentials)
            command = minio.minio_command(self._data, process.address)
        else:
            environ = dict(credentials)
            command = processes.role_command(process.role, self._data / "config" / f"{process.name}.toml")
        started = processes.launch(process, command, log=self.log(process.name), environ=environ)
        save_state(self._data, self.state.replaced(started))
        self._say(f"{process.name} started, pid {started.pid}")

    def _wait_for_registrations(self, watched: Sequence[str], timeout_s: float) -> None:
        state = self.state
        running = [each for each in state.processes if processes.running(each)]
        wanted = [each.name for each in running if each.role == "bookie"]
        wanted += [each.address for each in running if each.role == "broker"]
        if wanted and any(each.role == "metadata" for each in running):
            addresses = state.metadata.split(",")
            wait_for_registrations(addresses, wanted, lambda: self._check_alive(watched), timeout_s=timeout_s)

    def _wait_for_brokers(self, watched: Sequence[str], timeout_s: float) -> None:
        state = self.state
        brokers = {process.address for process in state.of_role("broker") if processes.running(process)}
        if not brokers:
            self._check_alive(watched)
            return
        wait_for_brokers(state.bootstrap, brokers, lambda: self._check_alive(watched), timeout_s=timeout_s)
        self._say(f"serving at {state.bootstrap}")

    def _check_alive(self, watched: Sequence[str]) -> None:
        state = self.state
        for name in watched:
            if processes.running(state.process(name)) is None:
                raise Unavailable(f"{name} exited; the end of {self.log(name)}:\n{self._log_tail(name)}")

    def stop(self, names: Sequence[str]) -> None:
        """Stop ``names`` (empty: all) by SIGTERM, and by SIGKILL after a grace period; brokers before the roles they use.

        Raises ``Unavailable`` if a process survives both.
        """
        state, survivors = self.state, list[str]()
        wanted = [state.process(name) for name in names] or list(state.processes)
        for role in _STOP_ORDER:
            group = [process for process in wanted if process.role == role]
            for name in processes.stop(group, grace_s=STOP_GRACE_S):
                self._say(f"{name} did not stop within {STOP_GRACE_S:.0f} s and was killed")
            survivors += [process.name for process in group if processes.running(process)]
            self._forget_pids([process for process in group if process.name not in survivors])
        if survivors:
            raise Unavailable(
                f"{', '.join(survivors)} still runs after SIGKILL: the kernel ends it when its disk answers; repeat the command"
                " then"
            )
        self._say("stopped")

    def kill(self, names: Sequence[str]) -> None:
        """Kill processes with SIGKILL, as in a crash. Raises ``Conflict``, before any is killed, if one is not running."""
        state = self.state
        wanted = [state.process(name) for name in dict.fromkeys(names)]
        for process in sorted(wanted, key=lambda process: processes.running(process) is not None):
            if not processes.kill(process):
                raise Conflict(f"{process.name} is not running: start it with `stratalog cluster restart {process.name}`")
            self._forget_pids([process])
            self._say(f"{process.name} killed")

    def restart(self, names: Sequence[str], *, timeout_s: float) -> None:
        """Stop those of ``names`` (empty: all) that run, then start all of ``names`` with their data and addresses."""
        state = self.state
        wanted = list(names) or [process.name for process in state.processes]
        for name in wanted:
            self._refuse_embedded(state.process(name))  # Before it is stopped.
        alive = [name for name in wanted if processes.running(state.process(name))]
        if alive:
            self.stop(alive)
        self.start(wanted, timeout_s=timeout_s)

    def rows(self) -> list[dict[str, object]]:
        """Return one row per process: name, role, address, pid, state, resident bytes."""
        return [_row(process) for process in self.state.processes]

    def log(self, name: str) -> Path:
        return self._data / "logs" / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        if not self.log(name).exists():
            return "(empty)"
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def _forget_pids(self, group: Sequence[ProcessState]) -> None:
        """Save that these processes have ended, unless another command has started one again."""
        with changing(self._data):
            state = self.state
            for process in group:
                if process in state.processes:
                    state = state.replaced(msgspec.structs.replace(process, pid=None, started_at=0.0))
            save_state(self._data, state)


def _row(process: ProcessState) -> dict[str, object]:
    found = processes.running(process)
    row: dict[str, object] = {"name": process.name, "role": process.role, "address": process.address}
    row["http"] = process.http
    row["pid"] = process.pid if found else None
    row["state"] = "running" if found else "ended" if process.pid is not None else "stopped"
    row["resident_bytes"] = found.memory_info().rss if found else None
    return row
