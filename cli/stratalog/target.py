"""Which cluster a command speaks to: one below a directory (``--data``), or addresses given by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from stratalog.local.secrets import store_environment
from stratalog.local.state import load_state
from stratalog_core.errors import Invalid, NotFound

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
DEFAULT_DATA = Path("data")
"""Where ``make run`` keeps its node: commands given beside it need no ``--data``."""


def data_option(command: Command) -> Command:
    """``--data``, as every command that speaks to a cluster has it."""
    return click.option(
        "--data",
        envvar="STRATALOG_DATA",
        type=click.Path(file_okay=False, path_type=Path),
        help="A local cluster's directory (default: ./data where there is one).",
    )(command)


def kafka_options(command: Command) -> Command:
    """``--data`` or ``--bootstrap``; hand both to :func:`bootstrap_of`."""
    option = click.option(
        "--bootstrap",
        envvar="STRATALOG_BOOTSTRAP",
        help=f"Brokers, HOST:PORT,… (default: --data's, else {DEFAULT_BOOTSTRAP}).",
    )
    return data_option(option(command))


def quorum_options(command: Command) -> Command:
    """``--data`` or ``--metadata``; hand both to :func:`metadata_of`."""
    metadata = click.option("--metadata", envvar="STRATALOG_METADATA", help="Metadata nodes, HOST:PORT,… (default: of --data).")
    return data_option(metadata(command))


def cluster_options(command: Command) -> Command:
    """``--data``, or ``--bootstrap`` and ``--metadata``; hand them to :func:`bootstrap_of` and :func:`metadata_of`."""
    metadata = click.option("--metadata", envvar="STRATALOG_METADATA", help="Metadata nodes, HOST:PORT,… (default: of --data).")
    return kafka_options(metadata(command))


def metadata_options(command: Command) -> Command:
    """``--data`` or ``--metadata`` and ``--store``; hand them to :func:`metadata_of` and :func:`store_of`."""
    store = click.option("--store", envvar="STRATALOG_STORE", help="Object store: directory or s3:// URL (default: of --data).")
    return quorum_options(store(command))


def name_values(texts: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts by name. Raises ``Invalid`` for one without "="."""
    for text in texts:
        if "=" not in text:
            raise Invalid(f"{text!r} is not NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def found_data(data: Path | None) -> Path | None:
    """The directory of the cluster that is meant: the one that was named, or ./data where it holds a cluster."""
    return DEFAULT_DATA if data is None and (DEFAULT_DATA / "cluster.json").is_file() else data


def bootstrap_of(data: Path | None, bootstrap: str | None) -> str:
    """Addresses of brokers: those given, else those of the cluster that is meant, else the default."""
    if bootstrap:
        return bootstrap
    known = found_data(data)
    return DEFAULT_BOOTSTRAP if known is None else load_state(known).bootstrap


def metadata_of(data: Path | None, metadata: str | None) -> list[str]:
    """Addresses of the metadata nodes. Raises ``Invalid`` if neither tells them."""
    known = found_data(data)
    if not metadata and known is None:
        raise Invalid("which cluster? Name its directory with --data, or its metadata nodes with --metadata")
    text = metadata or load_state(_known(known)).metadata
    return [address.strip() for address in text.split(",") if address.strip()]


def store_of(data: Path | None, store: str | None) -> str:
    """URL of the object store; a local cluster's own credentials are put into this process's environment."""
    if store:
        return store
    known = found_data(data)
    if known is None:
        raise Invalid("which object store? Name the cluster's directory with --data, or the store with --store")
    os.environ.update(store_environment(known))
    return load_state(known).store


def _known(data: Path | None) -> Path:
    if data is None:
        raise NotFound("no directory of a local cluster was given")
    return data
