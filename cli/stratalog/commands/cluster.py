"""``stratalog cluster …``: a local cluster of real processes below one directory."""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from pathlib import Path

import click

from stratalog.local.launcher import LocalCluster
from stratalog.local.plan import Sizes, plan_cluster
from stratalog.local.quorum import add_metadata, remove_metadata
from stratalog.output import json_option, print_json, print_rows
from stratalog_core.errors import Invalid, StratalogError
from stratalog_tiering.store import check_store_url

_data_option = click.option(
    "--data", required=True, envvar="STRATALOG_DATA", type=click.Path(file_okay=False, path_type=Path), help="Its directory."
)
_timeout_option = click.option("--timeout", "timeout_s", default=60.0, show_default=True, help="Seconds until it must serve.")
_names = click.argument("names", nargs=-1)


@click.group()
def cluster() -> None:
    """Start and stop a local cluster of processes.

    DIR/cluster.json tells bootstrap address and processes; DIR/logs/NAME.log is what each wrote;
    DIR/config/NAME.toml configures it.
    """


@cluster.command()
@_data_option
@click.option("--metadata", default=3, show_default=True, type=click.IntRange(1, 7), help="Metadata nodes (odd).")
@click.option("--bookies", default=3, show_default=True, type=click.IntRange(1, 64), help="Bookies.")
@click.option("--brokers", default=2, show_default=True, type=click.IntRange(1, 64), help="Brokers.")
@click.option("--tiering", default=1, show_default=True, type=click.IntRange(0, 16), help="Tiering workers.")
@click.option("--store", help="Object store: a directory or s3://bucket/prefix?endpoint=URL (default: DIR/store).")
@click.option("--minio", is_flag=True, help="Start a MinIO server, too, and use it as the store.")
@_timeout_option
@json_option
def start(
    data: Path,
    metadata: int,
    bookies: int,
    brokers: int,
    tiering: int,
    store: str | None,
    minio: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Start a new cluster, or bring the one that DIR holds back (sizes and store are then as they were).

    Returns when every broker answers. If it cannot start, it leaves no process behind.
    """
    if store and minio:
        raise Invalid("--store and --minio exclude each other: choose one")
    if store:
        check_store_url(store)
    local = LocalCluster(data, _say)
    if not local.exists():
        sizes = Sizes(metadata=metadata, bookies=bookies, brokers=brokers, tiering=tiering)
        local.lay_out(plan_cluster(data.absolute(), sizes, cluster_id=_cluster_id(), store=store, minio=minio))
    try:
        local.start((), timeout_s=timeout_s)
    except (StratalogError, KeyboardInterrupt):
        local.stop(())
        raise
    _report(local, as_json=as_json)


@cluster.command()
@_names
@_data_option
@json_option
def stop(names: tuple[str, ...], data: Path, as_json: bool) -> None:
    """Stop processes in order (all, or those named), SIGTERM first."""
    local = LocalCluster(data, _say)
    local.stop(names)
    _report(local, as_json=as_json)


@cluster.command()
@click.argument("names", nargs=-1, required=True)
@_data_option
@json_option
def kill(names: tuple[str, ...], data: Path, as_json: bool) -> None:
    """End processes with SIGKILL, as a crash would."""
    local = LocalCluster(data, _say)
    local.kill(names)
    _report(local, as_json=as_json)


@cluster.command()
@_names
@_data_option
@_timeout_option
@json_option
def restart(names: tuple[str, ...], data: Path, timeout_s: float, as_json: bool) -> None:
    """Bring processes back on their data and addresses (all, or those named), stopping first what runs."""
    local = LocalCluster(data, _say)
    local.restart(names, timeout_s=timeout_s)
    _report(local, as_json=as_json)


@cluster.command()
@click.argument("role", type=click.Choice(["metadata"]))
@_data_option
@_timeout_option
@json_option
def add(role: str, data: Path, timeout_s: float, as_json: bool) -> None:
    """Start one more metadata node and let it join the quorum, while the cluster serves."""
    local = LocalCluster(data, _say)
    _say(f"{add_metadata(local, timeout_s=timeout_s)} votes")
    _report(local, as_json=as_json)


@cluster.command()
@click.argument("name")
@_data_option
@_timeout_option
@json_option
def remove(name: str, data: Path, timeout_s: float, as_json: bool) -> None:
    """Remove metadata node NAME from the quorum and stop it; its directory stays."""
    local = LocalCluster(data, _say)
    remove_metadata(local, name, timeout_s=timeout_s)
    _say(f"{name} is removed")
    _report(local, as_json=as_json)


@cluster.command()
@_data_option
@json_option
def status(data: Path, as_json: bool) -> None:
    """Tell what runs."""
    local = LocalCluster(data, _say)
    if as_json:
        _report(local, as_json=True)
        return
    click.echo(f"bootstrap {local.state.bootstrap}\nstore     {local.state.store}")
    print_rows(local.rows(), ("name", "role", "state", "pid", "address", "http", "resident_bytes"))


def _report(local: LocalCluster, *, as_json: bool) -> None:
    """The cluster as it is after a change, for programs; people have been told what happened."""
    if as_json:
        state = local.state
        print_json({"bootstrap": state.bootstrap, "metadata": state.metadata, "store": state.store, "processes": local.rows()})


def _cluster_id() -> str:
    return urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")


def _say(line: str) -> None:
    click.echo(line, err=True)
