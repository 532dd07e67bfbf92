"""``stratalog bench …``: load and measure any cluster that speaks Kafka's protocol."""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import psutil

from stratalog.command_group import CommandGroup
from stratalog.output import json_option, progress_bar
from stratalog.parameters import Integer, Number
from stratalog.target import bootstrap_of, kafka_options, name_values
from stratalog_core.errors import NotFound
from stratalog_loadgen.processes.loads import Payload
from stratalog_loadgen.processes.workers import OnProgress
from stratalog_loadgen.results.report import Pace, print_result
from stratalog_loadgen.settings import Readers, Topics, Traffic, Window

Command = TypeVar("Command", bound=Callable[..., Any])

_TOPIC = (
    click.option("--topic", help="Use this existing topic (default: a new one, deleted afterwards)."),
    click.option("--topics", default=1, show_default=True, type=Integer(1, 1000), help="Number of new topics."),
    click.option("--partitions", default=6, show_default=True, type=Integer(1, 10_000), help="Partitions of each new topic."),
    click.option("--replication-factor", default=-1, help="Replication factor of new topics (default: the cluster's)."),
    click.option(
        "--topic-config", "configs", multiple=True, metavar="NAME=VALUE", help="Topic config of new topics; repeatable."
    ),
    click.option("--keep", is_flag=True, help="Keep new topics afterwards."),
)
_TRAFFIC = (
    click.option(
        "--record-bytes", default=1000, show_default=True, type=Integer(8, 10_000_000), help="Size of a record's value."
    ),
    click.option(
        "--random-ratio",
        default=0.5,
        show_default=True,
        type=Number(0, 1),
        help="Share of random bytes in a value; the rest is zeros, which compress.",
    ),
    click.option("--batch-bytes", default=131_072, show_default=True, type=Integer(1, 100_000_000), help="Maximum batch size."),
    click.option(
        "--batch-records",
        default=0,
        type=Integer(0, 1_000_000),
        help="Maximum records per batch; 1: no batching (default: limited by --batch-bytes only).",
    ),
    click.option("--linger-ms", default=5.0, show_default=True, type=Number(0, 900_000), help="Producers' linger.ms."),
    click.option(
        "--compression",
        default="none",
        show_default=True,
        type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
        help="Compression of the record batches.",
    ),
    click.option("--acks", default="all", show_default=True, type=click.Choice(["0", "1", "all"]), help="Producers' acks."),
    click.option("--producers", default=1, show_default=True, type=Integer(1, 10_000), help="Number of producers."),
    click.option("--processes", default=1, show_default=True, type=Integer(1, 256), help="Processes that run the producers."),
    click.option(
        "--keys", default="none", show_default=True, type=click.Choice(["none", "round-robin", "random"]), help="Record keys."
    ),
    click.option("--set", "client", multiple=True, metavar="NAME=VALUE", help="librdkafka setting of producers; repeatable."),
)
_WINDOW = (
    click.option(
        "--warmup", "warmup_s", default=5.0, show_default=True, type=Number(0), help="Seconds before counting starts."
    ),
    click.option("--duration", "duration_s", default=30.0, show_default=True, type=Number(0.1), help="Seconds to measure."),
)


@click.group(cls=CommandGroup)
def bench() -> None:
    """Load and measure any cluster that speaks Kafka's protocol. librdkafka clients run in separate processes.

    Every result states what ran, with which settings and for how long. Clients add to the load of the machine they run on.
    """


_CLIENT = click.option(
    "--client",
    "tool",
    default="librdkafka",
    show_default=True,
    type=click.Choice(["librdkafka", "java"]),
    help="Client to measure with: librdkafka, or Kafka's performance tools, which need Java and Maven and have fewer options.",
)


def _options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Command], Command]:
    every = [option for group in groups for option in group]
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(every), command)


@bench.command()
@_options(_TOPIC, _TRAFFIC, _WINDOW)
@click.option(
    "--records",
    default=0,
    type=Integer(0),
    help="Send this many records, without a warm-up (default: send for --duration).",
)
@click.option("--client-limit", is_flag=True, help="Measure only the client, against librdkafka's mock brokers.")
@_CLIENT
@kafka_options
@json_option
def produce(
    data: Path | None, bootstrap: str | None, as_json: bool, records: int, client_limit: bool, tool: str, **options: Any
) -> None:
    """Produce at full speed. Measures acknowledged records per second, and latency under that load."""
    from stratalog_loadgen.runs import java
    from stratalog_loadgen.runs.produce import measure_client_limit, measure_produce

    topics, traffic, window = _topics(options), _traffic(options), _window(options)
    with _progress("records sent") as on_progress:
        if client_limit:
            result = measure_client_limit(traffic, window, on_progress=on_progress)
        elif tool == "java":
            result = java.measure_produce(bootstrap_of(data, bootstrap), topics, traffic, records=records)
        else:
            result = measure_produce(
                bootstrap_of(data, bootstrap), topics, traffic, window, records=records, on_progress=on_progress
            )
    print_result(result, as_json=as_json)


@bench.command()
@_options(_TOPIC, _TRAFFIC, _WINDOW)
@click.option("--rate", "records_per_s", required=True, type=Number(0.1), help="Records per second of all producers.")
@click.option("--end-to-end/--acknowledged-only", default=True, help="Also measure until a consumer has the record (default).")
@kafka_options
@json_option
def latency(
    data: Path | None, bootstrap: str | None, as_json: bool, records_per_s: float, end_to_end: bool, **options: Any
) -> None:
    """Measure latency at a fixed rate, from the time at which each record was due (no coordinated omission)."""
    from stratalog_loadgen.runs.latency import measure_latency

    with _progress("records sent and read") as on_progress:
        result = measure_latency(
            bootstrap_of(data, bootstrap),
            _topics(options),
            _traffic(options),
            _window(options),
            records_per_s=records_per_s,
            end_to_end=end_to_end,
            on_progress=on_progress,
        )
    print_result(result, as_json=as_json)


@bench.command()
@_options(_TOPIC, _TRAFFIC, _WINDOW)
@click.option(
    "--mode", default="tail", show_default=True, type=click.Choice(["tail", "catch-up"]),
    help="tail: read records as they are written; catch-up: read records written before.",
)  # fmt: skip
@click.option("--groups", default=1, show_default=True, type=Integer(1, 1000), help="Consumer groups; each reads everything.")
@click.option("--consumers", default=1, show_default=True, type=Integer(1, 10_000), help="Members of each group.")
@click.option(
    "--consumer-processes",
    default=0,
    type=Integer(0, 256),
    help="Processes that run the consumers (default: one per group).",
)
@click.option("--light", is_flag=True, help="Use consumers without librdkafka's threads, for groups with hundreds of members.")
@click.option(
    "--protocol",
    default="classic",
    show_default=True,
    type=click.Choice(["classic", "consumer"]),
    help="Group protocol of the consumers.",
)
@click.option(
    "--rate",
    "records_per_s",
    default=0.0,
    type=Number(0),
    help="Records per second of all producers (default: tail: full speed; catch-up: none).",
)
@click.option(
    "--history-bytes",
    default=1_000_000_000,
    show_default=True,
    type=Integer(1),
    help="Catch-up without --topic: bytes to write before reading.",
)
@click.option(
    "--leave",
    is_flag=False,
    flag_value=1,
    default=0,
    type=Integer(0),
    help="Tail: number of consumers of one group that leave halfway, to measure the rebalance (without a number: 1).",
)
@click.option("--set-consumer", multiple=True, metavar="NAME=VALUE", help="librdkafka setting of consumers; repeatable.")
@_CLIENT
@kafka_options
@json_option
def consume(data: Path | None, bootstrap: str | None, as_json: bool, mode: str, tool: str, **options: Any) -> None:
    """Measure consumers of records as they are written (tail), or of records written before (catch-up)."""
    from stratalog_loadgen.runs import java
    from stratalog_loadgen.runs.consume import measure_catch_up, measure_tail

    servers, topics, traffic = bootstrap_of(data, bootstrap), _topics(options), _traffic(options)
    readers = Readers(
        groups=options["groups"],
        consumers=options["consumers"],
        processes=options["consumer_processes"],
        light=options["light"],
        protocol=options["protocol"],
        client={**name_values(options["set_consumer"])},
    )
    rate, history_bytes = options["records_per_s"], options["history_bytes"]
    with _progress("records sent and read") as on_progress:
        if tool == "java":
            result = java.measure_consume(servers, topics, traffic, history_bytes=history_bytes)
        elif mode == "tail":
            window, leave = _window(options), options["leave"]
            result = measure_tail(
                servers, topics, traffic, readers, window, records_per_s=rate, leave=leave, on_progress=on_progress
            )
        else:
            result = measure_catch_up(
                servers, topics, traffic, readers, history_bytes=history_bytes, records_per_s=rate, on_progress=on_progress
            )
    print_result(result, as_json=as_json)


@bench.command()
@click.option(
    "--count", "connections", default=1000, show_default=True, type=Integer(1, 100_000), help="Number of connections."
)
@click.option("--duration", "duration_s", default=30.0, show_default=True, type=Number(0.1), help="Seconds to keep them open.")
@click.option("--processes", default=1, show_default=True, type=Integer(1, 64), help="Processes that open the connections.")
@kafka_options
@json_option
def connections(
    data: Path | None, bootstrap: str | None, as_json: bool, connections: int, duration_s: float, processes: int
) -> None:
    """Open idle connections to all brokers, and measure the latency of single requests while they are open."""
    from stratalog_loadgen.runs.connections import measure_connections

    with _progress("connections") as on_progress:
        result = measure_connections(
            bootstrap_of(data, bootstrap),
            connections=connections,
            duration_s=duration_s,
            processes=processes,
            on_progress=on_progress,
        )
    print_result(result, as_json=as_json)


@bench.command()
@_options(_TOPIC, _TRAFFIC)
@click.option("--kill-pid", type=int, help="Process id of the broker to kill with SIGKILL (default: you kill one).")
@click.option("--before", "before_s", default=10.0, show_default=True, type=Number(1), help="Seconds before the kill.")
@click.option("--after", "after_s", default=30.0, show_default=True, type=Number(1), help="Seconds after the kill.")
@click.option("--rate", "rate", default=2.0, show_default=True, type=Number(0.1), help="Records per second to each partition.")
@kafka_options
@json_option
def failover(
    data: Path | None,
    bootstrap: str | None,
    as_json: bool,
    kill_pid: int | None,
    before_s: float,
    after_s: float,
    rate: float,
    **options: Any,
) -> None:
    """Produce to every partition while a broker is killed. Measures the longest time without acknowledgements of each partition
    that the broker led.
    """
    from stratalog_loadgen.runs.failover import measure_failover

    if kill_pid is not None and not psutil.pid_exists(kill_pid):
        raise NotFound(f"--kill-pid {kill_pid}: no such process on this machine")
    with _progress("records sent") as on_progress:
        result = measure_failover(
            bootstrap_of(data, bootstrap),
            _topics(options),
            _traffic(options),
            kill=functools.partial(_kill, kill_pid),
            before_s=before_s,
            after_s=after_s,
            records_per_partition_per_s=rate,
            on_progress=on_progress,
        )
    print_result(result, as_json=as_json)


@bench.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--driver", type=click.Path(dir_okay=False, path_type=Path), help="Driver file: replication, topic and client settings."
)
@click.option(
    "--payloads",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the workload's payloadFile (default: the directory of FILE).",
)
@kafka_options
@json_option
def workload(
    file: Path, driver: Path | None, payloads: Path | None, data: Path | None, bootstrap: str | None, as_json: bool
) -> None:
    """Run the OpenMessaging Benchmark workload in FILE."""
    from stratalog_loadgen.runs.workload import measure_workload
    from stratalog_loadgen.workload_file import plan_of, read_driver, read_workload

    wanted = read_workload(file)
    plan = plan_of(wanted, read_driver(driver) if driver else None, payload_directory=payloads or file.parent)
    with _progress("records sent and read") as on_progress:
        result = measure_workload(bootstrap_of(data, bootstrap), wanted, plan, on_progress=on_progress)
    print_result(result, as_json=as_json)


def _topics(options: dict[str, Any]) -> Topics:
    return Topics(
        name=options["topic"],
        count=options["topics"],
        partitions=options["partitions"],
        replication_factor=options["replication_factor"],
        configs=name_values(options["configs"]),
        keep=options["keep"],
    )


def _traffic(options: dict[str, Any]) -> Traffic:
    return Traffic(
        payload=Payload(record_bytes=options["record_bytes"], random_ratio=options["random_ratio"]),
        batch_bytes=options["batch_bytes"],
        batch_records=options["batch_records"],
        linger_ms=options["linger_ms"],
        compression=options["compression"],
        acks=options["acks"],
        producers=options["producers"],
        processes=options["processes"],
        keys=options["keys"],
        client={**name_values(options["client"])},
    )


def _window(options: dict[str, Any]) -> Window:
    return Window(warmup_s=options["warmup_s"], duration_s=options["duration_s"])


def _kill(pid: int | None) -> None:
    if pid is not None:
        os.kill(pid, signal.SIGKILL)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM unwind the stack as Ctrl-C does, so that topics are deleted and load processes ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress(what: str) -> Iterator[OnProgress]:
    with ended_in_order(), progress_bar() as bar:
        task, pace = bar.add_task(what, total=None), Pace()

        def show(records: int) -> None:
            pace.note(records, time.monotonic())
            bar.update(task, completed=records, description=f"{what}, {pace.per_s:,.0f}/s")

        yield show
