"""``stratalog txn …``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import click

from stratalog import kafka
from stratalog.command_group import CommandGroup
from stratalog.deletion import confirm, yes_option
from stratalog.hanging_transactions import OpenTransaction, abort_hanging, find_hanging
from stratalog.moments import format_moment
from stratalog.output import json_option, print_done, print_json, print_listing, print_rows
from stratalog.parameters import Integer, valid_name
from stratalog.target import bootstrap_of, kafka_options
from stratalog.transactions import describe_transaction, list_transactions
from stratalog_core.errors import Conflict
from stratalog_core.kafka_clients import translated

_SHOWN_MAX: Final = 10


@click.group(cls=CommandGroup)
def txn() -> None:
    """List, describe and abort transactions, and find hanging ones."""


@txn.command("list")
@click.option("--state", "states", multiple=True, help="Only ids in this state, such as Ongoing; repeatable.")
@kafka_options
@json_option
def list_ids(states: tuple[str, ...], data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """List transactional ids with their state and coordinator."""
    rows = asyncio.run(list_transactions(bootstrap_of(data, bootstrap), states))
    print_listing("transactions", rows, ("transactional_id", "state", "producer_id", "coordinator"), as_json=as_json)


@txn.command()
@click.argument("transactional_id", callback=valid_name)
@kafka_options
@json_option
def describe(transactional_id: str, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Show the transaction of a transactional id, and its partitions."""
    found = asyncio.run(describe_transaction(bootstrap_of(data, bootstrap), transactional_id))
    if as_json:
        print_json(found)
        return
    print_rows([found], ("state", "producer_id", "producer_epoch", "coordinator", "timeout_ms", "started_at"))
    print_rows([{"partition": name} for name in found["partitions"]], ("partition",))


@txn.command()
@click.argument("transactional_id", callback=valid_name)
@yes_option
@kafka_options
@json_option
def abort(transactional_id: str, yes: bool, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Abort the ongoing transaction of a transactional id, and fence its producer."""
    address = bootstrap_of(data, bootstrap)
    found = asyncio.run(describe_transaction(address, transactional_id))
    if found["state"] != "Ongoing":
        raise Conflict(f"{transactional_id} has no ongoing transaction; its state is {found['state']}")
    partitions = len(found["partitions"])
    confirm(f"Abort the transaction of {transactional_id} in {partitions} partitions, and fence its producer?", yes=yes)
    # Like Kafka's Admin.fenceProducers: InitProducerId aborts the transaction of the previous producer.
    producer = kafka.producer(address, {"transactional.id": transactional_id, "transaction.timeout.ms": found["timeout_ms"]})
    with translated():
        producer.init_transactions(kafka.TIMEOUT_S)
    print_done({"transactional_id": transactional_id, "partitions": found["partitions"]}, "aborted", as_json=as_json)


@txn.command("find-hanging")
@click.option("--topic", help="Only partitions of this topic (default: all topics).")
@click.option(
    "--max-transaction-timeout",
    "timeout_minutes",
    type=Integer(0),
    default=15,
    show_default=True,
    help="Skip producers that wrote something within this many minutes.",
)
@click.option(
    "--abort", "aborts", is_flag=True, help="Abort the transactions found, so that read_committed consumers continue."
)
@yes_option
@kafka_options
@json_option
def find_hanging_ones(
    topic: str | None,
    timeout_minutes: int,
    aborts: bool,
    yes: bool,
    data: Path | None,
    bootstrap: str | None,
    as_json: bool,
) -> None:
    """List transactions that are open in a partition but that no coordinator will end (KIP-664)."""
    found = asyncio.run(find_hanging(bootstrap_of(data, bootstrap), topic, timeout_minutes * 60_000))
    aborted: list[OpenTransaction] = []
    if aborts and found:
        confirm(f"Abort {_shown(found)}?", yes=yes)
        aborted = asyncio.run(_abort(found))
    rows = [
        {
            "topic": each.topic,
            "partition": each.partition,
            "producer_id": each.producer_id,
            "producer_epoch": each.producer_epoch,
            "start_offset": each.start_offset,
            "silent_since": format_moment(each.last_timestamp_ms),
            "aborted": each in aborted,
        }
        for each in found
    ]
    columns = ("topic", "partition", "producer_id", "producer_epoch", "start_offset", "silent_since", "aborted")
    print_listing("transactions", rows, columns, as_json=as_json)


def _shown(found: list[OpenTransaction]) -> str:
    shown = ", ".join(
        f"the transaction of producer {each.producer_id} in {each.topic}-{each.partition} since offset {each.start_offset}"
        for each in found[:_SHOWN_MAX]
    )
    return shown + (f" and {len(found) - _SHOWN_MAX} more transactions" if len(found) > _SHOWN_MAX else "")


async def _abort(found: list[OpenTransaction]) -> list[OpenTransaction]:
    """Return the transactions that were aborted: all but those that have ended meanwhile."""
    aborted = []
    for each in found:
        try:
            await abort_hanging(each)
        except Conflict as ended:
            click.echo(ended.message, err=True)
        else:
            aborted.append(each)
    return aborted
