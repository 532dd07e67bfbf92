"""What a directory store holds, read from its files while it may still be written."""

from __future__ import annotations

import contextlib
from pathlib import Path


def object_files(directory: Path) -> list[Path]:
    """Return the files of all objects, sorted. Files that are still being written, below a leading dot, are none."""
    kinds = (path for path in directory.iterdir() if not path.name.startswith("."))
    return sorted(path for kind in kinds for path in kind.rglob("*") if path.is_file())


def object_contents(directory: Path) -> dict[str, bytes]:
    """Return the bytes of all objects by key. An object that is deleted meanwhile is left out."""
    found: dict[str, bytes] = {}
    for path in object_files(directory):
        with contextlib.suppress(FileNotFoundError):
            found[str(path.relative_to(directory))] = path.read_bytes()
    return found
