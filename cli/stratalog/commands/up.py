"""``stratalog up``: all roles in one process, for a first try or a single machine."""

from __future__ import annotations

import os
from pathlib import Path

import click
import psutil

from stratalog.commands.role import serve
from stratalog.local.state import EMBEDDED_ROLE, ClusterState, ProcessState, refuse_cluster, save_state
from stratalog.roles import embedded
from stratalog.roles.runtime import Configuration, Node
from stratalog.target import DEFAULT_BOOTSTRAP
from stratalog_core.rpc.addresses import split_address


@click.command()
@click.option(
    "--data",
    default="data",
    show_default=True,
    envvar="STRATALOG_DATA",
    type=click.Path(file_okay=False, path_type=Path),
    help="Data directory.",
)
@click.option(
    "--kafka",
    metavar="HOST:PORT",
    default=DEFAULT_BOOTSTRAP,
    show_default=True,
    help="Address for Kafka clients; port 0 takes any free port.",
)
@click.option(
    "--store", metavar="URL", help="Object store for history: a directory, s3://, az:// or gs:// URL (default: DIR/store)."
)
@click.option(
    "--second-store",
    metavar="URL",
    help="Store of a second copy of the history, which the tiering worker keeps (default: none).",
)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file with further settings.")
def up(data: Path, kafka: str, store: str | None, second_store: str | None, config: Path | None) -> None:
    """Run everything in one process until Ctrl-C. The data is kept and served again at the next start."""
    data = data.absolute()
    refuse_cluster(data, f"use `stratalog cluster start --data {data}`, or another --data")
    split_address(kafka)  # Raises now: the broker is the last to start.
    overrides = embedded.embedded_overrides(data, kafka=kafka, store=store, second_store=second_store)

    async def start(node: Node) -> str:
        # Locks the whole directory: the store and the file that `_remember` writes are this process's, too.
        await node.files(data)
        address = await embedded.start(node)
        _remember(data, node, address)
        click.echo(f"Stratalog serves Kafka clients at {address}; data in {data}; Ctrl-C stops it.")
        return address

    serve(Configuration(file=config, overrides=overrides), "stratalog", start)


def _remember(data: Path, node: Node, address: str) -> None:
    """Write ``cluster.json``, by which the other commands find this process with ``--data``."""
    started_at = psutil.Process().create_time()
    process = ProcessState(
        name="up", role=EMBEDDED_ROLE, address=address, pid=os.getpid(), started_at=started_at, http=node.http_address
    )
    metadata = ",".join(node.settings.metadata)
    state = ClusterState(
        bootstrap=address, metadata=metadata, store=node.settings.store, second_store=node.settings.second_store,
        processes=(process,),
    )  # fmt: skip
    save_state(data, state)
