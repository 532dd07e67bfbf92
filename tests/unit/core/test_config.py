"""Settings: precedence, conversion, and refusals that name source, field, limit and remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stratalog_core.config import load, setting
from stratalog_core.errors import Invalid


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str = setting(help="Name")
    segment_bytes: int = setting(1024, help="Bytes", minimum=16, maximum=4096)
    ratio: float = setting(0.5, help="Ratio", minimum=0.0, maximum=1.0)
    eager: bool = setting(False, help="Eager")
    kind: str = setting("a", help="Kind", choices=("a", "b"))
    peers: tuple[str, ...] = setting((), help="Peers")


def loaded(tmp_path: Path, toml: str | None = None, environ: dict[str, str] | None = None, **overrides: Any) -> Settings:
    file = None
    if toml is not None:
        file = tmp_path / "node.toml"
        file.write_text(toml)
    return load(Settings, section="node", file=file, environ=environ, overrides=overrides)


def test_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    assert loaded(tmp_path, name="n") == Settings(name="n")
    assert loaded(tmp_path, "[other]\nx = 1", name="n", eager=None) == Settings(name="n")


def test_command_line_over_environment_over_file(tmp_path: Path) -> None:
    toml = '[node]\nname = "file"\nsegment_bytes = 100\nratio = 1\npeers = ["a", "b"]\neager = true'
    environ = {"STRATALOG_NODE_SEGMENT_BYTES": "200", "STRATALOG_NODE_PEERS": " c, d ,", "OTHER": "x"}
    found = loaded(tmp_path, toml, environ, segment_bytes=300)
    assert found == Settings(name="file", segment_bytes=300, ratio=1.0, eager=True, peers=("c", "d"))
    assert loaded(tmp_path, toml, environ).segment_bytes == 200


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("FALSE", False), ("0", False)])
def test_flags_from_text(tmp_path: Path, text: str, value: bool) -> None:
    assert loaded(tmp_path, environ={"STRATALOG_NODE_EAGER": text}, name="n").eager is value


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({}, "setting 'name' of [node] has no default: set it in the file or as STRATALOG_NODE_NAME"),
        ({"name": "n", "segment_byte": 20}, "command line: unknown setting 'segment_byte'; did you mean 'segment_bytes'?"),
        ({"name": "n", "zzz": 20}, "command line: unknown setting 'zzz'"),
        ({"name": "n", "segment_bytes": 15}, "command line: segment_bytes is 15; minimum is 16"),
        ({"name": "n", "segment_bytes": 4097}, "command line: segment_bytes is 4097; maximum is 4096"),
        ({"name": "n", "segment_bytes": "many"}, "command line: segment_bytes must be int, not 'many'"),
        ({"name": "n", "segment_bytes": True}, "command line: segment_bytes must be int, not True"),
        ({"name": "n", "segment_bytes": 1.5}, "command line: segment_bytes must be int, not 1.5"),
        ({"name": 5}, "command line: name must be str, not 5"),
        ({"name": "n", "ratio": True}, "command line: ratio must be float, not True"),
        ({"name": "n", "ratio": "nan"}, "command line: ratio must be float, not 'nan'"),
        ({"name": "n", "eager": "maybe"}, "command line: eager must be bool, not 'maybe'"),
        ({"name": "n", "kind": "c"}, "command line: kind is 'c'; choose one of a, b"),
        ({"name": "n", "peers": [1]}, "command line: peers must be tuple[str, ...], not [1]"),
    ],
)
def test_what_is_wrong_is_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(Invalid, match=re.escape(message)):
        loaded(tmp_path, **overrides)


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="cannot read configuration"):
        load(Settings, section="node", file=tmp_path / "missing.toml")
    with pytest.raises(Invalid, match="not valid TOML"):
        loaded(tmp_path, "[node")
    with pytest.raises(Invalid, match=r"\[node\] must be a table"):
        loaded(tmp_path, "node = 3")
    with pytest.raises(Invalid, match=r"node.toml \[node\]: unknown setting 'nam'; did you mean 'name'"):
        loaded(tmp_path, '[node]\nnam = "x"')
