"""Which cluster a command speaks to, when it is told and when it is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratalog.local.state import ClusterState, save_state
from stratalog.target import DEFAULT_BOOTSTRAP, bootstrap_of, metadata_of, store_of


def _save(directory: Path, port: int) -> None:
    directory.mkdir()
    state = ClusterState(bootstrap=f"127.0.0.1:{port}", metadata=f"127.0.0.1:{port + 1}", store=f"{port}", processes=())
    save_state(directory, state)


def test_a_cluster_in_data_is_the_default_for_every_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bootstrap_of(None, None) == DEFAULT_BOOTSTRAP
    _save(tmp_path / "data", 7000)
    _save(tmp_path / "other", 8000)
    assert (bootstrap_of(None, None), metadata_of(None, None), store_of(None, None)) == (
        "127.0.0.1:7000",
        ["127.0.0.1:7001"],
        "7000",
    )
    assert bootstrap_of(Path("other"), None) == "127.0.0.1:8000"
    assert bootstrap_of(Path("other"), "127.0.0.1:9000") == bootstrap_of(None, "127.0.0.1:9000") == "127.0.0.1:9000"
