"""Runs the proxy as a child process: starts it, sends it commands, ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chaos.links import Link
from chaos.modes import Mode
from chaos.tether import PARENT


class ProxyProcess:
    """The proxy process. ``addresses`` holds the address of each link."""

    def __init__(self, links: Iterable[Link], log: Path) -> None:
        environ = {**os.environ, PARENT: str(os.getpid())}
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "chaos.proxy"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=environ,
                # Isolated from Ctrl-C at this terminal: faults must be ended in order.
                start_new_session=True,
            )
        self.addresses: Mapping[str, str] = self._ask({link.name: link.address for link in links})

    def set_mode(self, mode: Mode, links: Sequence[str], *, delay_s: float = 0.0) -> None:
        """Set the mode of ``links``. ``delay_s`` is for ``late``."""
        self._ask({"mode": mode, "links": list(links), "delay_s": delay_s})

    def backward_bytes(self, link: str) -> int:
        """Return the bytes that the link's target has sent through it."""
        return int(self._ask({"count": [link]})[link])

    def _ask(self, document: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(document).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the proxy ended; {self._log} says why")
        return json.loads(answer)

    def close(self) -> None:
        """Kill the proxy; connections through it break."""
        self._process.kill()
        self._process.communicate()
