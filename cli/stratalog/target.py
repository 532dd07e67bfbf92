"""The cluster that a command uses: a local one by its directory (``--data``), or any by its addresses.

An option takes precedence over the environment. A command never takes one address from the options and another from a local
cluster that they do not name: it would ask the brokers of one cluster and the metadata nodes of another.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click
from click.core import ParameterSource

from stratalog.local.secrets import store_environment
from stratalog.local.state import load_state
from stratalog_core.errors import Invalid, NotFound, Unavailable
from stratalog_core.natural_numbers import natural_number

Command = TypeVar("Command", bound=Callable[..., Any])
DEFAULT_BOOTSTRAP = "127.0.0.1:9092"
DEFAULT_DATA = Path("data")
"""The directory of ``make run``. Commands in the same working directory need no ``--data``."""
_ADDRESSES_MAX: Final = 3
_CONNECT_S: Final = 2.0
_CONNECT_NOW_S: Final = 0.5
_PORT_MAX: Final = 65535
_DEFAULT_PORT: Final = "9092"
_NAMED: Final = "stratalog.target.named"
"""Key in the context's ``meta``: whether addresses name the cluster, so that ./data is no default."""


class NoMetadata(Unavailable):
    """The metadata quorum did not answer a command."""


def data_option(command: Command, naming: Sequence[str] = ("metadata",)) -> Command:
    """Add ``--data``, which every command has that uses a cluster. ``naming``: the command's options that name one, too."""

    @wraps(command)
    def resolved(*args: Any, **given: Any) -> Any:
        context = click.get_current_context(silent=True)
        if context is not None:
            given |= _without_contradictions(context, given, naming)
            context.meta[_NAMED] = any(given.get(name) for name in naming)
        return command(*args, **given)

    option = click.option(
        "--data",
        envvar="STRATALOG_DATA",
        type=click.Path(file_okay=False, path_type=Path),
        help="Directory of a local cluster (default: ./data if it holds one).",
    )
    return option(cast(Command, resolved))


def _without_contradictions(context: click.Context, given: dict[str, Any], naming: Sequence[str]) -> dict[str, Any]:
    """Return None for each option from the environment that would name another cluster than the command line does."""
    if _is_from(context, "data", ParameterSource.COMMANDLINE):
        dropped = [name for name in (*naming, "store") if name in given]
    elif any(_is_from(context, name, ParameterSource.COMMANDLINE) for name in naming if name in given):
        dropped = ["data"]
    else:
        dropped = []
    return {name: None for name in dropped if _is_from(context, name, ParameterSource.ENVIRONMENT)}


def _is_from(context: click.Context, name: str, source: ParameterSource) -> bool:
    return context.get_parameter_source(name) is source


def kafka_options(command: Command) -> Command:
    """Add ``--data`` and ``--bootstrap``, for :func:`bootstrap_of`. A failure names the brokers if none can be connected to."""

    @wraps(command)
    def explained(*args: Any, **given: Any) -> Any:
        addresses = bootstrap_of(given["data"], given["bootstrap"]).split(",")
        note_unreachable("broker", addresses)
        try:
            return command(*args, **given)
        except Unavailable as failure:
            _raise_unreachable("broker", addresses, _remedy(given["data"], given["bootstrap"]), failure)
            raise

    option = click.option(
        "--bootstrap",
        envvar="STRATALOG_BOOTSTRAP",
        callback=with_valid_ports,
        metavar="HOST:PORT,…",
        help=f"Brokers (default: those of --data, else {DEFAULT_BOOTSTRAP}).",
    )
    return data_option(option(cast(Command, explained)), ("bootstrap", "metadata"))


def with_valid_ports(context: click.Context, option: click.Parameter, bootstrap: str | None) -> str | None:
    """Return ``bootstrap``. Raises ``BadParameter`` for an impossible port, which librdkafka would try until a timeout."""
    for address in (bootstrap or "").split(","):
        _, port = host_and_port(address)
        if not natural_number(port, _PORT_MAX):
            text = f"{address.strip()!r}: the port must be a number from 1 to {_PORT_MAX}, as in HOST:9092"
            raise click.BadParameter(text, context, option)
    return bootstrap


def host_and_port(address: str) -> tuple[str, str]:
    """Split a broker's address as librdkafka reads it: [PROTOCOL://]HOST[:PORT], an IPv6 host in brackets before a port."""
    place = address.strip().rpartition("://")[2]
    host, colon, port = place.rpartition(":")
    if not colon or port.endswith("]") or (":" in host and not host.endswith("]")):
        return place, _DEFAULT_PORT
    return host, port


def _raise_unreachable(what: str, addresses: Sequence[str], remedy: str, failure: Unavailable) -> None:
    """Raise ``Unavailable`` with the reasons and ``remedy`` if no address accepts a connection: clients give neither."""
    reasons = _refusals(addresses, _CONNECT_S)
    if reasons:
        raise Unavailable(f"no {what} can be reached ({'; '.join(reasons)}); {remedy}") from failure


def note_unreachable(what: str, addresses: Sequence[str]) -> None:
    """Say on a terminal that no address accepts a connection: clients try for up to half a minute, in silence."""
    if sys.stderr.isatty() and (reasons := _refusals(addresses, _CONNECT_NOW_S)):
        click.echo(f"no {what} can be reached ({'; '.join(reasons)}); still trying", err=True)


def _refusals(addresses: Sequence[str], timeout_s: float) -> list[str]:
    """Return why the first addresses accept no connection; none if one does."""
    reasons = []
    for address in addresses[:_ADDRESSES_MAX]:
        host, port = host_and_port(address)
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()
        except (OSError, OverflowError, UnicodeError) as refused:
            reasons.append(f"{address.strip()}: {getattr(refused, 'strerror', None) or refused}")
        else:
            return []
    return reasons


def _remedy(data: Path | None, addresses: str | None) -> str:
    """Return what to do if no server of the cluster can be reached that ``data`` or ``addresses`` names, or neither."""
    known = None if addresses else found_data(data)
    if known is None and not addresses:
        return f"./{DEFAULT_DATA} holds no cluster: start one with `stratalog up`, or name one with --data or --bootstrap"
    from stratalog.local.processes import start_of_stopped
    from stratalog_core.kafka_clients import CHECK_CLUSTER

    if known is not None and (start := start_of_stopped(known)):
        return f"the cluster is stopped: start it with {start}"

    return CHECK_CLUSTER


def quorum_options(command: Command) -> Command:
    """Add ``--data`` and ``--metadata``, for :func:`metadata_of`. A failure says so if no metadata node can be connected to."""

    @wraps(command)
    def explained(*args: Any, **given: Any) -> Any:
        try:
            return command(*args, **given)
        except NoMetadata as failure:
            data, metadata = given["data"], given["metadata"]
            _raise_unreachable("metadata node", metadata_of(data, metadata), _remedy(data, metadata), failure)
            raise

    return data_option(metadata_option(cast(Command, explained)))


def cluster_options(command: Command) -> Command:
    """Add ``--data``, ``--bootstrap`` and ``--metadata``, for :func:`bootstrap_of` and :func:`metadata_of`."""
    return kafka_options(metadata_option(command))


def metadata_option(command: Command) -> Command:
    """Add ``--metadata``, for :func:`metadata_of`."""
    text = "Metadata nodes (default: those of --data)."
    return click.option("--metadata", envvar="STRATALOG_METADATA", metavar="HOST:PORT,…", help=text)(command)


def metadata_options(command: Command) -> Command:
    """Add ``--data``, ``--metadata`` and ``--store``, for :func:`metadata_of` and :func:`store_of`."""
    return quorum_options(store_option(command))


def store_options(command: Command) -> Command:
    """Add ``--data`` and ``--store``, for :func:`store_of`."""
    return data_option(store_option(command))


def store_option(command: Command) -> Command:
    """Add ``--store``, for :func:`store_of`."""
    text = "Object store: a directory, s3://, az:// or gs:// URL (default: that of --data)."
    return click.option("--store", envvar="STRATALOG_STORE", metavar="URL", help=text)(command)


def name_values(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of ``NAME=VALUE`` texts by name. Raises ``Invalid`` for a text without "=" or without a name."""
    for text in texts:
        if text.find("=") < 1:
            raise Invalid(f"{text!r} is not NAME=VALUE")
    return dict(text.split("=", 1) for text in texts)


def found_data(data: Path | None) -> Path | None:
    """Return ``data``, or ./data if it holds a cluster and the command's options name none."""
    context = click.get_current_context(silent=True)
    is_named = data is not None or (context is not None and context.meta.get(_NAMED, False))
    return DEFAULT_DATA if not is_named and (DEFAULT_DATA / "cluster.json").is_file() else data


def bootstrap_of(data: Path | None, bootstrap: str | None) -> str:
    """Return the addresses of brokers: ``bootstrap``, else those of the local cluster, else the default."""
    if bootstrap:
        return bootstrap
    known = found_data(data)
    return DEFAULT_BOOTSTRAP if known is None else load_state(known).bootstrap


def metadata_of(data: Path | None, metadata: str | None) -> list[str]:
    """Return the addresses of the metadata nodes. Raises ``Invalid`` if there is neither ``metadata`` nor a local cluster."""
    known = found_data(data)
    if metadata:
        text = metadata
    elif known is not None:
        text = load_state(known).metadata
    else:
        raise Invalid("no cluster given: name its directory with --data, or its metadata nodes with --metadata")
    return [address.strip() for address in text.split(",") if address.strip()]


def addresses_or_store(data: Path | None, metadata: str | None, store: str | None) -> list[str]:
    """Return the addresses of the metadata nodes, or none if only the store was given: then that alone is read."""
    context = click.get_current_context(silent=True)
    is_alone = data is None or (
        context is not None
        and _is_from(context, "store", ParameterSource.COMMANDLINE)
        and _is_from(context, "data", ParameterSource.ENVIRONMENT)
    )
    return [] if store and not metadata and is_alone else metadata_of(data, metadata)


def second_store_of(data: Path | None, store: str | None = None) -> str | None:
    """Return the URL of the local cluster's second copy; None if it has none, or another ``store`` was given."""
    known = found_data(data)
    return (load_state(known).second_store or None) if known is not None and not store else None


def existing_store(store: str) -> str:
    """Return the URL of a given store, with a relative directory made absolute.

    Raises ``NotFound`` for a directory that does not exist: opening the store would create a mistyped one, empty.
    """
    if "://" in store and not store.startswith("file:///"):
        return store
    path, separator, options = store.removeprefix("file://").partition("?")
    directory = Path(path).absolute()
    if not directory.is_dir():
        raise NotFound(f"store {directory} is not a directory: give the directory or URL that holds the history")
    return store if "://" in store else f"{directory}{separator}{options}"


def store_of(data: Path | None, store: str | None) -> str:
    """Return the URL of the object store. Puts a local cluster's own credentials into this process's environment.

    Raises ``NotFound`` for a given directory that does not exist.
    """
    if store:
        return existing_store(store)
    known = found_data(data)
    if known is None:
        raise Invalid("no object store given: name the cluster's directory with --data, or the store with --store")
    os.environ.update(store_environment(known))
    return load_state(known).store
