"""``python -m chaos.unsynced_role ROLE --config FILE``: a role whose disks can lose unsynced writes."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from chaos.tether import tether
from chaos.unsynced_files import UnsyncedFiles
from stratalog.exit_codes import ExitCode
from stratalog.roles.runtime import Borders, Configuration, run
from stratalog_core.errors import StratalogError


def main() -> int:
    """Run the role until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m chaos.unsynced_role")
    parser.add_argument("role", choices=("metadata", "bookie"))
    parser.add_argument("--config", type=Path, required=True)
    arguments = parser.parse_args()
    tether()
    start = import_module(f"stratalog.roles.{arguments.role}").start
    try:
        run(Configuration(file=arguments.config), arguments.role, start, Borders(files=UnsyncedFiles))
    except StratalogError:
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
