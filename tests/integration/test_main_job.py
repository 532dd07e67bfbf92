"""The main job on the real flights, end to end, on both kinds of store: what ``make demo`` runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.spark]
ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900


@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("store", ["file", pytest.param("minio", marks=pytest.mark.s3)])
def test_the_main_job(store: str, tmp_path: Path) -> None:
    if store == "minio" and not os.access(os.environ.get("STRATALOG_MINIO", ""), os.X_OK):
        pytest.skip("no MinIO: make tools builds it, make test names it in STRATALOG_MINIO")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'demo'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "stratalog_demo", "--store", store, "--data", str(tmp_path / "data")]
    done = subprocess.run(command, env=environment, text=True, timeout=TIMEOUT_S, check=False, stdout=subprocess.PIPE)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:]
