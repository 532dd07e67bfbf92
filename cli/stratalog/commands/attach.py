"""``stratalog tier attach`` creates a topic from existing history; ``tier detach`` removes one and keeps its history."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog.config_values import config_values
from stratalog.deletion import confirm, yes_option
from stratalog.output import human_bytes, json_option, print_done, print_json, print_rows
from stratalog.parameters import Integer
from stratalog.target import metadata_of, metadata_options, store_of
from stratalog.waiting import timeout_option
from stratalog_metadata.records import REPLICATION_FACTOR_MAX

_COLUMNS = ("topic", "partition", "start_offset", "end_offset", "records", "bytes")


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("--topic", help="Topic in SOURCE, by name or id (default: its only topic).")
@click.option("--as", "name", help="Name of the new topic (default: as in the source).")
@click.option("--config", "configs", multiple=True, metavar="NAME=VALUE", help="Topic config, by Kafka's name; repeatable.")
@click.option(
    "--replication-factor",
    "factor",
    type=Integer(1, REPLICATION_FACTOR_MAX),
    help="Replication factor of new records (default: 3, or the number of bookies if that is less).",
)
@click.option("--dry-run", is_flag=True, help="Show what the source holds; write nothing.")
@metadata_options
@json_option
def attach(
    sources: tuple[str, ...],
    topic: str | None,
    name: str | None,
    configs: tuple[str, ...],
    factor: int | None,
    dry_run: bool,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Create a topic from the history in SOURCE. The records do not pass through brokers.

    SOURCE is the bucket of another cluster (a directory, s3://, az:// or gs:// URL), or the log directories of Kafka's brokers.
    Offsets are kept. Each batch and offset is checked, and each segment is read back. All partitions appear at once at the
    end; if a check fails, no topic is created. Committed offsets of groups are not copied.

    Then waits up to 60 seconds until a tiering worker has removed the marker that hides the topic from readers of the bucket.
    If none does, the command exits with 3: the topic is there, but a restore from the bucket would leave it out.

    retention.ms is unlimited unless the source's topic or --config sets it.
    """
    from stratalog.tier.attaching import AttachOptions, attach_source, source_rows

    options = AttachOptions(source_topic=topic, name=name, configs=config_values(configs), replication_factor=factor)
    if dry_run:
        rows = asyncio.run(source_rows(sources, options))
    else:
        rows = asyncio.run(attach_source(metadata_of(data, metadata), store_of(data, store), sources, options))
    if as_json:
        print_json({"partitions": rows})
        return
    print_rows(rows, [column for column in _COLUMNS if column in rows[0]])
    if dry_run:
        click.echo(f"{human_bytes(sum(int(str(row['bytes'])) for row in rows))} can be attached", err=True)
    else:
        click.echo(f"{sum(int(str(row['records'])) for row in rows)} records are attached", err=True)


@click.command()
@click.argument("topic")
@timeout_option(120.0, "Seconds to wait until everything is cold.")
@yes_option
@metadata_options
@json_option
def detach(
    topic: str, timeout_s: float, yes: bool, data: Path | None, metadata: str | None, store: str | None, as_json: bool
) -> None:
    """Remove TOPIC from the cluster and leave all of its history in the bucket.

    Everything is offloaded first. Nothing deletes the objects from then on. `stratalog serve-archive` and Spark read them,
    `stratalog restore --topic` brings the topic back, `stratalog tier attach` copies it to another cluster. Committed offsets
    of groups are lost.
    """
    from stratalog.tier.attaching import detach as detach_topic

    confirm(f"Remove topic {topic} from the cluster, and leave its history in the bucket?", yes=yes)
    asyncio.run(detach_topic(metadata_of(data, metadata), store_of(data, store), topic, timeout_s))
    print_done({"detached": topic}, f"topic {topic} is in the bucket only", as_json=as_json)
