"""``make bench-cold`` in its smallest sizes: every figure is measured and plausible. No speed is asserted."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.cold.__main__ import MEASURES

from stratalog.local.minio import minio_program
from stratalog_core.errors import NotFound

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
AT_MOST = {"cold_amplification": 2.0, "replay_resident_share_of_budget": 2.0}
"""Of counted bytes. Times and rates depend on what else the machine does; each is the quotient of two, so only 0 is wrong."""


def test_every_figure_is_printed_and_plausible(tmp_path: Path) -> None:
    try:
        minio_program()
    except NotFound as missing:
        pytest.skip(str(missing))
    command = [sys.executable, "-m", "benchmarks.cold", "--smoke", "--json", str(tmp_path / "figures.json")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("", "tests")), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert set(AT_MOST) < set(MEASURES) <= set(figures)
    assert all(math.isfinite(value) and value >= 0 for value in figures.values()), figures
    assert {name: figures[name] for name in MEASURES if not 0 < figures[name] <= AT_MOST.get(name, math.inf)} == {}
    # One GET that takes 30 ms longer is the least that a seek needs; the store sends the batches and little more.
    assert figures["raw_get_p50_ms"] >= 30
    assert figures["cold_seek_p50_ms"] >= 30
    assert figures["cold_amplification"] >= 1
    assert 1 <= figures["raw_get_amplification_1"] < 1.05
    document = json.loads((tmp_path / "figures.json").read_text())
    assert {figure["name"] for figure in document["figures"]} == set(figures)
    assert document["options"]["rounds"] == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "figures.json"], "the cluster's directory is gone"
