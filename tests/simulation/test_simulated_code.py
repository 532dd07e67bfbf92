"""The digest of the simulated code covers what runs import, and nothing else changes it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from simulation import simulated_code
from simulation.runs import SCENARIOS, Run, run_many
from simulation.simulated_code import OTHERS, code_digest, file_stamps, simulated_files
from simulation.world.machine import World

IMPORTED = "import sys, simulation.__main__, simulation.simulated_code as code; print(code.not_counted(sys.modules))"
LATE = "support.markers"
"""A module of the repository that no run imports."""


def repository(root: Path) -> Path:
    for name in (*OTHERS, "core/stratalog_core/a.py", "tests/simulation/runs.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"# {name}\n")
    return root


def write(name: str, text: str) -> Callable[[Path], object]:
    def change(root: Path) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)

    return change


@pytest.mark.parametrize(
    "change",
    [
        write("core/stratalog_core/a.py", "# another"),
        write("core/stratalog_core/b.py", ""),
        write("tests/simulation/runs.py", "# another"),
        write(OTHERS[0], "# another"),
        lambda root: (root / "core/stratalog_core/a.py").rename(root / "core/stratalog_core/c.py"),
    ],
)
def test_a_change_of_simulated_code_changes_the_digest(tmp_path: Path, change: Callable[[Path], object]) -> None:
    before, stamps = code_digest(repository(tmp_path)), file_stamps(tmp_path)

    change(tmp_path)

    assert code_digest(tmp_path) != before
    assert file_stamps(tmp_path) != stamps


@pytest.mark.parametrize(
    "name", ["docs/a.md", "pipeline/a.py", "cli/stratalog/a.py", "tests/simulation/test_a.py", "tests/simulation/mutants/a.py"]
)
def test_a_change_of_anything_else_does_not(tmp_path: Path, name: str) -> None:
    before, stamps = code_digest(repository(tmp_path)), file_stamps(tmp_path)

    write(name, "# another")(tmp_path)

    assert (code_digest(tmp_path), file_stamps(tmp_path)) == (before, stamps)


def test_another_package_or_hash_seed_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_digest()
    assert code_digest() == before

    monkeypatch.setenv("PYTHONHASHSEED", "17")
    seeded = code_digest()
    monkeypatch.setattr(simulated_code, "distributions", list)

    assert len({before, seeded, code_digest()}) == 3


def test_everything_that_the_simulation_imports_counts() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTED],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout == "[]\n", done.stderr
    assert all(path.is_file() for path in simulated_files())


def test_a_run_that_imports_what_does_not_count_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_late(world: World) -> None:
        import_module(LATE)

    monkeypatch.delitem(sys.modules, LATE, raising=False)
    monkeypatch.setitem(SCENARIOS, "late", import_late)

    (outcome,) = run_many([Run("late", 1)], 1)

    assert outcome.failure == f"imported {LATE}: add them to simulated_code.py"
