"""``stratalog`` and ``python -m stratalog``."""

from __future__ import annotations

import errno
import os
import sys
from types import ModuleType
from typing import Final, NoReturn, cast

import click

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog_core.errors import StratalogError

_CHECK_PATH: Final = "check the path that was given"
_CHECK_ACCESS: Final = "give this user access, or name another path"
_REMEDIES: Final = {
    errno.ENOENT: _CHECK_PATH,
    errno.ENOTDIR: _CHECK_PATH,
    errno.EISDIR: _CHECK_PATH,
    errno.EACCES: _CHECK_ACCESS,
    errno.EPERM: _CHECK_ACCESS,
    errno.EROFS: _CHECK_ACCESS,
    errno.ENOSPC: "free disk space, or name another path",
    errno.EDQUOT: "free disk space, or name another path",
}
"""Errors of paths that the user chose. Any other OSError is a defect, and keeps its traceback."""


def main(command: click.Command = stratalog) -> None:
    """Run one command; every expected failure becomes one line on stderr and an exit code."""
    _do_not_load_hypothesis()
    try:
        code = command(standalone_mode=False)
    except click.exceptions.Abort:
        code = ExitCode.INTERRUPTED
    except click.ClickException as wrong:
        wrong.show()
        code = wrong.exit_code
    except StratalogError as failure:
        click.echo(f"stratalog: {failure.message}", err=True)
        code = exit_code_of(failure)
    except OSError as failure:
        remedy = _REMEDIES.get(failure.errno or 0)
        if remedy is None or failure.filename is None:
            raise
        click.echo(f"stratalog: {failure.filename}: {failure.strerror}; {remedy}", err=True)
        code = ExitCode.FAILED
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
