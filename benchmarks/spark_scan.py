"""How fast Spark reads the cold tier: `python -m benchmarks.spark_scan [RECORDS]`, from the repository's root.

One topic of four partitions, 1 KB records, zstd batches of about 1 MB, a local directory, local[2], every column to a noop
sink; and, as the control, the same rows in zstd Parquet through Spark's own reader. The first run of each, which starts
workers and warms caches, is not counted; of the others the best is.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession

from benchmarks.kernels import BATCH_BYTES, one_batch
from stratalog_core.batches.batch import assign_offset
from stratalog_core.batches.compression import ZSTD
from stratalog_pipeline.arrow.schema import COLUMNS
from stratalog_pipeline.bucket import Bucket
from stratalog_pipeline.options import parse_options
from stratalog_pipeline.scan import scan_split
from stratalog_pipeline.scan_plan import plan_scan

RECORD_BYTES = 1000
RECORDS_PER_BATCH = BATCH_BYTES // RECORD_BYTES
PARTITIONS = 4
BATCHES_PER_SEGMENT = 200
RUNS = 4


def segments(batches: int) -> Iterator[list[bytes]]:
    template = one_batch(RECORD_BYTES, ZSTD)
    for first in range(0, batches, BATCHES_PER_SEGMENT):
        segment = []
        for number in range(first, min(first + BATCHES_PER_SEGMENT, batches)):
            batch = bytearray(template)
            assign_offset(batch, number * RECORDS_PER_BATCH, 0)
            segment.append(bytes(batch))
        yield segment


def build_bucket(root: Path, records: int) -> str:
    sys.path.insert(0, "tests")
    from unit.pipeline.conftest import ColdBucket

    bucket = ColdBucket(root)
    per_partition = list(segments(records // RECORDS_PER_BATCH // PARTITIONS))
    bucket.add_topic("bench", [per_partition] * PARTITIONS, block_bytes=1024 * 1024)
    return bucket.url


def write_parquet(url: str, directory: Path) -> None:
    """The same rows as Parquet, a file per split."""
    options = parse_options({"path": url, "subscribe": "bench"})
    with Bucket(url) as bucket:
        for number, split in enumerate(plan_scan(bucket, options).splits):
            rows = pa.Table.from_batches(scan_split(bucket, split, COLUMNS, read_committed=True))
            parquet.write_table(rows, directory / f"{number:04d}.parquet", compression="zstd")


def rows_per_second(frame: Callable[[], DataFrame], records: int) -> float:
    """The best of several runs after one that does not count."""
    frame().write.format("noop").mode("overwrite").save()
    best = 0.0
    for _ in range(RUNS):
        start = time.perf_counter()
        frame().write.format("noop").mode("overwrite").save()
        best = max(best, records / (time.perf_counter() - start))
    return best


def main() -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 1_400_000
    records -= records % (RECORDS_PER_BATCH * PARTITIONS)
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "3g")
    ).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    with tempfile.TemporaryDirectory() as directory:
        url = build_bucket(Path(directory) / "bucket", records)
        control = Path(directory) / "parquet"
        control.mkdir()
        write_parquet(url, control)
        reader = session.read.format("stratalog").option("subscribe", "bench")
        frames: dict[str, Callable[[], DataFrame]] = {
            "Parquet, every column": lambda: session.read.parquet(str(control)),
            "stratalog, every column": lambda: reader.load(url),
            "stratalog, partition and offset": lambda: reader.schema("partition int, offset bigint").load(url),
        }
        for name, frame in frames.items():
            print(f"{name}: {rows_per_second(frame, records) / 1e6:.2f} million rows/s")
    session.stop()


if __name__ == "__main__":
    main()
