"""``stratalog job backfill``: creates a topic from files, or from a topic of another Kafka cluster, on Spark."""

from __future__ import annotations

from pathlib import Path

import click

from stratalog.client_config import client_config
from stratalog.commands.spark_jobs import modules, shown_progress, spark_master
from stratalog.config_values import config_values
from stratalog.output import json_option, print_done
from stratalog.parameters import Integer
from stratalog.target import metadata_of, metadata_options, store_of, with_valid_ports
from stratalog_core.errors import Invalid

_FORMATS = ("parquet", "orc", "json", "csv", "avro")


@click.command("backfill")
@click.argument("paths", nargs=-1, metavar="[PATH]…")
@click.option(
    "--format",
    "file_format",
    type=click.Choice(_FORMATS),
    default="parquet",
    show_default=True,
    help="Format of the files.",
)
@click.option(
    "--avro-schema", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Reader schema of Avro files, as JSON (default: the schema of the first file, which all others must have).",
)  # fmt: skip
@click.option(
    "--from-kafka", metavar="HOST:PORT", callback=with_valid_ports,
    help="Copy a topic of the cluster at these brokers instead of files.",
)  # fmt: skip
@click.option("--from-topic", help="Name of the topic to copy (default: that of the new one).")
@click.option(
    "--from-config", "client", multiple=True, metavar="NAME=VALUE",
    help="librdkafka setting of the consumers; repeatable. Others can see it: give secrets in --from-config-file.",
)  # fmt: skip
@click.option(
    "--from-config-file", "client_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with librdkafka settings of the consumers, as Java properties.",
)  # fmt: skip
@click.option("--keep-offsets", is_flag=True, help="Keep the offsets of the copied records, instead of numbering them from 0.")
@click.option("--topic", required=True, help="Name of the new topic.")
@click.option(
    "--partitions",
    type=Integer(min=1),
    help="Partitions of the new topic. Required for files; a copy has as many as the original.",
)
@click.option("--key", help="SQL expression for the key (default: column key, if it exists).")
@click.option("--value", help="SQL expression for the value (default: column value, else the row as JSON).")
@click.option("--headers", help="SQL expression for the headers: an array of structs of key and value.")
@click.option("--timestamp", help="SQL expression for the timestamp (default: column timestamp, else now).")
@click.option("--partition", help="SQL expression for the partition (default: column partition, else by the key's hash).")
@click.option(
    "--compression", type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]), default="zstd", show_default=True,
    help="Compression of the record batches.",
)  # fmt: skip
@click.option("--config", "configs", multiple=True, metavar="NAME=VALUE", help="Topic config, by Kafka's name; repeatable.")
@click.option("--master", help="Spark master (default: local[*,4], or the one of spark-submit).")
@metadata_options
@json_option
def backfill_job(
    paths: tuple[str, ...],
    file_format: str,
    avro_schema: Path | None,
    from_kafka: str | None,
    from_topic: str | None,
    client: tuple[str, ...],
    client_file: Path | None,
    keep_offsets: bool,
    topic: str,
    partitions: int | None,
    compression: str,
    configs: tuple[str, ...],
    master: str | None,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
    **expressions: str | None,
) -> None:
    """Create a topic from files, or from a topic of another Kafka cluster. Spark's executors write its segments to the bucket.

    The records do not pass through this cluster's brokers. The topic appears as a whole at the end; if the job fails, no topic
    is created. Records from files are ordered by timestamp within a partition. A copied topic has the records that were
    committed when the job started, with their keys, values, headers, timestamps, partitions and order. retention.ms is
    unlimited unless --config sets it.
    """
    given = {name: text for name, text in expressions.items() if text is not None}
    of_files = [*paths, *(f"--{name}" for name in given), *(["--avro-schema"] if avro_schema else [])]
    if from_kafka is not None and of_files:
        raise Invalid(f"--from-kafka copies a topic as it is: leave out {', '.join(of_files)}")
    if from_kafka is None:
        _check_files(paths, partitions, any((from_topic, client, client_file, keep_offsets)))
    with modules():
        from stratalog_pipeline.jobs.backfill import BulkTarget, backfill_files, backfill_kafka
        from stratalog_pipeline.jobs.backfill_sources import KafkaSource, kafka_range
        from stratalog_pipeline.jobs.session import job_session
    found = None
    if from_kafka is not None:
        settings = client_config("--from-config", client, client_file)
        source = KafkaSource(bootstrap=from_kafka, topic=from_topic or topic, client=settings)
        found = kafka_range(source)
    target = BulkTarget(
        topic=topic, partitions=partitions or (len(found.splits) if found else 0), store=store_of(data, store),
        metadata=",".join(metadata_of(data, metadata)), compression=compression, configs=config_values(configs),
    )  # fmt: skip
    schema = _text(avro_schema) if avro_schema is not None else None
    with (
        job_session("backfill", spark_master(master)) as spark,
        shown_progress("tasks that read and write rows") as on_progress,
    ):
        if found is not None:
            result = backfill_kafka(spark, found, target, on_progress, keeps_offsets=keep_offsets)
        else:
            result = backfill_files(spark, paths, file_format, given, target, on_progress, avro_schema=schema)
    document = {
        "topic": topic, "partitions": target.partitions, "records": result.records, "seconds": round(result.seconds, 1),
        **({"source": [{"first": each.offsets.first, "end": each.offsets.end} for each in found.splits]} if found else {}),
    }  # fmt: skip
    print_done(document, f"{result.records} records are in topic {topic}", as_json=as_json)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as malformed:
        raise Invalid(f"--avro-schema {path} is not text in UTF-8: {malformed}") from malformed


def _check_files(paths: tuple[str, ...], partitions: int | None, has_options_of_copies: bool) -> None:
    if has_options_of_copies:
        raise Invalid("--from-topic, --from-config, --from-config-file and --keep-offsets need --from-kafka")
    if not paths:
        raise Invalid("no source: name the files to read, or the brokers of a topic to copy with --from-kafka")
    if partitions is None:
        raise Invalid("--partitions is missing: the number of the new topic's partitions")
