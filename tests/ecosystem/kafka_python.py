"""kafka-python's own integration tests, from its source distribution, on a broker that runs already."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ecosystem.programs import kafka_python_tests
from ecosystem.topics import create

from stratalog_loadgen.java_tools import KAFKA_VERSION

_PARTS: Final = ("admin", "consumer", "producer")
"""Those of SASL and TLS start brokers of their own."""
_ATTEMPTS: Final = 3
"""Of a test that fails: several wait for a few seconds only, and a busy machine takes longer."""
_TEST_TIMEOUT_S: Final = 60
_TIMEOUT_S: Final = 900


def run(bootstrap: str, _: str, directory: Path) -> dict[str, str]:
    """Return the outcomes by test: passed, skipped, or the error's name."""
    # The tests' own brokers create topics with four partitions.
    create(bootstrap, "transactional_test_topic", partitions=4, copies=1)
    tests = [f"test/integration/test_{part}_integration.py" for part in _PARTS]
    outcomes: dict[str, str] = {}
    for attempt in range(_ATTEMPTS):
        cases = _cases(bootstrap, tests, directory / str(attempt))
        outcomes |= {_name(case): _outcome(case) for case in cases}
        tests = [_node_id(case) for case in cases if _outcome(case) not in ("passed", "skipped")]
        if not tests:
            break
    return outcomes


def _cases(bootstrap: str, tests: Sequence[str], directory: Path) -> list[ElementTree.Element]:
    """Run tests; return the report's cases."""
    directory.mkdir()
    sources, report = kafka_python_tests(), directory / "report.xml"
    settings = {
        "KAFKA_URI": f"kafka://{bootstrap}",
        "KAFKA_VERSION": KAFKA_VERSION,
        "KAFKA_ROOT": str(directory),  # Nothing is started from there.
        "PYTHONPATH": str(sources),
    }
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={sources}", f"--junit-xml={report}"]
    options += [f"--timeout={_TEST_TIMEOUT_S}", "--timeout-method=signal"]
    with (directory / "output").open("wb") as output:
        subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=sources,
            env=dict(os.environ) | settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )
    return list(ElementTree.parse(report).iter("testcase"))


def _node_id(case: ElementTree.Element) -> str:
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def _name(case: ElementTree.Element) -> str:
    part = case.get("classname", "").rpartition(".")[2].removeprefix("test_").removesuffix("_integration")
    return f"{part}: {' '.join(case.get('name', '').removeprefix('test_').replace('_', ' ').split())}"


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return found.get("message", kind).split(":")[0].rpartition(".")[2].strip()
    return "skipped" if case.find("skipped") is not None else "passed"
