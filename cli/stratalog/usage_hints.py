"""Errors for commands and options that do not exist. Users of Kafka's tools, rpk and kcat type the names of those."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

import click

_COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "add": ("create",),
    "add-partitions": ("alter",),
    "alter-config": ("config",),
    "consume": ("stratalog consume",),
    "create": ("start",),
    "down": ("stop",),
    "get": ("describe", "show"),
    "health": ("status", "doctor"),
    "help": ("stratalog --help",),
    "info": ("describe", "status", "list"),
    "ls": ("list", "status"),
    "new": ("create",),
    "offset-delete": ("delete-offsets",),
    "produce": ("stratalog produce",),
    "recover": ("undelete", "restore"),
    "reset-offsets": ("reset",),
    "rm": ("delete", "remove"),
    "remove": ("delete",),
    "run": ("up",),
    "seek": ("reset",),
    "server": ("up",),
    "show": ("describe", "status", "list"),
    "start": ("up",),
    "transactions": ("txn",),
    "trim-prefix": ("delete-records",),
    "up": ("start",),
    "update": ("alter",),
    "version": ("stratalog --version",),
}
"""Names of other tools, and ours: the first that is a command of the group, or names its whole command line."""
_OPTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "--add-config": ("--set",),
    "--bootstrap": ("--metadata",),
    "--bootstrap-server": ("--bootstrap", "--metadata"),
    "--broker-list": ("--bootstrap", "--metadata"),
    "--brokers": ("--bootstrap", "--metadata"),
    "--compression-codec": ("--compression",),
    "--compression-type": ("--compression",),
    "--consumer-group": ("--group",),
    "--delete-config": ("--unset",),
    "--format": ("--json",),
    "--from-beginning": ("--offset earliest, the default",),
    "--from-time": ("--time", "--since"),
    "--isolation-level": ("--uncommitted",),
    "--listen": ("--kafka",),
    "--max-messages": ("--count",),
    "--no-confirm": ("--yes",),
    "--num": ("--count",),
    "--port": ("--kafka", "--listen"),
    "--replicas": ("--replication-factor",),
    "--since": ("--time",),
    "--timeout-ms": ("--timeout",),
    "--to-datetime": ("--to time:TIME", "--to"),
    "--to-earliest": ("--to earliest", "--to"),
    "--to-latest": ("--to latest", "--to"),
    "--to-offset": ("--to",),
    "-H": ("--header", "--headers"),
    "-K": ("--key-separator",),
    "-b": ("--bootstrap", "--metadata"),
    "-c": ("--config", "--count"),
    "-f": ("--json",),
    "-g": ("--group",),
    "-k": ("--key", "--keys"),
    "-n": ("--count",),
    "-o": ("--offset",),
    "-p": ("--partition", "--partitions"),
    "-r": ("--replication-factor",),
    "-y": ("--yes",),
    "-z": ("--compression",),
}
"""Options of other tools, and ours: the first that the command has."""
_NAMING: Final = frozenset({"--topic", "--group", "-t", "-g"})
"""Options of other tools for what is an argument here."""


def no_such_command(name: str, known: Iterable[str], context: click.Context) -> click.UsageError:
    """Return the error for a command that does not exist, with the names of ours that may be meant."""
    commands = list(known)
    meant = [ours for ours in _COMMANDS.get(name, ()) if ours in commands or ours.startswith("stratalog ")][:1]
    return click.UsageError(f"No such command {name!r}.{_did_you_mean(meant or get_close_matches(name, commands))}", context)


def no_such_option(wrong: click.NoSuchOption) -> click.UsageError:
    """Return the error for an option that does not exist, with ours that may be meant, or where its value belongs."""
    context, name = wrong.ctx, wrong.option_name
    if context is None:
        return wrong
    has = {text for parameter in context.command.params for text in (*parameter.opts, *parameter.secondary_opts)}
    meant = [ours for ours in _OPTIONS.get(name, ()) if ours.partition(" ")[0] in has][:1]
    arguments = [each.make_metavar(context) for each in context.command.params if isinstance(each, click.Argument)]
    if meant:
        hint = _did_you_mean(meant)
    elif name in _NAMING and arguments:
        hint = f" Give the value without it, as {arguments[0]}."
    elif isinstance(context.command, click.Group) and not wrong.possibilities:
        hint = " Options follow the command."
    else:
        return wrong
    return click.UsageError(f"No such option {name!r}.{hint}", context)


def _did_you_mean(meant: list[str]) -> str:
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
