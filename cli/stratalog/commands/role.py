"""``stratalog tiering --config FILE``: one role alone, as containers and clusters start it.

``bookie``, ``broker`` and ``metadata`` are such, too, and have commands besides: see the files of their names.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click


def run_role(role: str, config: Path | None) -> None:
    """Run one process of that role until SIGTERM; loaded only then, because commands of the same name come without it."""
    from stratalog.roles.runtime import Configuration, run

    run(Configuration(file=config), role, import_module(f"stratalog.roles.{role}").start)


def _command(role: str) -> click.Command:
    @click.command(name=role, help=f"Run one {role} process until SIGTERM, configured by a TOML file and the environment.")
    @click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="TOML file.")
    def command(config: Path | None) -> None:
        run_role(role, config)

    return command


tiering = _command("tiering")
