"""``stratalog bookie``: runs a bookie, or lists, decommissions and scrubs bookies found through the metadata nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog.command_group import CommandGroup
from stratalog.commands.role import run_role
from stratalog.exit_codes import ExitCode
from stratalog.hot.asking import ask_live, with_remarks
from stratalog.hot.decommission import describe_left, ledgers_of, set_draining, wait_until_empty
from stratalog.hot.report import Row, bookie_rows
from stratalog.hot.scrub import BookieScrub, bookies_to_scrub, follow
from stratalog.output import json_option, print_done, print_listing, progress_bar
from stratalog.target import metadata_of, quorum_options
from stratalog.tier.session import metadata_session
from stratalog.waiting import timeout_option, wait_option
from stratalog_core.rpc.tcp import TcpTransport
from stratalog_metadata.records import Ledger

_SCRUB_COLUMNS = (
    "bookie", "disk", "state", "checked_bytes", "total_bytes", "entries", "damaged", "healed", "unhealable", "broken_files"
)  # fmt: skip
_COLUMNS = ("bookie", "state", "host", "rack", "address", "fragments", "remark")


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file of the bookie to run.")
@click.pass_context
def bookie(context: click.Context, config: Path | None) -> None:
    """Run a bookie until SIGTERM, configured by a TOML file and the environment. The commands below manage bookies."""
    if context.invoked_subcommand is None:
        run_role("bookie", config)


@bookie.command("list")
@quorum_options
@json_option
def list_bookies(data: Path | None, metadata: str | None, as_json: bool) -> None:
    """List bookies: state, host, rack, number of ledger fragments that name each, and the problem that each reports."""
    rows = asyncio.run(_rows(metadata_of(data, metadata)))
    print_listing("bookies", rows, _COLUMNS, as_json=as_json)


async def _rows(addresses: list[str]) -> list[Row]:
    async with metadata_session(addresses) as client:
        return with_remarks(bookie_rows(client.view), await ask_live(client.view))


@bookie.command()
@click.argument("name")
@wait_option("no ledger has a copy on it and its disks can be removed", default=False)
@timeout_option(3600.0)
@click.option("--cancel", is_flag=True, help="Return the bookie to service.")
@quorum_options
@json_option
def decommission(
    name: str, wait: bool, timeout_s: float, cancel: bool, data: Path | None, metadata: str | None, as_json: bool
) -> None:
    """Move all ledgers of bookie NAME to other bookies. It gets no new ledgers.

    Refused if too few other bookies remain for the replication factors in use. Closed ledgers move at once, open ones after
    they are closed. Keep the bookie running until then: entries that only it has are read from it. The wait lasts two minutes
    at least: a ledger that is being written or recovered may still get the bookie.
    """
    addresses = metadata_of(data, metadata)
    if cancel:
        asyncio.run(_cancel(addresses, name))
        print_done({"bookie": name, "draining": False}, f"{name} accepts ledgers again", as_json=as_json)
        return
    left = asyncio.run(_decommission(addresses, name, timeout_s if wait else None))
    sentence = (
        f"{name} is draining: it is still in {describe_left(left)}"
        if left
        else f"{name} is decommissioned: no ledger has a copy on it, so it can be stopped and its disks removed"
    )
    print_done({"bookie": name, "draining": True, "ledgers": len(left)}, sentence, as_json=as_json)


async def _cancel(addresses: list[str], name: str) -> None:
    async with metadata_session(addresses) as client:
        await set_draining(client, name, draining=False)


async def _decommission(addresses: list[str], name: str, timeout_s: float | None) -> list[Ledger]:
    """Return the ledgers that still name the bookie."""
    async with metadata_session(addresses) as client:
        await set_draining(client, name, draining=True)
        left = ledgers_of(client.view.all(Ledger), name)
        if timeout_s is None:
            return left
        with progress_bar() as progress:
            task = progress.add_task(f"draining {name}", total=len(left))
            await wait_until_empty(
                client, name, timeout_s, lambda count: progress.update(task, completed=max(0, len(left) - count))
            )  # fmt: skip
    return []


@bookie.command()
@click.argument("name", required=False)
@click.option("--all", "every", is_flag=True, help="Scrub every live bookie.")
@wait_option("everything is checked and repaired", default=False)
@quorum_options
@json_option
@click.pass_context
def scrub(
    context: click.Context, name: str | None, every: bool, wait: bool, data: Path | None, metadata: str | None, as_json: bool
) -> None:
    """Check every entry, index and state file of bookie NAME now. Corrupt ones are repaired from other replicas.

    With --wait it exits with 6 if corruption remains, and with 1 if something was not checked, such as a bookie that is down.
    """
    if bool(name) == every:
        raise click.UsageError("give the name of one bookie, or --all")
    scrubs, down = asyncio.run(_scrub(metadata_of(data, metadata), name, wait))
    rows = [row for each in scrubs for row in each.rows()]
    print_listing("disks", rows, _SCRUB_COLUMNS, as_json=as_json)
    for example in (example for row in rows for example in row["examples"]):
        click.echo(example, err=True)
    unchecked = [sentence for each in scrubs for sentence in each.unchecked()] if wait else []
    unchecked += [f"{each} was not checked: it is down, and ledgers have copies on it" for each in down] if wait else []
    for sentence in unchecked:
        click.echo(sentence, err=True)
    if wait and not all(each.is_whole for each in scrubs):
        context.exit(ExitCode.DAMAGED)
    if unchecked:
        context.exit(ExitCode.FAILED)


async def _scrub(addresses: list[str], name: str | None, wait: bool) -> tuple[list[BookieScrub], list[str]]:
    """Return the scrubs, and with a ``name`` of None the bookies that are down and have copies."""
    transport = TcpTransport()
    try:
        async with metadata_session(addresses) as client:
            scrubs = [BookieScrub(transport, each) for each in bookies_to_scrub(client.view, name)]
            down = [str(row["bookie"]) for row in bookie_rows(client.view) if not row["live"] and row["fragments"]]
        await asyncio.gather(*(each.ask(start=True) for each in scrubs))
        if wait:
            with progress_bar() as progress:
                task = progress.add_task("scrubbing", total=None)
                await follow(scrubs, lambda done, total: progress.update(task, completed=done, total=total))
        return scrubs, [] if name is not None else down
    finally:
        await transport.close()
