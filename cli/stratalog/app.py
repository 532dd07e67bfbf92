"""The command tree. A command's module is imported only when it is used, so that ``--help`` and completion are instant."""

from __future__ import annotations

from importlib import import_module
from typing import Final

import click
from click.shell_completion import CompletionItem

from stratalog.usage_hints import no_such_command

_LOADGEN: Final = "stratalog_loadgen"
_COMMANDS: Final = {
    "bench": (f"{_LOADGEN}.command", "Load and measure any cluster that speaks Kafka's protocol."),
    "bookie": ("stratalog.commands.bookie", "Run a bookie; list, scrub and decommission bookies."),
    "broker": ("stratalog.commands.broker", "Run a broker; list and drain brokers; show and set topic defaults."),
    "cluster": ("stratalog.commands.cluster", "Start and stop a local cluster of processes."),
    "consume": ("stratalog.commands.consume", "Read records of a topic."),
    "cost": ("stratalog.commands.cost", "Estimate what each topic costs in a month, also with another retention."),
    "doctor": ("stratalog.commands.doctor", "Check the machine, a cluster and its store."),
    "group": ("stratalog.commands.group", "List, describe, reset and delete consumer groups."),
    "job": ("stratalog.commands.job", "Audit, measure, export, replay, backfill and erase history on Spark."),
    "key": ("stratalog.commands.key", "Create and rotate the keys of encrypted history."),
    "ledger": ("stratalog.commands.ledger", "List ledgers and read their entries."),
    "metadata": ("stratalog.commands.metadata", "Run a metadata node; show the quorum; add and remove nodes."),
    "produce": ("stratalog.commands.produce", "Write records to a topic."),
    "ready": ("stratalog.commands.ready", "Check that a role on this machine is ready."),
    "serve-archive": ("stratalog.commands.serve_archive", "Serve a bucket's history to consumers, without a cluster."),
    "restore": ("stratalog.commands.restore", "Restore topics from their bucket."),
    "store": ("stratalog.commands.store", "Prepare a bucket for a cluster's history; probe what its server guarantees."),
    "tier": ("stratalog.commands.tier", "Show, offload and verify history in the object store."),
    "tiering": ("stratalog.commands.role", "Run a tiering worker."),
    "topic": ("stratalog.commands.topic", "Create, list, describe, alter and delete topics and their records."),
    "txn": ("stratalog.commands.txn", "List, describe and abort transactions."),
    "up": ("stratalog.commands.up", "Run everything in one process."),
}

_SECTIONS: Final = {
    "Run": ("up", "cluster", "doctor"),
    "Topics and records": ("topic", "produce", "consume", "group", "txn"),
    "History in object storage": ("tier", "job", "restore", "serve-archive", "store", "key", "cost"),
    "Operate": ("broker", "bookie", "metadata", "tiering", "ledger", "ready", "bench"),
}
"""The commands in the order in which a new user needs them."""


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            module = import_module(_COMMANDS[cmd_name][0])
        except ModuleNotFoundError as missing:
            if missing.name != _LOADGEN:
                raise
            raise click.UsageError(
                "`stratalog bench` needs the load generator, which is not installed: pip install 'stratalog[bench]'", ctx
            ) from None
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            raise no_such_command(name, _COMMANDS, ctx)
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        items = [
            CompletionItem(name, help=line) for name, (_, line) in sorted(_COMMANDS.items()) if name.startswith(incomplete)
        ]
        return items + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, _COMMANDS))
        for section, names in _SECTIONS.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), _COMMANDS[name][1]) for name in names])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stratalog")
def stratalog() -> None:
    """Stratalog: a log that speaks Kafka's protocol and keeps its history in object storage.

    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 unavailable or unanswered, 4 not found, 5 conflict, 6 corrupt data,
    7 problems found, 130 interrupted by Ctrl-C, 143 ended by SIGTERM.

    Shell completion: eval "$(_STRATALOG_COMPLETE=bash_source stratalog)" (or zsh_source, fish_source).
    """
