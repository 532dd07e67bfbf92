"""``stratalog tier restore-coordinators``: the way out when restored metadata knows only ledgers that are deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog.deletion import confirm, yes_option
from stratalog.exit_codes import ExitCode
from stratalog.hot.session import ledger_session
from stratalog.output import json_option, print_json
from stratalog.target import metadata_of, metadata_options, store_of
from stratalog.tier.lost_coordinators import CoordinatorsReport, find_lost, lost_text, restore_lost
from stratalog.tier.session import store_session
from stratalog_core.system import SystemClock


@click.command("restore-coordinators")
@click.option("--dry-run", is_flag=True, help="Show what would be restored; change nothing.")
@click.option(
    "--empty",
    "may_begin_empty",
    is_flag=True,
    help="Let partitions without a state in the bucket begin empty: their committed offsets or transactional ids are lost.",
)
@click.option(
    "--lost-bookie",
    "lost_bookies",
    multiple=True,
    metavar="ID",
    help="Take the disks of this bookie for lost: it need not answer; repeatable.",
)
@yes_option
@metadata_options
@json_option
@click.pass_context
def restore_coordinators(
    context: click.Context,
    dry_run: bool,
    may_begin_empty: bool,
    lost_bookies: tuple[str, ...],
    yes: bool,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Restore groups and transactional ids whose ledgers are gone, after metadata was restored from a copy.

    It changes only partitions of internal topics of which every bookie says that it has nothing: no broker can take them over.
    They begin with the newest state that brokers stored in the bucket. Commits after that are lost, so groups may read records
    again; the report names the groups and the time of each state. A committed offset past the end of its partition is set to
    that end. Resolve forks first, and run it before producers start: then the ends are known.

    Exits with 7 if a partition is left: a bookie does not answer, or the bucket has no state of it.
    """
    addresses, url = metadata_of(data, metadata), store_of(data, store)
    report = asyncio.run(_restore(addresses, url, lost_bookies, may_begin_empty=may_begin_empty, dry_run=dry_run, yes=yes))
    if as_json:
        print_json(report.document())
    else:
        report.show()
    if not report.is_complete:
        context.exit(ExitCode.FINDINGS)


async def _restore(
    addresses: list[str], url: str, lost_bookies: tuple[str, ...], *, may_begin_empty: bool, dry_run: bool, yes: bool
) -> CoordinatorsReport:
    async with ledger_session(addresses) as (client, ledgers), store_session(url) as store:
        found = await find_lost(client.view, ledgers, lost_bookies)
        if found.lost and not dry_run:
            what = " Those without a state in the bucket begin empty." if may_begin_empty else ""
            confirm(f"{lost_text(found.lost)}. Restore them from the bucket?{what}", yes=yes)
        now_ms = SystemClock().wall_ms()
        return await restore_lost(client, store, found, now_ms, may_begin_empty=may_begin_empty, dry_run=dry_run)
