"""``stratalog`` and ``python -m stratalog``."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import NoReturn, cast

import click

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog_core.errors import StratalogError


def main() -> None:
    """Run one command; every expected failure becomes one line on stderr and an exit code."""
    _do_not_load_hypothesis()
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
    _leave(code if isinstance(code, int) else ExitCode.OK)


def _do_not_load_hypothesis() -> None:
    """Make ``import hypothesis`` fail in this process.

    kio, which has the schemas of Kafka's messages, loads it wherever it is installed, for tests of its own. That takes half a
    second of a broker's start.
    """
    modules = cast(dict[str, ModuleType | None], sys.modules)
    modules.setdefault("hypothesis", None)


def _leave(code: int) -> NoReturn:
    """End the process; everything has been closed by now.

    Native threads of the S3 client may still be letting go of Python objects. One that asks for the interpreter while it is
    being taken down is ended in the middle of its own frames (before Python 3.14), and that aborts the process: so where that
    client was loaded, the interpreter is not taken down.
    """
    if "obstore" in sys.modules:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = code or ExitCode.FAILED
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
