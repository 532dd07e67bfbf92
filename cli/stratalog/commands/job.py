"""``stratalog job …``: jobs over a bucket's history, on Spark: local here, or a cluster. Also a script for spark-submit."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from stratalog.client_config import client_config, warn_of_secrets
from stratalog.command_group import CommandGroup
from stratalog.commands.job_backfill import backfill_job
from stratalog.commands.job_compact import compact
from stratalog.commands.job_erase import erase
from stratalog.commands.spark_jobs import (
    given_options,
    job_options,
    master_of,
    modules,
    options_and_topics,
    print_report,
    read_options,
    shown_progress,
    value_options,
)
from stratalog.exit_codes import ExitCode
from stratalog.parameters import TIMES, Integer, Number, moment_ms
from stratalog.target import name_values, with_valid_ports
from stratalog_core.errors import Invalid

if TYPE_CHECKING:
    from stratalog_pipeline.options import ReadOptions

_NUMBER_MAX = 1e11
"""The largest shift in seconds, some 3,000 years, and the largest rate."""
_INSTALL_ICEBERG = "--iceberg needs pyiceberg: pip install 'stratalog[jobs,iceberg]'"


@click.group(cls=CommandGroup)
def job() -> None:
    """Run jobs over a bucket's history on Spark, without a broker.

    Local by default; `--master spark://…` runs on a cluster, and so does spark-submit with this module as its script.
    Credentials for S3 come from the AWS environment variables, of the driver and of the executors.
    """


@job.command()
@job_options
@click.option(
    "--bootstrap", callback=with_valid_ports, help="Also compare the bucket with what these brokers serve (HOST:PORT)."
)
def audit(bootstrap: str | None, **given: Any) -> None:
    """Check that every offset is present exactly once and unaltered, in all topics or in the named ones.

    Reads every segment in full and checks the checksums of blocks and batches, offsets, the chain of manifests, and the Merkle
    tree of each partition, whose head is the partition's digest. Also reports records by day, late records and repeated
    batches. Exits with 7 if it finds problems.
    """
    where = given_options(**given)
    options = where.source(**({"kafka.bootstrap.servers": bootstrap} if bootstrap else {}))
    with modules():
        from stratalog_pipeline.jobs.audit import audit as run_audit
        from stratalog_pipeline.jobs.report import audit_report
        from stratalog_pipeline.jobs.session import job_session
    parsed = read_options(options)
    with job_session("audit", master_of(where)) as spark, shown_progress("tasks that read segments") as on_progress:
        found = run_audit(spark, parsed, on_progress)
    report = audit_report(found)
    print_report(where, report)
    if report.problems:
        click.get_current_context().exit(ExitCode.FINDINGS)


@job.command()
@job_options
@click.option(
    "--depth",
    type=click.Choice(["blocks", "batches", "records"]),
    default="blocks",
    show_default=True,
    help="blocks: read indexes only; batches: headers too, for producers and compression; records: everything, for keys.",
)
@click.option(
    "--top",
    "heaviest",
    type=Integer(1, 10_000),
    default=20,
    show_default=True,
    help="Number of producers and keys to list.",
)
def usage(depth: Literal["blocks", "batches", "records"], heaviest: int, **given: Any) -> None:
    """Show how much space history takes: by topic, partition and day, by compression and producer.

    Also lists the keys with the most records.
    """
    where = given_options(**given)
    with modules():
        from stratalog_pipeline.jobs.report import usage_report
        from stratalog_pipeline.jobs.session import job_session
        from stratalog_pipeline.jobs.usage import usage as run_usage
    read_options(where.source())
    with job_session("usage", master_of(where)) as spark:
        found = run_usage(spark, where.source(), depth, heaviest)
    print_report(where, usage_report(found))


@job.command()
@job_options
@click.option("--to", "target", required=True, help="Where the Parquet files go: a directory, s3://, az:// or gs:// URL.")
@click.option("--headers", is_flag=True, help="Export headers, too.")
@click.option(
    "--isolation",
    type=click.Choice(["read_committed", "read_uncommitted"]),
    default="read_committed",
    show_default=True,
    help="read_committed skips the records of aborted transactions.",
)
@click.option("--file-mib", type=Integer(1, 4096), default=128, show_default=True, help="MiB of stored history per file.")
@click.option("--verify", is_flag=True, help="Read each file back and compare it with the bucket, record by record.")
@click.option("--allow-gaps", is_flag=True, help="Continue if retention removed records before they were exported.")
@click.option(
    "--iceberg",
    metavar="NAMESPACE.TABLE",
    help="Publish the files in this Apache Iceberg table. It is created if it does not exist.",
)
@click.option(
    "--catalog", default="default", show_default=True, help="Name of the Iceberg catalog in pyiceberg's configuration."
)
@click.option(
    "--catalog-property", "properties", multiple=True, metavar="NAME=VALUE",
    help="Property of the catalog, such as uri=sqlite:////dir/catalog.db or type=rest; repeatable.",
)  # fmt: skip
@value_options
def export(
    target: str,
    headers: bool,
    isolation: str,
    file_mib: int,
    verify: bool,
    allow_gaps: bool,
    iceberg: str | None,
    catalog: str,
    properties: tuple[str, ...],
    **given: Any,
) -> None:
    """Export history to Parquet, and to Iceberg, each record exactly once.

    Run it again to add what was offloaded since, or to finish a run that was interrupted: nothing is written twice. Files are
    written to topic=NAME/partition=N/ below the target. With --value-format, values become columns with the fields of their
    schema.
    """
    values = {name: given.pop(name) for name in [*given] if name.startswith("value_")}
    where = given_options(**given)
    more = {"includeHeaders": str(headers).lower(), "isolationLevel": isolation, "splitBytes": str(file_mib * 1024 * 1024)}
    more |= {name: text for name, text in values.items() if text is not None}
    with modules():
        from stratalog_pipeline.jobs.export import export as run_export
        from stratalog_pipeline.jobs.report import export_report
        from stratalog_pipeline.jobs.session import job_session
    catalog_properties = name_values(properties)
    warn_of_secrets("--catalog-property", catalog_properties, "give it in pyiceberg's configuration, and --catalog")
    if iceberg is not None:
        with modules(_INSTALL_ICEBERG):
            from stratalog_pipeline.jobs.iceberg import IcebergTarget, check_iceberg_url, publish
        check_iceberg_url(target)
    parsed = read_options(where.source(**more))
    with job_session("export", master_of(where)) as spark, shown_progress("tasks that write files") as on_progress:
        result = run_export(
            spark, parsed, target, verify=verify, allow_gaps=allow_gaps, has_place=iceberg is not None, on_progress=on_progress
        )
    if not result.files:
        click.echo("nothing to export: the target has all that was offloaded", err=True)
    published = None
    if iceberg is not None:
        table = IcebergTarget(table=iceberg, catalog=catalog, properties=catalog_properties)
        published = publish(target, table, verify=verify)
    print_report(where, export_report(result, target, published), tables=1)


@job.command()
@job_options
@click.option(
    "--bootstrap", callback=with_valid_ports,
    help="Brokers (HOST:PORT) from which to replay also the records that are not offloaded yet.",
)  # fmt: skip
@click.option("--to", required=True, metavar="HOST:PORT", callback=with_valid_ports, help="Brokers to send to.")
@click.option(
    "--to-topic",
    default="{topic}.replay",
    show_default=True,
    help="Topic to send to, which must exist; {topic} stands for the name of the source topic.",
)
@click.option(
    "--to-config", "client", multiple=True, metavar="NAME=VALUE",
    help="librdkafka setting of the producers; repeatable. Others can see it: give secrets in --to-config-file.",
)  # fmt: skip
@click.option(
    "--to-config-file", "client_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with librdkafka settings of the producers, as Java properties.",
)  # fmt: skip
@click.option("--since", metavar="TIME", help=f"Start at this time: {TIMES}.")
@click.option(
    "--until", metavar="TIME", help="End before this time (default: the end of each partition at the start of the replay)."
)
@click.option("--offsets", metavar="FIRST..END", help="Replay these offsets of every partition, END exclusive.")
@click.option("--where", help="SQL condition on key, value, topic, partition, offset, timestamp and headers.")
@click.option(
    "--timestamps", type=click.Choice(["original", "now"]), default="original", show_default=True,
    help="Keep the original timestamps, or use the time of sending.",
)  # fmt: skip
@click.option("--shift", "shift_s", type=float, metavar="NUMBER", default=0.0, help="Seconds to add to original timestamps.")
@click.option("--rate", type=Number(min=0), default=0.0, help="Maximum records per second over all partitions (0: no limit).")
@click.option(
    "--window",
    type=Integer(min=1),
    default=1_000_000,
    show_default=True,
    help="Offsets per window; the checkpoint is updated after each.",
)
@click.option(
    "--checkpoint",
    help="Directory, s3://, az:// or gs:// URL for the progress, so that the same command continues an interrupted replay.",
)
@click.option(
    "--keep-partitions",
    is_flag=True,
    help="Send each record to the partition number that it has in the source, instead of partitioning by key.",
)
@click.option("--mark", is_flag=True, help="Add the header stratalog.source: topic, partition and offset of the original.")
@click.option(
    "--delivery",
    type=click.Choice(["exactly-once", "at-least-once"]),
    default="exactly-once",
    show_default=True,
    help="After an interruption, at-least-once may send the records of the current window twice; exactly-once never does.",
)
@click.option("--allow-gaps", is_flag=True, help="Continue if retention removes records before they are sent.")
@click.option(
    "--trust-markers",
    is_flag=True,
    help="Continue although markers of written tasks are missing, or the history changed after they were written.",
)
def replay(
    bootstrap: str | None,
    to: str,
    to_topic: str,
    client: tuple[str, ...],
    client_file: Path | None,
    since: str | None,
    until: str | None,
    offsets: str | None,
    where: str | None,
    timestamps: str,
    shift_s: float,
    rate: float,
    window: int,
    checkpoint: str | None,
    keep_partitions: bool,
    mark: bool,
    delivery: str,
    allow_gaps: bool,
    trust_markers: bool,
    **given: Any,
) -> None:
    """Send records from history to a topic again, in the same cluster or another one.

    The range is fixed when the replay starts. Each partition's records are sent in order, in transactions: read_committed
    consumers see each record once, even if the replay is interrupted and continues from its checkpoint. Consumer groups of
    the source topic are not changed. If retention removes a part of the range before it is sent, the replay fails and names
    it, or leaves it out and reports it (--allow-gaps).
    """
    shared = given_options(**given)
    for name, number in (("--shift", shift_s), ("--rate", rate)):
        if not abs(number) <= _NUMBER_MAX:
            raise Invalid(f"{name} is {number}; maximum is {_NUMBER_MAX:.0e}")
    if shift_s and timestamps == "now":
        raise Invalid("--shift has no effect with --timestamps now: leave out one of them")
    if trust_markers and delivery == "at-least-once":
        raise Invalid("--trust-markers has no effect with --delivery at-least-once: leave out one of them")
    with modules():
        from stratalog_pipeline.jobs.replay import ReplayTarget, check_targets
        from stratalog_pipeline.jobs.replay import replay as run_replay
        from stratalog_pipeline.jobs.report import replay_report
        from stratalog_pipeline.jobs.session import job_session
    source = shared.source(**_range(since, until, offsets), **({"kafka.bootstrap.servers": bootstrap} if bootstrap else {}))
    target = ReplayTarget(
        bootstrap=to,
        topic=to_topic,
        client=client_config("--to-config", client, client_file),
        shift_ms=round(shift_s * 1000) if timestamps == "original" else None,
        rows_per_s=rate,
        where=where,
        keeps_partitions=keep_partitions,
        marks=mark,
        is_exactly_once=delivery == "exactly-once",
        trusts_markers=trust_markers,
    )
    parsed, topics = options_and_topics(source)
    if offsets is not None:
        source |= _offsets_of(parsed, offsets)
    # A pattern may match more topics now than the replay that a checkpoint continues.
    if checkpoint is None or shared.topics:
        check_targets(target, dict.fromkeys(topics, 0))
    with job_session("replay", master_of(shared)) as spark, shown_progress("offsets sent") as on_progress:
        result = run_replay(
            spark, source, target, checkpoint=checkpoint, window_offsets=window,
            bounds=_bounds_as_given(since, until, offsets), allow_gaps=allow_gaps, on_progress=on_progress,
        )  # fmt: skip
    print_report(shared, replay_report(result, f"{to_topic} at {to}"))


def _range(since: str | None, until: str | None, offsets: str | None) -> dict[str, str]:
    """Return the source's bounds by time. Raises ``Invalid`` for malformed times, or times with offsets."""
    if offsets is not None and (since or until):
        raise Invalid("give --offsets, or --since and --until, not both")
    bounds = {"startingTimestamp": since, "endingTimestamp": until}
    found = {name: str(moment_ms(text)) for name, text in bounds.items() if text}
    # A partition whose last record is older than the time has nothing to replay.
    return {**found, "startingOffsetsByTimestampStrategy": "latest"}


def _bounds_as_given(since: str | None, until: str | None, offsets: str | None) -> str:
    """Return the bounds in the words of the command, which mean other offsets and times when it is given again."""
    given = (("since", since), ("until", until), ("offsets", offsets))
    return " ".join(f"--{name} {text}" for name, text in given if text)


def _offsets_of(options: ReadOptions, text: str) -> dict[str, str]:
    """Return the source's bounds for these offsets of every selected partition, clamped to its offsets. Raises ``Invalid``."""
    from stratalog_pipeline.stream_plan import wanted_ranges

    match = re.fullmatch(r"([0-9]{0,19})\.\.([0-9]{0,19})", text)
    if match is None:
        raise Invalid(f"--offsets must look like 100..200, 100.. or ..200, not {text!r}")
    if match[1] and match[2] and int(match[1]) >= int(match[2]):
        raise Invalid(f"--offsets {text} is empty: the second offset, which is exclusive, must be larger")
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    for (topic, number), held in wanted_ranges(options).items():
        first = min(max(int(match[1] or 0), held.first), held.end)
        starts.setdefault(topic, {})[number] = first
        ends.setdefault(topic, {})[number] = max(first, min(int(match[2] or held.end), held.end))
    return {"startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}


job.add_command(backfill_job)
job.add_command(compact)
job.add_command(erase)


if __name__ == "__main__":
    from stratalog.__main__ import main

    main(job)
