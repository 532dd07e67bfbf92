"""``stratalog tier gc``: deletes unreferenced objects of the bucket once."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from uuid import UUID

import click

from stratalog.deletion import confirm, yes_option
from stratalog.exit_codes import ExitCode
from stratalog.output import json_option, print_json, print_rows
from stratalog.parameters import Integer
from stratalog.target import metadata_of, metadata_options, store_of
from stratalog.tier.collection import collect, confirm_deletions, due_rows, refused_rows, waiting_rows
from stratalog_tiering.config import TieringSettings

_GRACE_MS = next(field.default for field in dataclasses.fields(TieringSettings) if field.name == "grace_ms")
_GRACE_MIN_MS = 3_600_000
"""Longer than a read of the history takes as it was."""
_DUE_COLUMNS = ("topic", "partition", "reason", "bytes", "key")
_WAITING_COLUMNS = ("topic", "partition", "reason", "objects", "bytes", "first_due_at", "last_due_at", "lease")


@click.command()
@click.argument("topics", nargs=-1)
@click.option("--dry-run", is_flag=True, help="List what would be deleted; delete nothing.")
@click.option(
    "--grace-ms",
    type=Integer(min=_GRACE_MIN_MS),
    default=_GRACE_MS,
    show_default=True,
    help="Milliseconds for which an object is kept after it left the history; at least the workers' [tiering] grace_ms."
    " Orphans are kept for a day at least: they may be part of an upload.",
)
@click.option(
    "--deleted",
    "deleted_ids",
    type=click.UUID,
    multiple=True,
    metavar="ID",
    help="Confirm first that this topic is deleted, although its history continued after an earlier owner of the bucket deleted"
    " it; repeatable.",
)
@yes_option
@metadata_options
@json_option
@click.pass_context
def gc(
    context: click.Context,
    topics: tuple[str, ...],
    dry_run: bool,
    grace_ms: int,
    deleted_ids: tuple[UUID, ...],
    yes: bool,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Delete objects that no history references any more, once. With --dry-run, list what would be deleted and why.

    Also lists objects that are kept until the end of a grace period or of a reader's lease, and until when. Tiering workers do
    the same at intervals. Exits with 1 if it cannot decide for a partition, for example because its history has forked; none of
    its objects are deleted. Times are compared with this machine's clock.

    Topics that an earlier owner of the bucket deleted are collected, too, one grace period after that owner could no longer
    restore them. If the history of such a topic continued after the deletion, it is kept until --deleted names it; its grace
    period starts then.
    """
    if deleted_ids and dry_run:
        raise click.UsageError("--deleted cannot be used with --dry-run")
    if deleted_ids:
        named = ", ".join(map(str, deleted_ids))
        confirm(f"Delete topic {named} with all of its records, when its grace period is over?", yes=yes)
        asyncio.run(confirm_deletions(metadata_of(data, metadata), store_of(data, store), deleted_ids))
    if not dry_run:
        confirm("Delete all objects that `stratalog tier gc --dry-run` lists as due?", yes=yes)
    found = asyncio.run(collect(metadata_of(data, metadata), store_of(data, store), topics, grace_ms, dry_run=dry_run))
    due, waiting, refused = due_rows(found), waiting_rows(found), refused_rows(found)
    if as_json:
        print_json({"due" if dry_run else "deleted": due, "waiting": waiting, "refused": refused})
    else:
        print_rows(due, _DUE_COLUMNS, title="would be deleted now" if dry_run else "deleted")
        print_rows(waiting, _WAITING_COLUMNS, title="waiting")
        for row in refused:
            place = f"deleted topic {row['topic']}" if row["partition"] is None else f"{row['topic']}-{row['partition']}"
            click.echo(f"{place}: {row['error']}", err=True)
    if refused:
        context.exit(ExitCode.FAILED)
