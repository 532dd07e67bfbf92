"""A bookie with an embedded metadata node as a process of its own: ``python bookie_process.py DIRECTORY [LOOP]``."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from random import Random

from support.embedded_quorum import embedded_quorum

from stratalog_bookies.config import BookieSettings
from stratalog_bookies.node.server import BookieServer
from stratalog_core.event_loop import run_server
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_core.system import SystemClock, SystemFiles, ThreadBackground


async def serve(directory: Path) -> None:
    """Serve until killed. Writes the address to ``DIRECTORY/address``; if ``DIRECTORY/faulty`` exists, disk faults come from
    ``DIRECTORY/faults``.
    """
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from chaos.faulty_files import FaultyFiles

    transport = TcpTransport()
    async with embedded_quorum(directory / "metadata", transport) as quorum:
        settings = BookieSettings(
            bookie_id="b1", data_dirs=(str(directory / "disk"),), log_file_bytes=256 * 1024, spare_files=1, free_bytes_min=0
        )
        background = ThreadBackground(settings.threads, "bookie")
        # The faulty disk reads a file before each call, which needs a descriptor.
        is_faulty = (directory / "faulty").exists()
        disk = FaultyFiles(directory / "disk", faults=directory / "faults") if is_faulty else SystemFiles(directory / "disk")
        files = [disk]
        server = BookieServer(settings, quorum.client, transport, files, SystemClock(), Random(), background)
        await server.start()
        SystemFiles(directory).write_atomic("address", server.address.encode())
        await asyncio.Event().wait()


if __name__ == "__main__":
    if sys.argv[2:] == ["uvloop"]:
        run_server(serve(Path(sys.argv[1])))
    else:
        asyncio.run(serve(Path(sys.argv[1])))
