"""Log files and spares after a change of ``log_file_bytes``."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.bookies.disk.test_transient_errors import COOKIE

from stratalog_bookies.disk.core.cookie import disk_key
from stratalog_bookies.disk.log_files import LogFiles, log_path
from stratalog_core.system import SystemFiles

KIB = 1024


@pytest.mark.parametrize("file_bytes", [64 * KIB, 32 * KIB])
def test_files_of_another_size_are_not_used_again(tmp_path: Path, file_bytes: int) -> None:
    """A smaller one would grow, in writes that must not lack space; a larger one would waste it."""
    files, key = SystemFiles(tmp_path), disk_key(COOKIE, 0)
    before = LogFiles(files, key, 48 * KIB)
    before.fill_spare()
    before.prepare(1)
    before.fill_spare()
    before.close()
    store = LogFiles(files, key, file_bytes)
    assert store.spare_files == 0
    store.prepare(2)
    assert files.open(log_path(2)).size() == file_bytes
    store.recycle(1, spares_max=4)
    assert (store.generations(), store.spare_files) == ([2], 0)
    store.finish(2)
    store.recycle(2, spares_max=4)
    assert (store.generations(), store.spare_files) == ([], 1)
    assert LogFiles(files, key, file_bytes).spare_files == 1
