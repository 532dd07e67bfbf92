"""Identifies the code that a run executes: the outcome of a seed is a function of it.

``SimulatedCode`` is a digest of every file of the repository that the simulation imports, as it is in the working tree, of the
interpreter and of the installed packages. A commit that changes nothing else keeps the digest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("core", "metadata", "bookies", "tiering", "broker", "tests/simulation")
OTHERS: Final = (
    "cli/stratalog/__init__.py", "cli/stratalog/kafka_connection.py", "cli/stratalog/moments.py", "cli/stratalog/output.py",
    "cli/stratalog/restored_groups.py", "cli/stratalog/tier/__init__.py", "cli/stratalog/tier/lost_coordinators.py",
    "tests/chaos/__init__.py", "tests/chaos/outcomes.py",
    "tests/chaos/compaction/__init__.py", "tests/chaos/compaction/readings.py", "tests/chaos/compaction/sends.py",
    "tests/chaos/compaction/verdict.py", "tests/support/compaction_kernels.py",
    "tests/support/superseded.py",
)  # fmt: skip
"""Files outside of ``PACKAGES`` that the simulation imports."""
MUTANTS: Final = "tests/simulation/mutants"


def simulated_files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files whose contents count. Tests of the simulator and planted faults do not: no run imports them."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if not path.name.startswith("test_") and not path.is_relative_to(root / MUTANTS):
                yield path
    yield from (root / name for name in OTHERS)


def file_stamps(root: Path = ROOT) -> list[tuple[str, int, int]]:
    """Return name, size and time of the last change of each file that counts."""
    return [(str(path), stat.st_size, stat.st_mtime_ns) for path in simulated_files(root) for stat in [path.stat()]]


def code_digest(root: Path = ROOT) -> str:
    """Return the SHA-256, in hexadecimal, of the files that count, the interpreter and the versions of installed packages."""
    digest = sha256()
    hash_seed = os.environ.get("PYTHONHASHSEED")
    digest.update(f"Python {sys.version}, optimize {sys.flags.optimize}, hash seed {hash_seed}\n".encode())
    for package in sorted({f"{each.name}=={each.version}" for each in distributions()}):
        digest.update(f"{package}\n".encode())
    for path in simulated_files(root):
        contents = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(contents)}\n".encode() + contents)
    return digest.hexdigest()


def not_counted(modules: dict[str, ModuleType]) -> list[str]:
    """Return the names of modules of the repository that do not count for the digest."""
    counted = {str(path) for path in simulated_files()}
    installed = f"{sys.prefix}{os.sep}"
    return sorted(
        name
        for name, module in modules.items()
        if (file := getattr(module, "__file__", None)) is not None
        and file.startswith(f"{ROOT}{os.sep}")
        and not file.startswith(installed)
        and file not in counted
    )


def commit_hash() -> str:
    """Return the commit of the working tree; ``-dirty`` is appended if it differs from its commit."""
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
