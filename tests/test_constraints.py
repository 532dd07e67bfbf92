"""Pinned packages install on every Python that the project supports: pip refuses a pin that needs a newer one."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

from packaging.specifiers import SpecifierSet

ROOT: Final = Path(__file__).parents[1]
INSTALLED: Final = ("run.txt", "demo.txt", "minio.txt", "test.txt")
"""What ``make venv`` installs."""


def pinned_names() -> Iterator[str]:
    for name in INSTALLED:
        for line in (ROOT / "constraints" / name).read_text().splitlines():
            if "==" in line and not line.startswith("#"):
                yield line.partition("==")[0]


def oldest_python() -> str:
    """Return the first release of the oldest Python that ``pyproject.toml`` allows."""
    supported = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    return f"{supported.removeprefix('>=')}.0"


def test_pinned_packages_install_on_the_oldest_python() -> None:
    oldest = oldest_python()
    needed = {name: metadata.metadata(name).get_all("Requires-Python") or () for name in pinned_names()}
    assert {name: given for name, given in needed.items() if oldest not in SpecifierSet(",".join(given))} == {}
