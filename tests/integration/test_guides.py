"""Runs every command of the tutorial and the how-to pages as written, page by page, in a fresh directory.

A block of the language ``sh`` runs in bash with ``-euo pipefail``; the blocks of a page share a directory that looks like the
repository's root. A block with ``title="Terminal …"`` is a server: it runs in the background until the comment ``<!-- stop the
server -->`` or the end of the page. A block ``text title="Output"`` holds lines that the last block or server printed, in their
order; "…" stands for anything, and columns may be wider. Addresses on loopback are replaced by ones with free ports. A block of
the language ``console`` is not run: it needs machines or hours that a test does not have, or changes the repository.
``tests/test_docs.py`` checks its words.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from stratalog.local.ports import free_ports

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[2]
GUIDES = sorted(page for folder in ("tutorial", "how-to") for page in (ROOT / "docs" / folder).rglob("*.md"))
_STEP = re.compile(
    r'^```sh(?P<server> title="Terminal[^"]*")?\n(?P<block>.*?)^```$|^```text title="Output"\n(?P<output>.*?)^```$'
    r"|^(?P<stop><!-- stop the server -->)$",
    re.M | re.S,
)
_ADDRESSES = {"127.0.0.1:9092": "KAFKA", "127.0.0.1:19300": "METADATA"}
"""Addresses in the pages' commands, and the variables for those with free ports; ``make run`` takes ``KAFKA``."""
_START_S = 240.0
_BLOCK_S = 240.0


def _steps(page: Path) -> list[re.Match[str]]:
    return list(_STEP.finditer(page.read_text()))


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A directory with the repository's files; clusters that are left in it are stopped at the end."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith(".") and entry.name != "data":
            (tmp_path / entry.name).symlink_to(entry)
    _link_virtual_environment(tmp_path / ".venv")
    yield tmp_path
    for state in tmp_path.glob("*/cluster.json"):
        subprocess.run([ROOT / ".venv/bin/stratalog", "cluster", "stop", "--data", state.parent], check=False)


def _link_virtual_environment(directory: Path) -> None:
    """Link the virtual environment that runs this test, complete for ``make``, so that nothing is installed."""
    directory.mkdir()
    for name in ("bin", "lib", "include", "pyvenv.cfg"):
        (directory / name).symlink_to(ROOT / ".venv" / name)
    for stamp in (".run", ".demo", ".test"):
        (directory / stamp).touch()


@pytest.fixture
def environment() -> dict[str, str]:
    """The environment of the page's commands: the virtual environment first, Kafka at a free port, Spark on loopback."""
    path = f"{ROOT / '.venv/bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "SPARK_LOCAL_IP": "127.0.0.1", **_free_addresses()}


def _free_addresses() -> dict[str, str]:
    """Return an address with a free port for each one in the pages."""
    names = _ADDRESSES.values()
    return {name: f"127.0.0.1:{port}" for name, port in zip(names, free_ports(len(names)), strict=True)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [page for page in GUIDES if _steps(page)], ids=lambda page: str(page.relative_to(ROOT / "docs"))
)
def test_commands_run_as_they_are_written(page: Path, directory: Path, environment: dict[str, str]) -> None:
    printed = ""
    with ExitStack() as servers:
        for step in _steps(page):
            if step["stop"]:
                servers.close()
            elif step["server"]:
                log = servers.enter_context(_server(step["block"], directory, environment))
                printed = log.read_text()
            elif step["output"]:
                assert _absent(step["output"], printed, environment) == [], printed
            else:
                printed = _run(step["block"], directory, environment)


def _absent(shown: str, printed: str, environment: dict[str, str]) -> list[str]:
    """Return the lines of ``shown`` that ``printed`` lacks after the ones before them."""
    lines = iter(" ".join(line.split()) for line in printed.splitlines())
    wanted = [" ".join(line.split()) for line in _with_free_ports(shown, environment).splitlines()]
    patterns = [re.compile(".*".join(map(re.escape, line.split("…")))) for line in wanted]
    return [line for line, pattern in zip(wanted, patterns, strict=True) if not any(map(pattern.fullmatch, lines))]


def _with_free_ports(text: str, environment: dict[str, str]) -> str:
    for address, variable in _ADDRESSES.items():
        text = text.replace(address, environment[variable])
    return text


def _shell(block: str, environment: dict[str, str]) -> list[str]:
    bash = shutil.which("bash")
    assert bash is not None
    return [bash, "-euo", "pipefail", "-c", _with_free_ports(block, environment)]


def _run(block: str, directory: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        _shell(block, environment),
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_BLOCK_S,
        check=False,
    )
    assert done.returncode == 0, f"{block}\nexit code {done.returncode}\n{done.stdout}"
    return done.stdout


@contextmanager
def _server(block: str, directory: Path, environment: dict[str, str]) -> Iterator[Path]:
    """Run ``block`` until the end of the context, which is entered with its log when that says that it serves."""
    log = directory / f"server-{len(list(directory.glob('server-*.log')))}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            _shell(block, environment), cwd=directory, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _START_S
        while "serves" not in log.read_text():
            assert process.poll() is None, f"{block}\nended with {process.returncode}\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{block}\nis not ready after {_START_S} s\n{log.read_text()}"
            time.sleep(0.1)
        yield log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=_START_S)
