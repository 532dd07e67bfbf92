"""``stratalog tier …``: history in the object store. Uses the metadata nodes or the store, never a broker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stratalog.command_group import CommandGroup
from stratalog.commands.attach import attach, detach
from stratalog.commands.collection import gc
from stratalog.commands.compact import compact
from stratalog.commands.restore_coordinators import restore_coordinators
from stratalog.deletion import confirm, yes_option
from stratalog.exit_codes import ExitCode
from stratalog.moments import format_moment
from stratalog.output import human_bytes, json_option, print_done, print_json, print_rows, progress_bar
from stratalog.parameters import Integer
from stratalog.target import addresses_or_store, existing_store, metadata_of, metadata_options, second_store_of, store_of
from stratalog.tier.copies import copied_partitions
from stratalog.tier.forks import (
    ForkedPartition,
    decide_fork,
    fork_row,
    fork_text,
    forked_partitions,
    given_up_text,
    only_fork,
    wait_for_resolution,
)
from stratalog.tier.history import cold_partitions, damage_text, finding_row, segment_rows, verified_row
from stratalog.tier.offload import Waiting, request_offload, wait_for_offload
from stratalog.tier.repair import RepairFrom
from stratalog.tier.report import PartitionTier, tier_report, topics_named
from stratalog.tier.scrub import MIN_AGE_S, Part, finding_text, scrub_bucket
from stratalog.tier.session import metadata_session, store_session
from stratalog.tier.unrepaired import UnrepairedDamage, unrepaired_damage
from stratalog.waiting import timeout_option, wait_option
from stratalog_core.errors import Invalid
from stratalog_core.system import ThreadBackground
from stratalog_metadata.records import KEEP_METADATA, KEEP_STORE
from stratalog_tiering.cold.verifier import PartitionReport, Verifier
from stratalog_tiering.core.forks import Forked
from stratalog_tiering.store import ObjectStore

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_CHECKSUM_THREADS = 2
_SEGMENT_COLUMNS = ("topic", "partition", "base_offset", "last_offset", "record_count", "bytes", "key")
_VERIFIED_COLUMNS = ("topic", "partition", "start_offset", "end_offset", "segments", "records", "bytes", "findings")
_STATUS_COLUMNS = (
    "topic", "partition", "log_start_offset", "cold_end_offset", "cold_bytes", "hot_ledgers", "open_ledgers", "hot_bytes",
    "lag_records", "offloaded_at", "last_error",
)  # fmt: skip


@click.group(cls=CommandGroup)
def tier() -> None:
    """Show, offload, compact and verify history in the object store, attach and detach topics, and collect garbage."""


tier.add_command(attach)
tier.add_command(detach)
tier.add_command(compact)
tier.add_command(gc)
tier.add_command(restore_coordinators)


def _copy_option(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--copy", metavar="URL", help=f"{text} (default: that of --data, if it has one).")


@tier.command()
@click.argument("topics", nargs=-1)
@_copy_option("Store of the second copy, to show how far it is behind")
@metadata_options
@json_option
def status(
    topics: tuple[str, ...], copy: str | None, data: Path | None, metadata: str | None, store: str | None, as_json: bool
) -> None:
    """Show each partition's hot and cold data, its offload lag and its last error, and the lag of the second copy.

    Also shows how many damaged objects the continuous scrub could not repair, and the command to run next.
    """
    copy_url = existing_store(copy) if copy else second_store_of(data, store)
    rows, damage, copied = asyncio.run(_report(metadata_of(data, metadata), topics, copy_url))
    documents = [dataclasses.asdict(row) for row in rows]
    columns: tuple[str, ...] = _STATUS_COLUMNS
    if copy_url is not None:
        documents = [document | each for document, each in zip(documents, copied, strict=True)]
        columns = (*_STATUS_COLUMNS[:-1], "copy_lag_records", "copy_lag_versions", _STATUS_COLUMNS[-1])
    if as_json:
        print_json({"partitions": documents})
        return
    for document in documents:
        document["offloaded_at"] = format_moment(document["offloaded_at_ms"] or -1)
    print_rows(*_with_damage(*_with_compaction(*_with_locks(documents, columns))))
    for each in damage:
        click.echo(f"{each.sentence}; {each.remedy}", err=True)
    for row in rows:
        if row.last_error.startswith(Forked.__name__):
            click.echo(row.last_error, err=True)
        if row.undecided_from >= 0:
            click.echo(
                f"{row.topic}-{row.partition} waits for the transaction that is open since offset {row.undecided_from}",
                err=True,
            )
    cold, hot = sum(row.cold_bytes for row in rows), sum(row.hot_bytes for row in rows)
    click.echo(f"cold {human_bytes(cold)}, hot {human_bytes(hot)} sealed, {sum(row.open_ledgers for row in rows)} open ledgers")


async def _report(
    addresses: list[str], names: tuple[str, ...], copy_url: str | None
) -> tuple[list[PartitionTier], list[UnrepairedDamage], list[dict[str, object]]]:
    """Return the partitions, the damage that is known of them, and their columns of the second copy, if it is given."""
    async with metadata_session(addresses) as client:
        topics = topics_named(client.view, names)
        rows, damage = tier_report(client.view, topics), unrepaired_damage(client.view, topics)
    return rows, damage, await copied_partitions(topics, rows, copy_url) if copy_url is not None else []


@tier.command()
@click.argument("topics", nargs=-1, required=True)
@wait_option("everything is cold and verified", default=False)
@click.option(
    "--delete-hot",
    is_flag=True,
    help="Delete hot copies as soon as the cold ones are verified, without waiting for the deletion lag.",
)
@timeout_option(120.0, "Seconds to wait per topic.")
@metadata_options
@json_option
def offload(
    topics: tuple[str, ...],
    wait: bool,
    delete_hot: bool,
    timeout_s: float,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Seal, offload and verify everything that TOPICS contain now."""
    asyncio.run(_offload(metadata_of(data, metadata), topics, delete_hot, timeout_s if wait else None))
    sentence = "everything is cold and verified" if wait else "requested; see `stratalog tier status` for progress"
    print_done({"topics": list(topics), "cold": wait}, sentence, as_json=as_json)


async def _offload(addresses: list[str], names: tuple[str, ...], delete_hot: bool, timeout_s: float | None) -> None:
    async with metadata_session(addresses) as client:
        topics = topics_named(client.view, names)
        for topic in topics:
            await request_offload(client, topic, delete_hot=delete_hot)
            click.echo(f"requested {topic.name}: {topic.partition_count} partitions", err=True)
        if timeout_s is None:
            return
        with progress_bar() as progress:
            for topic in topics:
                task = progress.add_task(f"offloading {topic.name}", total=topic.partition_count)
                waiting = Waiting(timeout_s=timeout_s, on_progress=partial(_show_done, progress, task))
                await wait_for_offload(client, topic, waiting)


def _show_done(progress: Progress, task: TaskID, done: int) -> None:
    progress.update(task, completed=done)


@tier.command()
@click.argument("topics", nargs=-1)
@metadata_options
@json_option
def show(topics: tuple[str, ...], data: Path | None, metadata: str | None, store: str | None, as_json: bool) -> None:
    """List segments. With --store alone it reads only the object store, and the cluster need not run."""
    rows = asyncio.run(_show(addresses_or_store(data, metadata, store), store_of(data, store), topics))
    if as_json:
        print_json({"segments": rows})
    else:
        print_rows(*_with_locks(rows, _SEGMENT_COLUMNS))


def _with_locks(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return rows and columns of a table, with the ends of locks if there are any."""
    if not any(row["lock_until_ms"] for row in rows):
        return rows, columns
    shown = [row | {"locked_until": format_moment(row["lock_until_ms"] or -1)} for row in rows]
    return shown, (*columns[:-1], "lock_mode", "locked_until", columns[-1])


def _with_compaction(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return rows and columns of a table, with the last compactions and those in progress if there are any."""
    if not any(row["compacted_at_ms"] or row["compacting"] for row in rows):
        return rows, columns
    shown = [
        row
        | {"compacted_at": format_moment(row["compacted_at_ms"] or -1)}
        | {"compacting": f"{row['compacting']} {row['compacting_offset']}/{row['compacting_end']}" if row["compacting"] else ""}
        for row in rows
    ]
    return shown, (*columns[:-1], "compacted_at", "compacting", columns[-1])


def _with_damage(rows: list[dict[str, Any]], columns: tuple[str, ...]) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return rows and columns of a table, with the numbers of damaged objects if there are any."""
    if not any(row["unrepaired"] for row in rows):
        return rows, columns
    shown = [row | {"unrepaired": len(row["unrepaired"])} for row in rows]
    return shown, (*columns[:-1], "unrepaired", columns[-1])


async def _show(addresses: list[str], url: str, topics: tuple[str, ...]) -> list[dict[str, object]]:
    async with store_session(url) as store:
        if addresses:
            await _print_forks(addresses, store, topics)
        partitions = await cold_partitions(store, addresses, topics)
        return [row async for row in segment_rows(store, partitions)]


async def _print_forks(addresses: list[str], store: ObjectStore, topics: tuple[str, ...]) -> None:
    async with metadata_session(addresses) as client:
        for forked in await forked_partitions(client.view, store, topics_named(client.view, topics)):
            click.echo(fork_text(forked), err=True)


@tier.command("resolve-fork")
@click.argument("topic")
@click.argument("partition", type=Integer(min=0))
@click.option(
    "--keep",
    type=click.Choice([KEEP_METADATA, KEEP_STORE]),
    help="The history to keep (default: show both and change nothing).",
)
@click.option(
    "--discard-hot", is_flag=True, help="With --keep store: delete at once the hot ledgers that do not continue that history."
)
@timeout_option(120.0, "Seconds to wait for a tiering worker.")
@yes_option
@metadata_options
@json_option
def resolve_fork(
    topic: str,
    partition: int,
    keep: str | None,
    discard_hot: bool,
    timeout_s: float,
    yes: bool,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Choose which history of a forked partition to keep, after metadata was restored from a copy older than the store.

    The partition continues at the end of the kept history. Objects of the other one are deleted after the grace period.
    """
    if discard_hot and keep != KEEP_STORE:
        raise click.UsageError("--discard-hot needs --keep store")
    addresses, url = metadata_of(data, metadata), store_of(data, store)
    forked = asyncio.run(_fork(addresses, url, topic, partition))
    if keep is not None:
        click.echo(fork_text(forked), err=True)
        confirm(f"{given_up_text(forked, keep, discard_hot=discard_hot)} Keep the history of {keep}?", yes=yes)
        asyncio.run(_resolve_fork(addresses, forked, keep, discard_hot, timeout_s))
        text = f"{topic}-{partition} keeps the history of {keep}; objects of the other one are deleted after the grace period"
        click.echo(text, err=True)
    if as_json:
        print_json({**fork_row(forked), "kept": keep})
    elif keep is None:
        click.echo(fork_text(forked))


async def _fork(addresses: list[str], url: str, name: str, partition: int) -> ForkedPartition:
    async with metadata_session(addresses) as client, store_session(url) as store:
        return only_fork(await forked_partitions(client.view, store, topics_named(client.view, [name])), name, partition)


async def _resolve_fork(addresses: list[str], forked: ForkedPartition, keep: str, discard_hot: bool, timeout_s: float) -> None:
    """Return after exactly this fork is resolved."""
    async with metadata_session(addresses) as client:
        decision = await decide_fork(client, forked, keep, discard_hot=discard_hot)
        await wait_for_resolution(client, decision, timeout_s)


@tier.command()
@click.argument("topics", nargs=-1)
@metadata_options
@json_option
@click.pass_context
def verify(
    context: click.Context,
    topics: tuple[str, ...],
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Read all history back and verify every checksum. Exits with 6 if data is corrupt; names segment, block and offsets.

    With --store alone it reads only the object store, and the cluster need not run.
    """
    reports = asyncio.run(_verify(addresses_or_store(data, metadata, store), store_of(data, store), topics))
    findings = [finding_row(report, finding) for report in reports for finding in report.findings]
    rows = [verified_row(report) for report in reports]
    if as_json:
        print_json({"partitions": rows, "findings": findings})
    else:
        print_rows(rows, _VERIFIED_COLUMNS)
        for finding in findings:
            click.echo(damage_text(finding))
    if findings:
        click.echo("`stratalog tier scrub` names the remedy of each finding, and repairs what it can with --repair", err=True)
        context.exit(ExitCode.DAMAGED)


async def _verify(addresses: list[str], url: str, topics: tuple[str, ...]) -> list[PartitionReport]:
    background = ThreadBackground(_CHECKSUM_THREADS, "checksums")
    try:
        async with store_session(url) as store:
            partitions = await cold_partitions(store, addresses, topics)
            verifier = Verifier(store, background)
            with progress_bar() as progress:
                task = progress.add_task("verifying partitions", total=len(partitions))
                reports = []
                for partition in partitions:
                    reports.append(await verifier.partition(partition.topic, partition.pointer))
                    progress.advance(task)
        return reports
    finally:
        background.close()


@tier.command()
@click.option("--topic", "topics", multiple=True, metavar="NAME", help="Only this topic, by name or id; repeatable.")
@click.option("--partition", type=Integer(min=0), help="Only this partition of the one --topic.")
@click.option(
    "--rate", "bytes_per_s", type=Integer(min=1), metavar="BYTES_PER_S", help="Maximum rate of reads (default: none)."
)
@click.option(
    "--min-age",
    "min_age_s",
    type=Integer(min=0),
    default=MIN_AGE_S,
    show_default=True,
    help="Report unreferenced objects of at least this age in seconds; younger ones may be part of a commit or deletion.",
)
@click.option("--repair", is_flag=True, help="Repair the findings from --copy, from hot copies, and from metadata.")
@_copy_option("With --repair: the store that holds a second copy of the bucket")
@metadata_options
@json_option
@click.pass_context
def scrub(
    context: click.Context,
    topics: tuple[str, ...],
    partition: int | None,
    bytes_per_s: int | None,
    min_age_s: int,
    repair: bool,
    copy: str | None,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Check a bucket without its cluster: every object of every partition, missing objects and unreferenced objects.

    Exits with 7 if findings are left unrepaired, and names the remedy of each. Changes nothing unless --repair is given, and
    never deletes anything. A repair restores the committed bytes from the second copy; with the metadata nodes of a running
    cluster (--data or --metadata) it also rewrites segments whose hot copies still exist.
    """
    if partition is not None and len(topics) != 1:
        raise Invalid("--partition needs exactly one --topic")
    if copy is not None and not repair:
        raise Invalid("--copy needs --repair")
    if repair:
        copy = existing_store(copy) if copy else second_store_of(data, store)
    repair_from = RepairFrom(copy=copy, addresses=addresses_or_store(data, metadata, store)) if repair else None
    if repair_from is not None and copy is None and not repair_from.addresses:
        raise Invalid("--repair needs a source: the second copy with --copy, or the cluster with --data or --metadata")
    part = Part(topics=topics, partition=partition, expects_topics=store is not None)
    result = asyncio.run(
        scrub_bucket(store_of(data, store), part, bytes_per_s=bytes_per_s, min_age_s=min_age_s, repair_from=repair_from)
    )
    if as_json:
        print_json(result.document)
    else:
        print_rows(result.partitions, _VERIFIED_COLUMNS)
        for finding in result.findings:
            click.echo(finding_text(finding))
    if result.left:
        context.exit(ExitCode.FINDINGS)
