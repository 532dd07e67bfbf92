"""``stratalog serve-archive``: a read-only Kafka endpoint over a bucket, without bookies, quorum and tiering worker."""

from __future__ import annotations

from pathlib import Path

import click

from stratalog.commands.role import serve
from stratalog.parameters import Number
from stratalog.roles import archive
from stratalog.roles.runtime import Configuration, Node
from stratalog.target import DEFAULT_BOOTSTRAP, existing_store


@click.command(name="serve-archive")
@click.option(
    "--store",
    metavar="URL",
    required=True,
    envvar="STRATALOG_STORE",
    help="The history: a directory, s3://, az:// or gs:// URL.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_BOOTSTRAP,
    show_default=True,
    help="Address for Kafka clients; port 0 takes any free port.",
)
@click.option(
    "--positions",
    default="archive-positions",
    show_default=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that stores the committed offsets of consumer groups.",
)
@click.option(
    "--follow",
    "follow_s",
    default=0.0,
    show_default=True,
    type=Number(min=0),
    metavar="SECONDS",
    help="Look for new history at this interval; 0: serve only what exists at the start.",
)
@click.option(
    "--lease/--no-lease",
    default=True,
    show_default=True,
    help="Hold a lease, a small object in STORE, so that what is served is not deleted.",
)
@click.option("--deleted", "with_deleted", is_flag=True, help="Also serve deleted topics, as NAME-ID.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file with further settings.")
def serve_archive(
    store: str, listen: str, positions: Path, follow_s: float, lease: bool, with_deleted: bool, config: Path | None
) -> None:  # fmt: skip
    """Serve the committed history in STORE to Kafka consumers until Ctrl-C. Writes nothing to STORE but its lease.

    Needs no cluster. With read-only credentials it serves without a lease. Requests that change topics or records are refused.
    """
    overrides = archive.archive_overrides(store=existing_store(store), listen=listen)
    file = positions.absolute()

    async def start(node: Node) -> str:
        address = await archive.start(node, positions=file, follow_s=follow_s, with_deleted=with_deleted, leased=lease)
        click.echo(f"Kafka consumers find the archive at {address}; positions in {file}; Ctrl-C stops it.")
        return address

    serve(Configuration(file=config, overrides=overrides), "archive", start)
