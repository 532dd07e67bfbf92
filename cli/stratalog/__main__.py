"""``stratalog`` and ``python -m stratalog``."""

from __future__ import annotations

import sys

import click

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog_core.errors import StratalogError


def main() -> None:
    """Run one command; every expected failure becomes one line on stderr and an exit code."""
    try:
        code = stratalog(standalone_mode=False)
    except click.exceptions.Abort:
        code = ExitCode.INTERRUPTED
    except click.ClickException as wrong:
        wrong.show()
        code = wrong.exit_code
    except StratalogError as failure:
        click.echo(f"stratalog: {failure.message}", err=True)
        code = exit_code_of(failure)
    sys.exit(code if isinstance(code, int) else ExitCode.OK)


if __name__ == "__main__":
    main()
