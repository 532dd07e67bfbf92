"""A simulated power loss of real files takes unsynced writes, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from chaos.unsynced_files import UnsyncedFiles, has_unsynced, lose_power
from stratalog_core.files.kernel_io import PAGE_BYTES

OLD, NEW = b"o" * PAGE_BYTES, b"n" * PAGE_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_a_cut_with_something_unsynced_loses_at_least_one_page(tmp_path: Path, seed: int) -> None:
    file = UnsyncedFiles(tmp_path / "disk").open("log", create=True)
    file.pwritev([OLD], 0)
    file.datasync()
    assert not has_unsynced(tmp_path / "disk")
    file.pwritev([NEW], 0)
    assert has_unsynced(tmp_path / "disk")
    file.close()
    assert lose_power(tmp_path / "disk", random.Random(seed)) == 1
    assert (tmp_path / "disk" / "log").read_bytes() == OLD


@pytest.mark.parametrize("seed", range(20))
def test_each_page_is_lost_by_itself(tmp_path: Path, seed: int) -> None:
    file = UnsyncedFiles(tmp_path / "disk").open("log", create=True)
    file.pwritev([OLD * 4], 0)
    file.datasync()
    file.pwritev([NEW * 4], 0)
    file.close()
    undone = lose_power(tmp_path / "disk", random.Random(seed))
    content = (tmp_path / "disk" / "log").read_bytes()
    pages = [content[at : at + PAGE_BYTES] for at in range(0, len(content), PAGE_BYTES)]
    assert pages.count(OLD) == undone > 0
    assert pages.count(NEW) == 4 - undone


def test_nothing_that_was_synced_is_lost(tmp_path: Path) -> None:
    file = UnsyncedFiles(tmp_path / "disk").open("log", create=True)
    file.pwritev([NEW], 0)
    file.datasync()
    file.close()
    assert lose_power(tmp_path / "disk", random.Random(1)) == 0
    assert (tmp_path / "disk" / "log").read_bytes() == NEW


def test_a_renamed_file_still_loses_what_was_not_synced(tmp_path: Path) -> None:
    files = UnsyncedFiles(tmp_path / "disk")
    file = files.open("spare", create=True)
    file.pwritev([OLD], 0)
    file.datasync()
    files.rename("spare", "log")
    file.pwritev([NEW], 0)
    file.close()
    assert has_unsynced(tmp_path / "disk")
    assert lose_power(tmp_path / "disk", random.Random(1)) == 1
    assert (tmp_path / "disk" / "log").read_bytes() == OLD


def test_a_removed_file_leaves_nothing_to_undo_in_its_successor(tmp_path: Path) -> None:
    files = UnsyncedFiles(tmp_path / "disk")
    file = files.open("log", create=True)
    file.pwritev([OLD], 0)
    file.close()
    files.remove("log")
    successor = files.open("log", create=True)
    successor.close()
    assert not has_unsynced(tmp_path / "disk")
