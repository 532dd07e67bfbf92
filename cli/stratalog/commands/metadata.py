"""``stratalog metadata``: run one node of the quorum, or ``metadata status``, ``add`` and ``remove``, which ask the nodes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog.commands.role import run_role
from stratalog.hot.quorum import administration_session, member_rows, split_node
from stratalog.output import json_option, print_done, print_json, print_rows
from stratalog.target import metadata_of, quorum_options
from stratalog_metadata.protocol.messages import StatusAnswer

_COLUMNS = ("node", "role", "address", "match_index", "lag", "contact_ms", "identity")
_timeout_option = click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds to wait.")


@click.group(invoke_without_command=True)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file of the node to run.")
@click.pass_context
def metadata(context: click.Context, config: Path | None) -> None:
    """Run one metadata node until SIGTERM, configured by a TOML file and the environment; or see and change the quorum."""
    if context.invoked_subcommand is None:
        run_role("metadata", config)


@metadata.command()
@quorum_options
@json_option
def status(data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Tell leader, term and commit, and of each member how far it is and when it last answered the leader."""
    answer = asyncio.run(_status(metadata_of(data, metadata)))
    rows = member_rows(answer)
    summary = {
        "cluster_id": answer.cluster_id,
        "leader": answer.leader or None,
        "term": answer.term,
        "commit_index": answer.commit_index,
        "members_index": answer.members_index,
        "refused_messages": answer.refused_messages,
    }
    if as_json:
        print_json({**summary, "members": rows})
        return
    click.echo("  ".join(f"{name.replace('_', ' ')} {'none' if value is None else value}" for name, value in summary.items()))
    print_rows(rows, _COLUMNS)


async def _status(addresses: list[str]) -> StatusAnswer:
    async with administration_session(addresses) as administration:
        return await administration.status()


@metadata.command()
@click.argument("node", metavar="ID=HOST:PORT")
@click.option("--no-wait", is_flag=True, help="Return when it learns; it votes once it has caught up.")
@_timeout_option
@quorum_options
@json_option
def add(node: str, no_wait: bool, timeout_s: float, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Add the node that was started on an empty data_dir and waits at HOST:PORT; return when it votes.

    Its `peers` name nodes of the quorum and itself. One change at a time: the next one waits for this one.
    For a member that was started with its own data_dir at another address, take down the address.
    """
    node_id, address = split_node(node)
    asyncio.run(_add(metadata_of(data, metadata), node_id, address, timeout_s, wait=not no_wait))
    state = "learns" if no_wait else "votes"
    print_done({"node": node_id, "address": address, "state": state}, f"node {node_id} {state}", as_json=as_json)


async def _add(addresses: list[str], node_id: int, address: str, timeout_s: float, *, wait: bool) -> None:
    async with administration_session(addresses) as administration:
        await administration.add(node_id, address, timeout_s, wait=wait)


@metadata.command()
@click.argument("node_id", type=click.IntRange(min=1), metavar="ID")
@_timeout_option
@quorum_options
@json_option
def remove(node_id: int, timeout_s: float, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Remove node ID, dead or alive, the leader too; it comes back only on an empty data_dir.

    Refused if too few of those that remain answer.
    """
    asyncio.run(_remove(metadata_of(data, metadata), node_id, timeout_s))
    print_done({"node": node_id, "state": "removed"}, f"node {node_id} is removed", as_json=as_json)


async def _remove(addresses: list[str], node_id: int, timeout_s: float) -> None:
    async with administration_session(addresses) as administration:
        await administration.remove(node_id, timeout_s)
