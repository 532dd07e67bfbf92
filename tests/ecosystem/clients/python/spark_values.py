"""Reads what ``serializers.py`` wrote by Spark, with ``value_format``: ``spark_values.py BOOTSTRAP PREFIX REGISTRY STORE``.

Prints one line per step: its name, a tab, its outcome. STORE is read if the brokers do not tell theirs, as Apache Kafka's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ecosystem.clients.python.flights import COUNT, MESSAGE, expected, text_subject, topic
from pyspark.sql import SparkSession

from stratalog_core.errors import Invalid
from stratalog_pipeline.brokers import Brokers
from stratalog_pipeline.options import parse_options


def store(bootstrap: str, other: str) -> str:
    """Return the store's URL as the brokers tell it, or ``other``."""
    options = parse_options({"kafka.bootstrap.servers": bootstrap, "subscribe": "any"})
    try:
        return Brokers(options).store_url()
    except Invalid:
        return other


def read(session: SparkSession, options: Mapping[str, str], value_format: str) -> str:
    frame = session.read.format("stratalog").options(**options).load()
    rows: list[Any] = frame.select("offset", "value").orderBy("offset").collect()
    # The session's zone is UTC, of which collected times have no mark.
    wanted = [_without_zone(expected(value_format, number)) for number in range(COUNT)]
    found = [row.value.asDict(recursive=True) for row in rows]
    different = [number for number, (ours, theirs) in enumerate(zip(found, wanted, strict=False)) if ours != theirs]
    first = f", first {found[different[0]]}" if different else ""
    return f"{len(found)} values{first or ' as written'}"


def _without_zone(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.replace(tzinfo=None) if name == "departed" else value for name, value in row.items()}


def main() -> None:
    bootstrap, prefix, registry, other = sys.argv[1:]
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    session = builder.config("spark.driver.host", "127.0.0.1").config("spark.sql.session.timeZone", "UTC").getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    shared = {"kafka.bootstrap.servers": bootstrap, "store": store(bootstrap, other), "value_registry": registry}
    message = {"value_message": MESSAGE}
    reads = {
        "avro": ("avro", {}),
        "protobuf": ("protobuf", message),
        "protobuf as text": ("protobuf", {**message, "value_subject": text_subject(prefix)}),
        "json": ("json", {}),
    }
    for name, (value_format, more) in reads.items():
        options = {**shared, "subscribe": topic(prefix, value_format), "value_format": value_format, **more}
        print(f"read by Spark, {name}\t{read(session, options, value_format)}", flush=True)
    session.stop()


main()
