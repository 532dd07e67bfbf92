"""``stratalog metadata``: runs a node of the quorum, or shows and changes the quorum through its nodes."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

import click

from stratalog.command_group import CommandGroup
from stratalog.commands.role import run_role
from stratalog.deletion import confirm, yes_option
from stratalog.hot.quorum import administration_session, member_rows, split_node
from stratalog.output import json_option, print_done, print_json, print_rows
from stratalog.parameters import Integer
from stratalog.target import metadata_of, quorum_options
from stratalog.waiting import timeout_option, wait_option
from stratalog_core.errors import NotFound
from stratalog_core.system import SystemFiles
from stratalog_metadata.protocol.messages import StatusAnswer
from stratalog_metadata.storage.identity import IDENTITY_FILE, Identity
from stratalog_metadata.storage.restored_copy import become_only_member
from stratalog_metadata.storage.state_store import SQLITE_FILE, SqliteStore

_COLUMNS = ("node", "role", "address", "match_index", "lag", "contact_ms", "identity")
_timeout_option = timeout_option(60.0)


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file of the node to run.")
@click.pass_context
def metadata(context: click.Context, config: Path | None) -> None:
    """Run a metadata node until SIGTERM, configured by a TOML file and the environment. Commands below manage the quorum."""
    if context.invoked_subcommand is None:
        run_role("metadata", config)


@metadata.command()
@quorum_options
@json_option
def status(data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Show leader, term and commit index, and each member's progress and the age of its last answer to the leader."""
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
@wait_option("it is a voter", default=True)
@_timeout_option
@quorum_options
@json_option
def add(node: str, wait: bool, timeout_s: float, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Add the node that runs at HOST:PORT and was started with an empty data_dir.

    It is a learner until it has caught up, then a voter. Its setting `peers` must name the quorum's nodes and itself. The
    quorum makes one change at a time; the next one waits.
    For a member that was restarted with its data_dir at another address, this records the new address.
    """
    node_id, address = split_node(node)
    asyncio.run(_add(metadata_of(data, metadata), node_id, address, timeout_s, wait=wait))
    state, role = ("votes", "voter") if wait else ("learns", "learner")
    print_done({"node": node_id, "address": address, "state": state}, f"node {node_id} is a {role}", as_json=as_json)


async def _add(addresses: list[str], node_id: int, address: str, timeout_s: float, *, wait: bool) -> None:
    async with administration_session(addresses) as administration:
        await administration.add(node_id, address, timeout_s, wait=wait)


@metadata.command()
@click.argument("node_id", type=Integer(min=1), metavar="ID")
@_timeout_option
@yes_option
@quorum_options
@json_option
def remove(node_id: int, timeout_s: float, yes: bool, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Remove node ID, which may be down or the leader. It can join again only with an empty data_dir.

    Refused if too few of the remaining nodes answer.
    """
    addresses = metadata_of(data, metadata)
    confirm(f"Remove node {node_id} from the metadata quorum? It can join again only with an empty data_dir.", yes=yes)
    asyncio.run(_remove(addresses, node_id, timeout_s))
    print_done({"node": node_id, "state": "removed"}, f"node {node_id} removed", as_json=as_json)


async def _remove(addresses: list[str], node_id: int, timeout_s: float) -> None:
    async with administration_session(addresses) as administration:
        await administration.remove(node_id, timeout_s)


@metadata.command()
@click.argument("directory", metavar="DATA_DIR", type=click.Path(file_okay=False, path_type=Path))
@yes_option
@json_option
def restore(directory: Path, yes: bool, as_json: bool) -> None:
    """Make the stopped node of DATA_DIR, a copy of its data_dir, the only member of its quorum.

    Only for a quorum that has lost a majority of its disks. It does not know what was committed after the copy was made.
    No other node of the old quorum may run: empty their directories, and add them once this node runs.
    """
    if not (directory / IDENTITY_FILE).exists():
        raise NotFound(f"{directory} is no data_dir of a metadata node: it has no {IDENTITY_FILE}")
    confirm(f"Make the node of {directory} the only member of its quorum? The other nodes' directories are void then.", yes=yes)
    restored = _restored(directory)
    sentence = f"node {restored.node_id} is the only member: start it, then add nodes that run on empty directories"
    print_done({"node": restored.node_id, "state": "restored"}, sentence, as_json=as_json)


def _restored(directory: Path) -> Identity:
    files = SystemFiles(directory)
    unlock = files.lock()
    try:
        return become_only_member(files, partial(SqliteStore, directory / SQLITE_FILE), random.SystemRandom())
    finally:
        unlock()
