"""``python -m chaos.faulty_role ROLE --config FILE --routes FILE --faults FILE``: a role whose I/O can fail on command.

The role is the one that ``stratalog ROLE`` runs. Its disks are :mod:`chaos.faulty_files`, its clock is
:mod:`chaos.jumping_clock`, and its requests to other processes go through the proxy: ``--routes`` names a link for each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from chaos.faulty_files import FaultyFiles
from chaos.jumping_clock import JumpingClock
from chaos.tether import tether
from stratalog.exit_codes import ExitCode
from stratalog.roles.runtime import Borders, Configuration, run
from stratalog_core.errors import StratalogError
from stratalog_core.rpc.tcp import TcpChannel, TcpTransport


class RoutedTransport(TcpTransport):
    """TCP connections through the proxy."""

    def __init__(self, routes: Mapping[str, str]) -> None:
        super().__init__()
        self._routes = routes

    def channel(self, address: str) -> TcpChannel:
        """Return the channel over the link for ``address``; a direct one if there is no link."""
        return super().channel(self._routes.get(address, address))


def main() -> int:
    """Run the role until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m chaos.faulty_role")
    parser.add_argument("role", choices=("metadata", "bookie", "broker", "tiering"))
    for name in ("--config", "--routes", "--faults"):
        parser.add_argument(name, type=Path, required=True)
    arguments = parser.parse_args()
    tether()
    borders = Borders(
        transport=partial(RoutedTransport, json.loads(arguments.routes.read_text())),
        files=partial(FaultyFiles, faults=arguments.faults),
        clock=partial(JumpingClock, arguments.faults.with_suffix(".clock")),
    )
    start = import_module(f"stratalog.roles.{arguments.role}").start
    try:
        run(Configuration(file=arguments.config), arguments.role, start, borders)
    except StratalogError:
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
