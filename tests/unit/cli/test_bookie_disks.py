"""The disks of a bookie's process: one that hangs is missing, and does not keep the others waiting."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from pathlib import Path

from stratalog.roles.bookie import lock_disks
from stratalog.roles.runtime import Borders, Configuration, Node
from stratalog_bookies.config import BookieSettings
from stratalog_bookies.disk.missing_disk import MissingFiles
from stratalog_core.ports import Files
from stratalog_core.system import SystemFiles


async def test_a_disk_that_hangs_when_it_is_locked_is_missing(tmp_path: Path) -> None:
    works = threading.Event()

    def files(root: Path) -> Files:
        if root.name == "hanging":
            works.wait()
        return SystemFiles(root)

    directories = tuple(str(tmp_path / name) for name in ("sound", "hanging", "sound-too"))
    settings = BookieSettings(bookie_id="b1", data_dirs=directories, disk_stall_ms=100)
    try:
        async with AsyncExitStack() as stack:
            disks = await lock_disks(Node(Configuration(file=None), stack, Borders(files=files)), settings)
    finally:
        works.set()
    assert [isinstance(each, MissingFiles) for each in disks] == [False, True, False]
