"""The reference page of the ``stratalog`` command, from the command tree."""

from __future__ import annotations

from collections.abc import Iterator

import click

from stratalog.app import stratalog

_HEAD = """# The `stratalog` command

```sh
stratalog topic create events --partitions 3
```

- Name a cluster by `--data DIR` (its directory on this machine), `--bootstrap HOST:PORT` (Kafka) or `--metadata HOST:PORT`
  (the metadata quorum), and the object store by `--store`. Or set `STRATALOG_DATA`, `STRATALOG_BOOTSTRAP`, `STRATALOG_METADATA`
  and `STRATALOG_STORE`, over which an option that names a cluster takes precedence.
- Results go to standard output, everything else to standard error. [Errors](errors.md) lists the exit codes.
- Commands that destroy data ask first unless `--yes` is given.

Generated from the code by `make reference`.

| command | what it does |
| --- | --- |
"""


def cli_page() -> str:
    """The page's text."""
    commands = list(_leaves(click.Context(stratalog, info_name="stratalog")))
    return _HEAD + "".join(map(_summary, commands)) + "".join(map(_section, commands))


def _summary(context: click.Context) -> str:
    """The row of a command in the overview: a link to its section, and the first paragraph of its help."""
    anchor = context.command_path.replace(" ", "-")
    first = _help(context.command).partition("\n\n")[0]
    return f"| [`{context.command_path.removeprefix('stratalog ')}`](#{anchor}) | {_cell(first)} |\n"


def _leaves(context: click.Context) -> Iterator[click.Context]:
    """Contexts of all commands that do something by themselves: those that are no groups, and groups that run a role."""
    command = context.command
    if not isinstance(command, click.Group):
        yield context
        return
    if command.invoke_without_command:
        yield context
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        yield from _leaves(click.Context(below, info_name=name, parent=context))


def _section(context: click.Context) -> str:
    command = context.command
    pieces = click.Command.collect_usage_pieces(command, context)  # Not a group's own, which add its subcommands.
    usage = " ".join([context.command_path, *pieces])
    rows = [row for parameter in command.params if (row := parameter.get_help_record(context)) and row[1]]
    options = "".join(f"| `{_cell(names)}` | {_cell(text)} |\n" for names, text in rows)
    table = f"\n| option | what |\n| --- | --- |\n{options}" if options else ""
    return f"\n## {context.command_path}\n\n`{usage}`\n\n{_help(command)}\n{_examples(command)}{table}"


def _examples(command: click.Command) -> str:
    lines = [line.strip() for line in (command.epilog or "").splitlines() if line.startswith("  ")]
    return "\n```sh\n" + "".join(f"{line}\n" for line in lines) + "```\n" if lines else ""


def _help(command: click.Command) -> str:
    text = (command.help or "").replace("\b\n", "")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
