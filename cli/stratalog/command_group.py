"""The class of all groups of commands."""

from __future__ import annotations

from typing import Final

import click

_UNLIMITED: Final = 1000


class CommandGroup(click.Group):
    """A group whose help shows each command's whole first sentence. Click cuts it to what fits in one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(_UNLIMITED)) for name, found in commands if found is not None])
