"""``stratalog txn …``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog import kafka
from stratalog.output import json_option, print_done, print_json, print_listing, print_rows
from stratalog.target import bootstrap_of, kafka_options
from stratalog.transactions import describe_transaction, list_transactions
from stratalog_core.errors import Conflict
from stratalog_core.kafka_clients import translated


@click.group()
def txn() -> None:
    """List, describe and abort transactions."""


@txn.command("list")
@click.option("--state", "states", multiple=True, help="Only ids in this state, such as Ongoing; repeatable.")
@kafka_options
@json_option
def list_ids(states: tuple[str, ...], data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """List transactional ids with their state and coordinator."""
    rows = asyncio.run(list_transactions(bootstrap_of(data, bootstrap), states))
    print_listing("transactions", rows, ("transactional_id", "state", "producer_id", "coordinator"), as_json=as_json)


@txn.command()
@click.argument("transactional_id")
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
@click.argument("transactional_id")
@kafka_options
@json_option
def abort(transactional_id: str, data: Path | None, bootstrap: str | None, as_json: bool) -> None:
    """Abort the ongoing transaction of a transactional id, and fence its producer, which cannot continue."""
    address = bootstrap_of(data, bootstrap)
    found = asyncio.run(describe_transaction(address, transactional_id))
    if found["state"] != "Ongoing":
        raise Conflict(f"{transactional_id} has no ongoing transaction; its state is {found['state']}")
    # As Kafka's Admin.fenceProducers: a new instance of the producer aborts what the one before it has begun.
    producer = kafka.producer(address, {"transactional.id": transactional_id, "transaction.timeout.ms": found["timeout_ms"]})
    with translated():
        producer.init_transactions(kafka.TIMEOUT_S)
    print_done({"transactional_id": transactional_id, "partitions": found["partitions"]}, "aborted", as_json=as_json)
