"""Starts, recognises and ends the processes of a local cluster. Never touches a process that merely inherited a pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from stratalog.local.state import ProcessState, load_state
from stratalog_core.errors import Refused

_START_TIME_TOLERANCE_S = 2.0
_KILL_TIMEOUT_S = 5.0
_POLL_S = 0.02


def launch(process: ProcessState, command: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> ProcessState:
    """Start ``command`` in its own session, where a Ctrl-C at this terminal does not reach it. Output goes to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **environ},
        )
    # The process is meant to outlive this one. Without a return code the handle would warn that it still runs.
    child.returncode = 0
    return msgspec.structs.replace(process, pid=child.pid, started_at=psutil.Process(child.pid).create_time())


def role_command(role: str, config: Path) -> list[str]:
    """Return the command line that starts a role."""
    return [sys.executable, "-m", "stratalog", role, "--config", str(config)]


def running(process: ProcessState) -> psutil.Process | None:
    """Return the live process, or ``None`` if it ended, even if another process has its pid now."""
    if process.pid is None:
        return None
    try:
        found = psutil.Process(process.pid)
        alive = found.status() != psutil.STATUS_ZOMBIE
        ours = abs(found.create_time() - process.started_at) < _START_TIME_TOLERANCE_S
    except psutil.NoSuchProcess:
        return None
    return found if alive and ours else None


def start_of_stopped(data: Path) -> str | None:
    """Return the command that starts the cluster of a directory again; None if one of its processes runs."""
    state = load_state(data)
    if any(map(running, state.processes)):
        return None
    return f"`stratalog {'up' if state.is_embedded else 'cluster start'} --data {data}`"


def stop(processes: Sequence[ProcessState], *, grace_s: float) -> list[str]:
    """Send SIGTERM to all, and SIGKILL to those still running after ``grace_s``. Returns the names of the latter.

    A paused process (SIGSTOP) is continued, as systemd does: it handles no signal before.
    """
    for process in processes:
        _signal(process, signal.SIGTERM)
        _signal(process, signal.SIGCONT)
    stubborn = _wait(processes, grace_s)
    for process in stubborn:
        _signal(process, signal.SIGKILL)
    _wait(stubborn, grace_s)
    return [process.name for process in stubborn]


def kill(process: ProcessState) -> bool:
    """Kill the process with SIGKILL, as in a crash. Returns False if it was not running."""
    if running(process) is None:
        return False
    _signal(process, signal.SIGKILL)
    _wait([process], _KILL_TIMEOUT_S)
    return True


def _wait(processes: Sequence[ProcessState], timeout_s: float) -> list[ProcessState]:
    """Return the processes that still run after ``timeout_s``. A zombie counts as ended."""
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in processes if running(process)]) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return left


def _signal(process: ProcessState, number: signal.Signals) -> None:
    handle = running(process)
    if handle is None:
        return
    try:
        handle.send_signal(number)
    except psutil.NoSuchProcess:
        return
    except psutil.AccessDenied as denied:
        raise Refused(f"{process.name} (pid {process.pid}) belongs to another user: run the command as that user") from denied
