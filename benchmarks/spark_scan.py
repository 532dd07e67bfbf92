"""How fast Spark reads the cold tier: `python -m benchmarks.spark_scan [RECORDS]`, from the repository's root.

One topic of four partitions, 1 KB records, zstd batches of about 1 MB, a local directory, local[2], every column to a noop
sink. The first run, which starts the Python workers, is not counted; of the others the best is.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import SparkSession

from benchmarks.kernels import BATCH_BYTES, one_batch
from stratalog_core.batch import assign_offset
from stratalog_core.compression import ZSTD

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


def rows_per_second(session: SparkSession, url: str, records: int, schema: str | None = None) -> float:
    reader = session.read.format("stratalog").option("subscribe", "bench")
    if schema is not None:
        reader = reader.schema(schema)
    start = time.perf_counter()
    reader.load(url).write.format("noop").mode("overwrite").save()
    return records / (time.perf_counter() - start)


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
        rows_per_second(session, url, records)
        for name, schema in (("every column", None), ("partition and offset", "partition int, offset bigint")):
            best = max(rows_per_second(session, url, records, schema) for _ in range(RUNS))
            print(f"{name}: {best / 1e6:.2f} million rows/s ({records} records of {RECORD_BYTES} bytes)")
    session.stop()


if __name__ == "__main__":
    main()
