"""confluent-kafka's serializers with Apicurio Registry, which stores schemas in a topic; Spark reads the values as columns.

The programs are ``clients/python/``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from ecosystem import registry
from ecosystem.programs import SOURCES, confluent_python

_TIMEOUT_S: Final = 300


def run(bootstrap: str, prefix: str, directory: Path) -> dict[str, str]:
    """Return the outcomes by step."""
    store = directory / "store"
    store.mkdir()
    with registry.running(bootstrap, prefix, directory / "registry") as serving:
        written = _steps(confluent_python(), "serializers.py", bootstrap, prefix, serving.url)
        read = _steps(sys.executable, "spark_values.py", bootstrap, prefix, serving.url, store.as_uri())
    return written | read


def _steps(python: str, program: str, *arguments: str) -> dict[str, str]:
    variables = {"PYTHONPATH": str(SOURCES.parents[1]), "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1", "TZ": "UTC"}
    done = subprocess.run(
        [python, str(SOURCES / "python" / program), *arguments], env=dict(os.environ) | variables, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{program} ended with {done.returncode}: {done.stderr[-3000:]}"
    return dict(line.split("\t", 1) for line in done.stdout.splitlines() if "\t" in line)
