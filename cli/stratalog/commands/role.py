"""``stratalog tiering --config FILE``: runs one role alone, as containers and clusters start it.

``bookie``, ``broker`` and ``metadata`` do the same and also have subcommands: see the files of those names.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stratalog.exit_codes import exit_code_of
from stratalog_core.errors import StratalogError

if TYPE_CHECKING:
    from stratalog.roles.runtime import Configuration, Start


def run_role(role: str, config: Path | None) -> None:
    """Run one process of ``role`` until SIGTERM. Imported only here, because the subcommands of a role do not need it."""
    from stratalog.roles.runtime import Configuration

    serve(Configuration(file=config), role, import_module(f"stratalog.roles.{role}").start)


def serve(configuration: Configuration, name: str, start: Start) -> None:
    """Run ``start`` until a signal. Raises what ended the process, or exits with its code if stderr has the error already."""
    from stratalog.roles.node import NodeSettings
    from stratalog.roles.runtime import run

    log_file = configuration.section(NodeSettings, "node").log_file
    configuration.check_tables()
    try:
        run(configuration, name, start)
    except StratalogError as failure:
        if log_file:
            raise
        raise click.exceptions.Exit(exit_code_of(failure)) from failure


def _command(role: str) -> click.Command:
    @click.command(name=role, help=f"Run a {role} worker until SIGTERM, configured by a TOML file and the environment.")
    @click.option(
        "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help=f"TOML file of the {role} worker to run."
    )
    def command(config: Path | None) -> None:
        run_role(role, config)

    return command


tiering = _command("tiering")
