"""``stratalog job …`` as a user runs it: a process of its own, local Spark, a bucket in a directory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from stratalog.exit_codes import ExitCode
from stratalog_core.batches.records import Record, build_batch

if TYPE_CHECKING:
    from unit.pipeline.conftest import ColdBucket

pytestmark = pytest.mark.spark


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stratalog", "job", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def document(*words: str) -> Any:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def batches(first: int, count: int) -> list[bytes]:
    return [
        bytes(build_batch([Record(offset=o, timestamp_ms=1_700_000_000_000 + o, key=b"k", value=b"v" * 90)], compression=4))
        for o in range(first, first + count)
    ]


@pytest.mark.timeout(600)
def test_audit_usage_and_export_from_the_command_line(cold_bucket: ColdBucket, tmp_path: Path) -> None:
    cold_bucket.add_topic("flights", [[batches(0, 50), batches(50, 50)], [batches(0, 20)]], block_bytes=2000)
    page = tmp_path / "audit.html"
    audited = document("audit", "--store", str(cold_bucket.root), "--html", str(page))
    assert (audited["sound"], audited["totals"]["records"]) == (True, 120)
    assert [len(one["digest"]) for one in audited["partitions"]] == [64, 64]
    assert "2023-11-14" in page.read_text()
    used = document("usage", "--store", str(cold_bucket.root), "flights", "--depth", "batches")
    assert [(row["compression"], row["records"]) for row in used["codecs"]] == [("zstd", 120)]
    out = tmp_path / "out"
    exported = document("export", "--store", str(cold_bucket.root), "flights", "--to", str(out))
    assert exported["records"] == 120
    assert pq.read_table(out).num_rows == 120
    first = cold_bucket.root / cold_bucket.segment_keys["flights", 0][0]
    content = bytearray(first.read_bytes())
    content[100] ^= 1
    first.write_bytes(content)
    damaged = run("audit", "--store", str(cold_bucket.root), "--pattern", "fl.*")
    assert damaged.returncode == ExitCode.FINDINGS
    assert f"flights-0: segment {cold_bucket.segment_keys['flights', 0][0]}, block at byte 0" in damaged.stderr
    assert "Traceback" not in damaged.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("audit", "--store", "nowhere"), "there is no directory"),
        (("usage", "--store", ".", "--pattern", "("), "not a regular expression"),
        (("usage", "--store", ".", "a", "--pattern", "b"), "not both"),
        (("export", "--store", "."), "Missing option '--to'"),
    ],
)
def test_wrong_usage_is_one_clear_line(words: tuple[str, ...], message: str) -> None:
    done = run(*words)
    assert done.returncode == ExitCode.USAGE
    assert message in done.stderr
    assert "Traceback" not in done.stderr
