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

    kio, which has the schemas of Kafka's messages, imports it if it is installed, although only kio's tests use it. The import
    takes half a second of a broker's start.
    """
    modules = cast(dict[str, ModuleType | None], sys.modules)
    modules.setdefault("hypothesis", None)


def _leave(code: int) -> NoReturn:
    """Exit the process after everything is closed.

    Native threads of the S3 client may still release Python objects. Before Python 3.14 the interpreter's finalization ends a
    thread that waits for the GIL, which aborts the process if the thread is inside native frames. So skip finalization if that
    client was loaded.
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
