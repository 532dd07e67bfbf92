"""``stratalog ready ROLE``: the health check of containers and supervisors."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from stratalog.health.serving import PROBES
from stratalog.output import json_option, print_json
from stratalog.roles.runtime import Configuration
from stratalog.waiting import timeout_option
from stratalog_core.errors import Unavailable


@click.command()
@click.argument("role", type=click.Choice(sorted(PROBES)))
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The role's TOML file.")
@timeout_option(3.0, "Seconds to wait for each answer.")
@json_option
def ready(role: str, config: Path | None, timeout_s: float, as_json: bool) -> None:
    """Exit with 0 if the ROLE process on this machine is ready, and with 3 if it is not (yet).

    Reads the same configuration file and environment as the process.
    """
    try:
        detail = asyncio.run(PROBES[role](Configuration(file=config), timeout_s))
    except TimeoutError as late:
        raise Unavailable(f"the {role} did not answer within {timeout_s} s") from late
    if as_json:
        print_json({"role": role, "detail": detail})
    else:
        click.echo(detail)
