"""One process at a time uses a directory: the second is told who has it, and a killed one has it no more."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from simulation.world.disk import Disk

from stratalog_core.errors import Conflict
from stratalog_core.files.directory_lock import LOCK_FILE
from stratalog_core.ports import Files
from stratalog_core.system import SystemFiles

TIMEOUT_S = 60
HOLDER = """
import sys, time
from pathlib import Path
from stratalog_core.system import SystemFiles
SystemFiles(Path(sys.argv[1])).lock()
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["system", "simulated"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Files]:
    """Mounts one directory, again and again."""
    disk = Disk("disk", random.Random(1))
    return (lambda: SystemFiles(tmp_path)) if request.param == "system" else disk.mount


def test_a_directory_is_locked_once_until_it_is_released(mount: Callable[[], Files]) -> None:
    release = mount().lock()
    for _ in range(2):
        with pytest.raises(Conflict, match="is in use by"):
            mount().lock()
    release()
    mount().lock()()
    mount().lock()()


def test_the_error_names_holder_and_remedy(tmp_path: Path) -> None:
    # A longer name of an earlier holder leaves nothing behind.
    (tmp_path / LOCK_FILE).write_text("pid 4194304 on host " + "x" * 100)
    release = SystemFiles(tmp_path).lock()
    with pytest.raises(Conflict) as refused:
        SystemFiles(tmp_path).lock()
    holder = f"pid {os.getpid()} on host {socket.gethostname()}"
    assert refused.value.message == (
        f"{tmp_path} is in use by {holder}: stop that process, or give this one a directory of its own"
    )
    release()


def test_kill_9_releases_the_lock(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(Conflict, match=f"pid {holder.pid} "):
            SystemFiles(tmp_path).lock()
        holder.send_signal(signal.SIGKILL)
        holder.wait(TIMEOUT_S)
    SystemFiles(tmp_path).lock()()
