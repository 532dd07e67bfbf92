"""The built wheels contain the product, without tests and load generation."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "pyspark_stratalog",
    "stratalog",
    "stratalog_bookies",
    "stratalog_broker",
    "stratalog_core",
    "stratalog_metadata",
    "stratalog_pipeline",
    "stratalog_tiering",
}


def _built(source: Path, directory: Path) -> list[Path]:
    """Build the wheel of ``source`` and return the files in it, without those about the wheel itself."""
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(directory)]
    subprocess.run([*build, *flags, str(source)], check=True)
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:
        return [Path(name) for name in content.namelist() if ".dist-info/" not in name]


def test_the_wheel_has_every_package_and_nothing_of_tests_or_load_generation(tmp_path: Path) -> None:
    modules = _built(ROOT, tmp_path)
    assert Path("stratalog/cost/prices/s3-standard.toml") in modules
    assert {module.parts[0] for module in modules} == PACKAGES
    assert [module for module in modules if module.stem.startswith(("test_", "embedded_quorum", "archive_writer"))] == []


def test_the_load_generator_has_a_wheel_of_its_own(tmp_path: Path) -> None:
    modules = _built(ROOT / "loadgen", tmp_path)
    assert {module.parts[0] for module in modules} == {"stratalog_loadgen"}
    assert Path("stratalog_loadgen/command.py") in modules
