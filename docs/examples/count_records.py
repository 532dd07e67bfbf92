"""Count a topic's records in the bucket, by partition: ``spark-submit count_records.py TOPIC``.

Reads the object store that STRATALOG_STORE names; no broker is needed.
"""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession


def main(topic: str) -> None:
    """Print one row per partition: its records, first and last offset."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # Spark's workers run this interpreter, which knows the format.
    spark = SparkSession.builder.appName(f"count {topic}").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    records = spark.read.format("stratalog").option("store", os.environ["STRATALOG_STORE"]).option("subscribe", topic).load()
    records.createOrReplaceTempView("records")
    spark.sql(
        "SELECT partition, count(*) AS records, min(offset) AS first, max(offset) AS last FROM records"
        " GROUP BY partition ORDER BY partition"
    ).show()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
