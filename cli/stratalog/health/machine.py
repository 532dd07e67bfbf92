"""Checks that this machine can run Stratalog."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from stratalog.health.finding import Finding, fail, ok, warn
from stratalog.output import human_bytes

_FREE_BYTES_MIN = 2 * 1024**3
_OPEN_FILES_MIN = 4096
_JAVA_MIN = 17


def check_machine(data: Path) -> Iterator[Finding]:
    """Check Python, disk, open files and Java."""
    yield ok("python", ".".join(map(str, sys.version_info[:3])))
    yield _disk(data)
    yield _open_files()
    yield _java()


def _disk(data: Path) -> Finding:
    existing = next(path for path in (data.absolute(), *data.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{human_bytes(free)} free at {existing}"
    if free < _FREE_BYTES_MIN:
        return fail("disk", detail, f"free at least {human_bytes(_FREE_BYTES_MIN)}: a full bookie accepts no records")
    if not os.access(existing, os.W_OK):
        return fail("disk", f"{existing} is not writable", "choose another --data, or change its owner")
    return ok("disk", detail)


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _OPEN_FILES_MIN:
        return warn("open files", f"limit {soft}", f"run `ulimit -n {_OPEN_FILES_MIN}`: every client connection takes one")
    return ok("open files", f"limit {soft}")


def _java() -> Finding:
    remedy = f"install Java {_JAVA_MIN} or newer; only Spark needs it"
    program = shutil.which("java")
    if program is None:
        return warn("java", "not found", remedy)
    try:
        shown = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    except (OSError, subprocess.TimeoutExpired) as failure:
        return warn("java", str(failure), remedy)
    version = re.search(r'version "(\d+)', shown)
    if version is None or int(version[1]) < _JAVA_MIN:
        return warn("java", shown.splitlines()[0] if shown else "no version", remedy)
    return ok("java", version[1])
