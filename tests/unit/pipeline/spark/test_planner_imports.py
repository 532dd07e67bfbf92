"""What Spark's planner processes load. Each plan, write and commit starts one, so imports delay every query."""

from __future__ import annotations

import subprocess
import sys

import pytest

PLANNED = ("source", "reader", "stream_reader", "metadata_reader", "writer", "bulk_writer")


@pytest.mark.parametrize("module", PLANNED)
def test_planner_processes_do_not_load_the_compiler(module: str) -> None:
    program = f"import sys, stratalog_pipeline.spark.{module}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
