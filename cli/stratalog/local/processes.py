"""Start, recognise and end the processes of a local cluster: exactly those, never another that inherited a pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import psutil

from stratalog.local.state import ProcessState

_START_TIME_TOLERANCE_S = 2.0


def launch(process: ProcessState, command: Sequence[str], *, log: Path, environ: Mapping[str, str]) -> ProcessState:
    """Start ``command`` in a session of its own, out of reach of a Ctrl-C at this terminal; output goes to ``log``."""
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
    # The process outlives this one on purpose: without a result code the handle would warn that it is still running.
    child.returncode = 0
    return msgspec.structs.replace(process, pid=child.pid, started_at=psutil.Process(child.pid).create_time())


def role_command(role: str, config: Path) -> list[str]:
    """How a role of ours is started by hand, too."""
    return [sys.executable, "-m", "stratalog", role, "--config", str(config)]


def running(process: ProcessState) -> psutil.Process | None:
    """The live process, or ``None`` if it ended, even if its pid was given to another since."""
    if process.pid is None:
        return None
    try:
        found = psutil.Process(process.pid)
        alive = found.status() != psutil.STATUS_ZOMBIE
        ours = abs(found.create_time() - process.started_at) < _START_TIME_TOLERANCE_S
    except psutil.NoSuchProcess:
        return None
    return found if alive and ours else None


def stop(processes: Sequence[ProcessState], *, grace_s: float) -> list[str]:
    """SIGTERM to all, SIGKILL to those that have not ended after ``grace_s``; names of the latter."""
    live = {found.pid: process.name for process in processes if (found := running(process)) is not None}
    handles = [psutil.Process(pid) for pid in live]
    for handle in handles:
        _signal(handle, signal.SIGTERM)
    _, stubborn = psutil.wait_procs(handles, timeout=grace_s)
    for handle in stubborn:
        _signal(handle, signal.SIGKILL)
    psutil.wait_procs(stubborn, timeout=grace_s)
    return [live[handle.pid] for handle in stubborn]


def kill(process: ProcessState) -> bool:
    """SIGKILL, as a crash; false if it was not running."""
    found = running(process)
    if found is None:
        return False
    _signal(found, signal.SIGKILL)
    psutil.wait_procs([found], timeout=5)
    return True


def _signal(handle: psutil.Process, number: signal.Signals) -> None:
    try:
        handle.send_signal(number)
    except psutil.NoSuchProcess:
        return
