"""``stratalog key``: making and listing keys. The how-to page runs the rest on a cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from stratalog.commands.key import key
from stratalog_core.errors import Conflict, Invalid, NotFound


def run(*arguments: str) -> str:
    return CliRunner().invoke(key, arguments, catch_exceptions=False).output


def test_keys_are_made_listed_and_never_replaced(tmp_path: Path) -> None:
    keys = ("--keys", str(tmp_path / "keys"))
    made = json.loads(run("create", "k2", *keys, "--json"))
    run("create", "k1", *keys)
    assert made == {"key": "k2", "file": str(tmp_path / "keys/k2.key")}
    assert json.loads(run("list", *keys, "--json")) == {"keys": ["k1", "k2"]}
    with pytest.raises(Conflict, match="choose another name"):
        run("create", "k1", *keys)
    with pytest.raises(Invalid, match="is invalid"):
        run("create", "../k1", *keys)
    with pytest.raises(Invalid, match="is invalid"):
        run("rotate", "flights", "--to", "a/b", "--store", str(tmp_path))


def test_a_directory_of_keys_that_does_not_exist_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="kyes is not a directory"):
        run("list", "--keys", str(tmp_path / "kyes"))
    assert not (tmp_path / "kyes").exists()
