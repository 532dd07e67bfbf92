"""A role whose disk hangs: SIGTERM ends it within ``stop_timeout_s``, whatever its threads wait for."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratalog.exit_codes import ExitCode

_ROLE = """
import os, sys, threading
from pathlib import Path
from stratalog.roles.runtime import Borders, Configuration, run
from stratalog_core.system import SystemFiles

class HangingFiles(SystemFiles):
    def __init__(self, root):
        if "constructor" in sys.argv:
            hang()
        super().__init__(root)

    def lock(self):
        if "lock" in sys.argv:
            hang()
        return super().lock()

    def read(self, path):
        hang()

def hang():
    os.write(1, b"hangs\\n")  # Two threads may print at once.
    threading.Event().wait()

async def start(node):
    files = await node.files(Path("data"))
    reading = node.background(1, "first").run(lambda: files.read("x"))
    also_reading = node.background(1, "second").run(lambda: files.read("x"))
    if "start" in sys.argv:
        await reading
    return "nowhere"

run(Configuration(file=Path("node.toml")), "test", start, Borders(files=HangingFiles))
"""


@pytest.mark.parametrize("where", ["constructor", "lock", "start", "serving"])
def test_a_role_whose_disk_hangs_ends_at_sigterm(tmp_path: Path, where: str) -> None:
    (tmp_path / "node.toml").write_text("[node]\nstop_timeout_s = 0.5\n")
    is_clean = where in ("constructor", "lock")  # Nothing that must be closed was begun.
    role = [sys.executable, "-c", _ROLE, where]
    with subprocess.Popen(role, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == "hangs\n"
            if where == "serving":
                assert any("serves at nowhere" in line for line in process.stderr)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == (ExitCode.OK if is_clean else ExitCode.FAILED)
        finally:
            process.kill()
        says = "test stopped" if is_clean else "test did not stop within 0.5 s (stop_timeout_s) and exits as in a crash"
        assert says in process.stderr.read()
