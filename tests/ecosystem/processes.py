"""Java programs of a suite that run in the background: started with their settings, waited for, killed."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ecosystem.programs import tool

TIMEOUT_S: Final = 180.0
_CALL_TIMEOUT_S: Final = 90.0
_OPTIONS: Final = ("-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")


class DidNotHappen(Exception):
    """What was waited for did not happen in time; the message is the end of the process's output."""


@contextmanager
def java(arguments: Sequence[str], directory: Path) -> Iterator[Path]:
    """A Java process in ``directory``, killed at the end; yields the file of its output."""
    output = directory / "output"
    command = [tool("java", "install Java 17 or newer"), *_OPTIONS, *arguments]
    with (
        output.open("ab") as written,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=written, stderr=subprocess.STDOUT, cwd=directory) as process,
    ):
        try:
            yield output
        finally:
            process.kill()


def write_properties(file: Path, settings: Mapping[str, str]) -> None:
    """Write a file of settings as Java programs read them."""
    file.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))


def wait(condition: Callable[[], bool], output: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Return once ``condition`` holds. Raises ``DidNotHappen``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise DidNotHappen(output.read_text()[-6000:])
        time.sleep(0.3)


def call(method: str, url: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
    """Send JSON by HTTP; return the status and the answer. The status is 0 if nothing answered."""
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=_CALL_TIMEOUT_S) as response:
            return response.status, _parsed(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, _parsed(error.read())
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return 0, None


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")
