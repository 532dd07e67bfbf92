"""Starts ``bookie_process.py`` for a test and kills it at the end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Final, Self

from stratalog_core.rpc.tcp import TcpTransport

START_S: Final = 60.0


class StartedBookie:
    """A bookie in a process of its own, killed at the end of the block."""

    def __init__(self, directory: Path, loop: str = "asyncio") -> None:
        self.directory = directory
        self.transport = TcpTransport()
        self._loop = loop

    async def __aenter__(self) -> Self:
        address = self.directory / "address"
        address.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(Path(__file__).with_name("bookie_process.py")), str(self.directory), self._loop,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        async with asyncio.timeout(START_S):
            while not address.exists():
                assert self.process.returncode is None, "the bookie did not start"
                await asyncio.sleep(0.02)
        self.address = address.read_text()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGKILL)
        await self.process.wait()
        await self.transport.close()
