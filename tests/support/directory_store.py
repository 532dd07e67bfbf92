"""What a directory store holds, read from its files while it may still be written."""

from pathlib import Path


def object_files(directory: Path) -> list[Path]:
    """Return the files of all objects, sorted. Files that are still being written, below a leading dot, are none."""
    kinds = (path for path in directory.iterdir() if not path.name.startswith("."))
    return sorted(path for kind in kinds for path in kind.rglob("*") if path.is_file())
