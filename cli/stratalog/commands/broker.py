"""``stratalog broker``: runs a broker, or manages brokers and topic defaults through the metadata nodes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import click

from stratalog.brokers.defaults import change_defaults, default_rows, edited
from stratalog.brokers.draining import drain as drain_broker
from stratalog.brokers.draining import owned, wait_until_drained
from stratalog.brokers.draining import undrain as undrain_broker
from stratalog.brokers.report import Row, broker_rows
from stratalog.command_group import CommandGroup
from stratalog.commands.role import run_role
from stratalog.config_values import config_values
from stratalog.deletion import yes_option
from stratalog.output import json_option, print_done, print_json, print_listing, progress_bar
from stratalog.parameters import Integer
from stratalog.target import metadata_of, metadata_options, quorum_options, store_of
from stratalog.tier.session import metadata_session
from stratalog.topic_retention import Expiring, RetentionChange, changes_by_defaults, confirm_shortening
from stratalog.waiting import timeout_option, wait_option
from stratalog_metadata.client.topic_defaults import topic_defaults

_DEFAULT_COLUMNS = ("config", "broker_name", "value", "built_in", "changed")
_COLUMNS = ("broker", "state", "rack", "address", "partitions", "in_bytes_per_s", "out_bytes_per_s", "unreadable_records")


@click.group(cls=CommandGroup, invoke_without_command=True)
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file of the broker to run.")
@click.pass_context
def broker(context: click.Context, config: Path | None) -> None:
    """Run a broker until SIGTERM, configured by a TOML file and the environment. The commands below manage brokers."""
    if context.invoked_subcommand is None:
        run_role("broker", config)


@broker.command("list")
@quorum_options
@json_option
def list_brokers(data: Path | None, metadata: str | None, as_json: bool) -> None:
    """List brokers: state, rack, address, owned partitions and traffic."""
    rows = asyncio.run(_rows(metadata_of(data, metadata)))
    print_listing("brokers", rows, _COLUMNS, as_json=as_json)


async def _rows(addresses: list[str]) -> list[Row]:
    async with metadata_session(addresses) as client:
        return broker_rows(client.view, await client.loads())


@broker.command()
@click.argument("broker_id", metavar="ID", type=Integer(min=0))
@wait_option("it owns no partition", default=True)
@timeout_option(300.0)
@quorum_options
@json_option
def drain(broker_id: int, wait: bool, timeout_s: float, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Move all partitions of broker ID to other brokers. It gets none until `stratalog broker undrain`.

    Clients see no error: they retry. The broker keeps running; stopping it afterwards moves no partition.
    """
    left = asyncio.run(_drain(metadata_of(data, metadata), broker_id, timeout_s if wait else None))
    sentence = f"broker {broker_id} {'is draining' if left else 'is drained'}: it owns {left or 'no'} partitions"
    print_done({"broker": broker_id, "draining": True, "partitions": left}, sentence, as_json=as_json)


async def _drain(addresses: list[str], broker_id: int, timeout_s: float | None) -> int:
    """Return how many partitions the broker still owns."""
    async with metadata_session(addresses) as client:
        await drain_broker(client, broker_id)
        total = owned(client.view, broker_id)
        if timeout_s is None:
            return total
        with progress_bar() as progress:
            task = progress.add_task(f"draining broker {broker_id}", total=total)
            await wait_until_drained(
                client, broker_id, timeout_s, lambda left: progress.update(task, completed=max(0, total - left))
            )  # fmt: skip
    return 0


@broker.command()
@click.argument("broker_id", metavar="ID", type=Integer(min=0))
@quorum_options
@json_option
def undrain(broker_id: int, data: Path | None, metadata: str | None, as_json: bool) -> None:
    """Return broker ID to service. Balancing gives it partitions again, a few at a time."""
    asyncio.run(_undrain(metadata_of(data, metadata), broker_id))
    sentence = f"broker {broker_id} accepts partitions again"
    print_done({"broker": broker_id, "draining": False}, sentence, as_json=as_json)


async def _undrain(addresses: list[str], broker_id: int) -> None:
    async with metadata_session(addresses) as client:
        await undrain_broker(client, broker_id)


@broker.command()
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE", help="Change a default; repeatable.")
@click.option("--unset", multiple=True, metavar="NAME", help="Reset to the built-in default; repeatable.")
@yes_option
@metadata_options
@json_option
def defaults(
    changes: tuple[str, ...],
    unset: tuple[str, ...],
    yes: bool,
    data: Path | None,
    metadata: str | None,
    store: str | None,
    as_json: bool,
) -> None:
    """Show or change the cluster-wide defaults of topic configs. A topic's own configs take precedence.

    Names are Kafka's for topics (`retention.ms`) or for brokers (`log.retention.ms`). Changes apply to running partitions
    at once. A shorter retention deletes records of all topics that do not set it: the command says how many, and asks.
    """
    addresses, wanted = metadata_of(data, metadata), config_values(changes)
    expiring: list[Expiring] = []
    if changes or unset:
        shorter = asyncio.run(_shortened(addresses, wanted, unset))
        expiring = confirm_shortening(shorter, lambda: (addresses, store_of(data, store)), yes=yes)
    rows = asyncio.run(_defaults(addresses, wanted, unset))
    if as_json and expiring:
        print_json({"defaults": rows, "expiring": [dataclasses.asdict(each) for each in expiring]})
        return
    print_listing("defaults", rows, _DEFAULT_COLUMNS, as_json=as_json)


async def _shortened(addresses: list[str], changes: dict[str, str], unset: tuple[str, ...]) -> list[RetentionChange]:
    async with metadata_session(addresses) as client:
        return changes_by_defaults(client.view, edited(changes, unset, topic_defaults(client.view)))


async def _defaults(addresses: list[str], changes: dict[str, str], unset: tuple[str, ...]) -> list[Row]:
    async with metadata_session(addresses) as client:
        if changes or unset:
            await change_defaults(client, changes, unset)
        return default_rows(client.view)
