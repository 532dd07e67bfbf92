"""One role as a process: configuration, an orderly stop, and messages that say what to do."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratalog.exit_codes import ExitCode
from stratalog.reference.settings import SECTIONS
from stratalog.roles.runtime import TABLES


def _config(directory: Path, text: str) -> Path:
    path = directory / "node.toml"
    path.write_text(text)
    return path


def _start(role: str, config: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stratalog", role, "--config", str(config)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=config.parent)


def test_a_role_serves_until_sigterm(tmp_path: Path) -> None:
    config = _config(tmp_path, f'[metadata]\ndata_dir = "{tmp_path / "data"}"\nlisten = "127.0.0.1:0"\n')
    with _start("metadata", config) as process:
        assert process.stderr is not None
        assert "metadata serves at 127.0.0.1:" in next(line for line in process.stderr if "serves" in line)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == ExitCode.OK
        assert "metadata stopped" in process.stderr.read()


def test_logs_go_to_the_file_that_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    metadata = f'[metadata]\ndata_dir = "{tmp_path / "data"}"\nlisten = "127.0.0.1:0"\n'
    with _start("metadata", _config(tmp_path, f'[node]\nlog_file = "{log}"\n{metadata}')) as process:
        while not (log.exists() and "serves at" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == ExitCode.OK


@pytest.mark.parametrize(
    ("role", "text", "complaint"),
    [
        ("metadata", '[metadata]\ndata_dir = "d"\nlistn = "x"\n', "did you mean 'listen'"),
        ("metadata", "[metadata]\nlisten = 5\n", "listen must be str"),
        ("metadata", "", "'data_dir' of [metadata] has no default"),
        ("metadata", '[metadata]\ndata_dir = "d"\nnode_id = 0\n', "minimum is 1"),
        ("bookie", '[bookie]\nbookie_id = "b"\ndata_dirs = ["d"]\n', "list the metadata nodes"),
        ("broker", "[node", "is not valid TOML"),
        ("broker", "[brokr]\nbroker_id = 1\n", "unknown table 'brokr'; did you mean [broker]?"),
        ("up", "listen = '127.0.0.1:9092'\n", "unknown table 'listen'; settings are in the tables [node], [metadata]"),
        ("up", "[bookie]\njournal = 5\n", "unknown setting 'journal'"),
        ("up", '[node]\nlog_file = "log"\n[bookie]\njournal = 5\n', "unknown setting 'journal'"),
    ],
)
def test_wrong_configuration_is_2_and_named_once(tmp_path: Path, role: str, text: str, complaint: str) -> None:
    with _start(role, _config(tmp_path, text)) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == ExitCode.USAGE
    assert errors.count(complaint) == 1
    assert "Traceback" not in errors


def test_every_table_of_the_reference_is_known() -> None:
    assert tuple(name for name, _ in SECTIONS) == TABLES
