"""``stratalog ledger …``: hot data. ``list`` and ``show`` ask the metadata nodes; ``read`` also asks bookies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click

from stratalog.command_group import CommandGroup
from stratalog.hot.entries import entry_rows, follow_rows
from stratalog.hot.report import Row, ledger_document, ledger_named, ledger_rows
from stratalog.hot.session import ledger_session
from stratalog.moments import format_moment
from stratalog.output import json_option, print_json, print_listing, print_rows
from stratalog.parameters import Integer
from stratalog.target import metadata_of, quorum_options
from stratalog.tier.session import metadata_session

_LEDGER_COLUMNS = (
    "ledger", "topic", "partition", "state", "base_offset", "end_offset", "entries", "bytes", "lacking", "bookies"
)  # fmt: skip
_ENTRY_COLUMNS = (
    "entry", "kind", "bytes", "base_offset", "last_offset", "records", "max_timestamp", "producer_id", "base_sequence"
)  # fmt: skip


@click.group(cls=CommandGroup)
def ledger() -> None:
    """List ledgers, the hot end of the log, and read their entries."""


@ledger.command("list")
@click.argument("topic", required=False)
@quorum_options
@json_option
def list_ledgers(topic: str | None, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """List the ledgers of TOPIC, or of all topics.

    "missing copies" counts those on failed disks and on bookies that are down.
    """
    rows = asyncio.run(_list(metadata_of(data, metadata), topic))
    print_listing("ledgers", rows, _LEDGER_COLUMNS, as_json=as_json)


async def _list(addresses: list[str], topic: str | None) -> list[Row]:
    async with metadata_session(addresses) as client:
        return ledger_rows(client.view, topic)


@ledger.command()
@click.argument("ledger_id", type=Integer(min=0))
@quorum_options
@json_option
def show(ledger_id: int, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Show one ledger: quorums, state, and which bookies hold each of its fragments."""
    document = asyncio.run(_show(metadata_of(data, metadata), ledger_id))
    if as_json:
        print_json(document)
        return
    print_rows([document], _LEDGER_COLUMNS)
    closed_at = document["closed_at_ms"]
    click.echo(
        f"leader epoch {document['leader_epoch']}, write quorum {document['write_quorum']}, ack quorum"
        f" {document['ack_quorum']}" + (f", closed {format_moment(closed_at)}" if closed_at else "")
    )
    print_rows(document["fragments"], ("first_entry", "bookies", "down"))


async def _show(addresses: list[str], ledger_id: int) -> Row:
    async with metadata_session(addresses) as client:
        return ledger_document(client.view, ledger_id)


@ledger.command()
@click.argument("ledger_id", type=Integer(min=0))
@click.option("--first", default=0, show_default=True, type=Integer(min=0), help="First entry.")
@click.option("--last", type=Integer(min=0), help="Last entry (default: the last confirmed one).")
@click.option("--follow", is_flag=True, help="Print entries as they are confirmed, as JSON lines, until the ledger is closed.")
@quorum_options
@json_option
def read(
    ledger_id: int, first: int, last: int | None, follow: bool, data: Path | None, metadata: str | None, as_json: bool
) -> None:
    """Read entries from the bookies, verify their checksums and show their headers. Shows confirmed entries only."""
    if follow:
        if last is not None:
            raise click.UsageError("--follow cannot be combined with --last: leave one out")
        asyncio.run(_follow(metadata_of(data, metadata), ledger_id, first))
        return
    rows = asyncio.run(_read(metadata_of(data, metadata), ledger_id, first, last))
    if not as_json:
        for row in rows:
            row["max_timestamp"] = format_moment(row["max_timestamp_ms"]) if "max_timestamp_ms" in row else None
    print_listing("entries", rows, _ENTRY_COLUMNS, as_json=as_json)


async def _follow(addresses: list[str], ledger_id: int, first: int) -> None:
    async with ledger_session(addresses) as (metadata, ledgers):
        async for row in follow_rows(metadata.view, ledgers, ledger_id, first):
            click.echo(json.dumps(row))


async def _read(addresses: list[str], ledger_id: int, first: int, last: int | None) -> list[Row]:
    async with ledger_session(addresses) as (metadata, ledgers):
        return [row async for row in entry_rows(ledgers, ledger_named(metadata.view, ledger_id), first, last)]
