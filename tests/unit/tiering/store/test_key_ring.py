"""A new key is durable before anything is encrypted with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stratalog_tiering.store.key_ring import create_key


def test_a_new_key_is_durable_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power a file that was synced may lack its name, unless its directory was synced, too."""
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    path = create_key(tmp_path / "keys", "k1")
    assert [Path(each) for each in synced] == [path, path.parent, path.parent.parent]
