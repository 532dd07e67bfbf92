"""The reference page of the command has every command that runs by itself, and describes every option."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest

from stratalog.app import stratalog
from stratalog.reference.cli import cli_page


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from _commands(below, f"{path} {name}")


COMMANDS = dict(_commands(stratalog, "stratalog"))


@pytest.mark.parametrize("role", ["metadata", "bookie", "broker", "tiering"])
def test_the_page_has_the_command_that_runs_a_role(role: str) -> None:
    section = cli_page().split(f"\n## stratalog {role}\n")[1].split("\n## ")[0]
    assert f"`stratalog {role} [OPTIONS]`\n" in section
    assert "| `--config FILE` | TOML file of the" in section


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_described(path: str) -> None:
    undescribed = [each.name for each in COMMANDS[path].params if isinstance(each, click.Option) and not each.help]
    assert undescribed == []


def test_a_number_without_limits_has_no_range() -> None:
    assert "=None" not in cli_page()


def test_every_replication_factor_has_the_same_limits() -> None:
    rows = [line for line in cli_page().splitlines() if line.startswith("| `--replication-factor INTEGER`")]
    limited = [row for row in rows if "1<=x<=15" in row]
    assert len(limited) == 4
    assert all("new topics" in row for row in rows if row not in limited), "the load generator measures other systems, too"
