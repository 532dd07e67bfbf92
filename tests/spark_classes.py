"""``python tests/spark_classes.py FILE`` writes an archive of the classes that Spark loads, for Java's class data sharing.

With it a short job takes two thirds of the processor time, and tests run dozens. Java ignores an archive of another version or
of other jars.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
from conftest import QUICK_START
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

_END_S = 300.0


def main() -> None:
    """Start Spark, use what jobs and tests use, and move the archive to its place when Java has written it."""
    file = Path(sys.argv[1]).resolve()
    with TemporaryDirectory(dir=file.parent) as directory:
        archive = Path(directory) / "archive"
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_SUBMIT_OPTS"] = f"{QUICK_START} -XX:ArchiveClassesAtExit={archive}"
        builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
        spark = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
        spark.sparkContext.setLogLevel("OFF")
        _use(spark, f"{directory}/data")
        gateway = SparkContext._gateway
        assert gateway is not None
        spark.stop()
        # Java ends when its standard input does, and then writes the archive.
        gateway.proc.stdin.close()
        gateway.proc.wait(_END_S)
        archive.replace(file)


def _use(spark: SparkSession, data: str) -> None:
    """Run what loads most classes: tasks in Python, a query with a shuffle, files, and a stream."""
    spark.sparkContext.parallelize(range(4), 2).mapPartitions(list).collect()
    rows = spark.range(100).withColumn("text", sql.col("id").cast("string")).withColumn("at", sql.current_timestamp())
    rows.write.parquet(f"{data}/files")
    read = spark.read.parquet(f"{data}/files")
    read.filter("id > 3").groupBy("text").agg(sql.count("*"), sql.max("at")).orderBy("text").collect()
    read.mapInArrow(_same, read.schema).collect()
    stream = spark.readStream.schema(read.schema).parquet(f"{data}/files").writeStream.format("memory").queryName("rows")
    stream.trigger(availableNow=True).option("checkpointLocation", f"{data}/checkpoint").start().awaitTermination()


def _same(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


if __name__ == "__main__":
    main()
