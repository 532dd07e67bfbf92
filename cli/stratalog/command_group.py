"""The class of all groups of commands but the root, and the examples in a command's help."""

from __future__ import annotations

from typing import Final

import click

from stratalog.usage_hints import no_such_command

_UNLIMITED: Final = 1000


def examples(*commands: str) -> str:
    """Return the end of a command's help, which shows these command lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {command}" for command in commands)


class CommandGroup(click.Group):
    """A group whose help shows each command's whole first sentence. Click cuts it to what fits in one line.

    A command that does not exist is answered with the one that may be meant.
    """

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise no_such_command(args[0], self.list_commands(ctx), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(_UNLIMITED)) for name, found in commands if found is not None])
