"""``stratalog cluster …``: a local cluster of real processes below one directory."""

from __future__ import annotations

import secrets
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from pathlib import Path

import click
from click.core import ParameterSource

from stratalog.command_group import CommandGroup
from stratalog.deletion import confirm, yes_option
from stratalog.local.launcher import LocalCluster
from stratalog.local.plan import Sizes, plan_cluster
from stratalog.local.quorum import add_metadata, remove_metadata
from stratalog.output import json_option, print_json, print_rows
from stratalog.parameters import Integer
from stratalog.target import DEFAULT_DATA, found_data
from stratalog.waiting import timeout_option
from stratalog_core.errors import Conflict, Invalid
from stratalog_tiering.store import check_store_url, shown_url


def _existing(context: click.Context, option: click.Parameter, data: Path | None) -> Path:
    """Return the directory, ./data by default if it holds a cluster. Raises ``MissingParameter`` if there is none."""
    found = found_data(data)
    if found is None:
        raise click.MissingParameter(f"./{DEFAULT_DATA} holds no cluster.", context, option)
    return found


def _odd(context: click.Context, option: click.Parameter, count: int) -> int:
    """Return ``count``. Raises ``BadParameter`` if it is even."""
    if count % 2 == 0:
        raise click.BadParameter(
            f"{count} nodes survive no more failures than {count - 1}; use {count - 1} or {count + 1}", context, option
        )
    return count


_new_data_option = click.option(
    "--data",
    required=True,
    envvar="STRATALOG_DATA",
    type=click.Path(file_okay=False, path_type=Path),
    help="The cluster's directory.",
)
_data_option = click.option(
    "--data",
    envvar="STRATALOG_DATA",
    type=click.Path(file_okay=False, path_type=Path),
    callback=_existing,
    help="The cluster's directory (default: ./data if it holds one).",
)
_timeout_option = timeout_option(60.0)
_names = click.argument("names", nargs=-1)


@click.group(cls=CommandGroup)
def cluster() -> None:
    """Start and stop a local cluster of processes.

    DIR/cluster.json lists the bootstrap address and the processes. DIR/config/NAME.toml configures a process,
    and DIR/logs/NAME.log is its log.
    """


@cluster.command()
@_new_data_option
@click.option(
    "--metadata",
    default=3,
    show_default=True,
    type=Integer(1, 7),
    callback=_odd,
    help="Number of metadata nodes (odd).",
)
@click.option("--bookies", default=3, show_default=True, type=Integer(1, 64), help="Number of bookies.")
@click.option("--brokers", default=2, show_default=True, type=Integer(1, 64), help="Number of brokers.")
@click.option("--tiering", default=1, show_default=True, type=Integer(0, 16), help="Number of tiering workers.")
@click.option(
    "--store",
    metavar="URL",
    help="Object store: a directory, s3://bucket/prefix?endpoint=URL, az://container/prefix?account=NAME or gs://bucket/prefix"
    " (default: DIR/store).",
)
@click.option("--minio", is_flag=True, help="Start a MinIO server as well and use it as the store.")
@click.option(
    "--second-store", metavar="URL", help="Store of a second copy of the history, which tiering workers keep (default: none)."
)
@click.option("--object-lock", is_flag=True, help="With --minio: create its bucket with Object Lock.")
@_timeout_option
@json_option
@click.pass_context
def start(
    context: click.Context,
    data: Path,
    metadata: int,
    bookies: int,
    brokers: int,
    tiering: int,
    store: str | None,
    minio: bool,
    second_store: str | None,
    object_lock: bool,
    timeout_s: float,
    as_json: bool,
) -> None:
    """Start a new cluster in DIR, or the one that DIR holds, with the sizes and the store that it was created with.

    Returns when every broker serves. If the cluster cannot start, the processes that were started are stopped. The ports of a
    new cluster come from 20000-31999, or from the range that STRATALOG_LOCAL_PORTS=FIRST-LAST sets.
    """
    if store and minio:
        raise Invalid("--store and --minio cannot be combined: choose one")
    if object_lock and not minio:
        raise Invalid("--object-lock needs --minio; `stratalog store init --object-lock` prepares any other bucket")
    for url in (store, second_store):
        if url:
            check_store_url(url)
    local = LocalCluster(data, _say)
    if local.exists():
        given = {"--store": store, "--second-store": second_store, "--minio": minio, "--object-lock": object_lock}
        _refuse_other_store(local, given)
        for role, count in (("metadata", metadata), ("bookie", bookies), ("broker", brokers), ("tiering", tiering)):
            _warn_of_size(context, local, role, count)
    else:
        sizes = Sizes(metadata=metadata, bookies=bookies, brokers=brokers, tiering=tiering)
        plan = plan_cluster(
            data.absolute(), sizes, cluster_id=_cluster_id(), store=store, minio=minio, object_lock=object_lock,
            second_store=second_store,
        )  # fmt: skip
        local.lay_out(plan)
    local.start_all(timeout_s=timeout_s)
    _report(local, as_json=as_json)


def _refuse_other_store(local: LocalCluster, given: Mapping[str, str | bool | None]) -> None:
    """Raise ``Conflict`` if another store is given than that of the existing cluster."""
    state = local.state
    has = {
        "--store": state.store, "--second-store": state.second_store, "--minio": bool(state.of_role("store")),
        "--object-lock": state.object_lock,
    }  # fmt: skip
    for option, value in given.items():
        if value and value != has[option]:
            raise Conflict(f"{local.data} holds a cluster with the store {shown_url(state.store)}: leave {option} out")


def _warn_of_size(context: click.Context, local: LocalCluster, role: str, count: int) -> None:
    """Say that a size that was given has no effect on the existing cluster."""
    option = role if role in ("metadata", "tiering") else f"{role}s"
    has = len(local.state.of_role(role))
    if context.get_parameter_source(option) is ParameterSource.COMMANDLINE and count != has:
        _say(f"{local.data} holds a cluster with {has} processes of role {role}: --{option} {count} has no effect")


@cluster.command()
@_names
@_data_option
@json_option
def stop(names: tuple[str, ...], data: Path, as_json: bool) -> None:
    """Stop processes (default: all) in order, by SIGTERM, or by SIGKILL if they do not stop in time."""
    local = LocalCluster(data, _say)
    local.stop(names)
    _report(local, as_json=as_json)


@cluster.command()
@click.argument("names", nargs=-1, required=True)
@_data_option
@json_option
def kill(names: tuple[str, ...], data: Path, as_json: bool) -> None:
    """Kill processes with SIGKILL, as in a crash."""
    local = LocalCluster(data, _say)
    local.kill(names)
    _report(local, as_json=as_json)


@cluster.command()
@_names
@_data_option
@_timeout_option
@json_option
def restart(names: tuple[str, ...], data: Path, timeout_s: float, as_json: bool) -> None:
    """Restart processes (default: all) with their data and addresses."""
    local = LocalCluster(data, _say)
    local.restart(names, timeout_s=timeout_s)
    _report(local, as_json=as_json)


@cluster.command()
@click.argument("role", type=click.Choice(["metadata"]))
@_data_option
@_timeout_option
@json_option
def add(role: str, data: Path, timeout_s: float, as_json: bool) -> None:
    """Start another metadata node and add it to the quorum, while the cluster serves."""
    local = LocalCluster(data, _say)
    _say(f"{add_metadata(local, timeout_s=timeout_s)} is a voter")
    _report(local, as_json=as_json)


@cluster.command()
@click.argument("name")
@_data_option
@_timeout_option
@yes_option
@json_option
def remove(name: str, data: Path, timeout_s: float, yes: bool, as_json: bool) -> None:
    """Remove metadata node NAME from the quorum and stop it. Its directory is kept, but cannot join the quorum again."""
    confirm(f"Remove {name} from the metadata quorum? It can join again only with an empty data_dir.", yes=yes)
    local = LocalCluster(data, _say)
    remove_metadata(local, name, timeout_s=timeout_s)
    _say(f"{name} removed")
    _report(local, as_json=as_json)


@cluster.command()
@_data_option
@json_option
def status(data: Path, as_json: bool) -> None:
    """Show the processes of the cluster."""
    local = LocalCluster(data, _say)
    if as_json:
        _report(local, as_json=True)
        return
    click.echo(f"bootstrap {local.state.bootstrap}\nstore     {local.state.store}")
    print_rows(local.rows(), ("name", "role", "state", "pid", "address", "http", "resident_bytes"))


def _report(local: LocalCluster, *, as_json: bool) -> None:
    """With ``as_json``, print the cluster as it is after a change. Messages on stderr have described the change."""
    if as_json:
        state = local.state
        print_json({"bootstrap": state.bootstrap, "metadata": state.metadata, "store": state.store, "processes": local.rows()})


def _cluster_id() -> str:
    return urlsafe_b64encode(secrets.token_bytes(16)).decode().rstrip("=")


def _say(line: str) -> None:
    click.echo(line, err=True)
