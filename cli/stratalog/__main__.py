"""``stratalog`` and ``python -m stratalog``."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from types import ModuleType
from typing import Final, NoReturn, cast

import click

from stratalog.app import stratalog
from stratalog.exit_codes import ExitCode, exit_code_of
from stratalog.usage_hints import no_such_option
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
"""Errors of paths that the user chose."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def main(command: click.Command = stratalog) -> None:
    """Run one command; every expected failure becomes one line on stderr and an exit code."""
    _do_not_load_hypothesis()
    _open_closed_streams()
    termination = _Termination()
    try:
        code = command(standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        # Click raises the second, too, if Ctrl-C is pressed again while it handles the first.
        code = ExitCode.TERMINATED if termination.is_requested else ExitCode.INTERRUPTED
    except SystemExit as closed:
        # Click ends a command so whose output is closed early, as by `head`.
        code = closed.code
    except click.NoSuchOption as wrong:
        no_such_option(wrong).show()
        code = wrong.exit_code
    except click.ClickException as wrong:
        wrong.show()
        code = wrong.exit_code
    except StratalogError as failure:
        click.echo(f"stratalog: {failure.message}", err=True)
        code = exit_code_of(failure)
    except UnicodeEncodeError as wrong:
        if not any(wrong.object[wrong.start : wrong.end] in word for word in sys.argv):
            raise
        click.echo(f"stratalog: the argument {wrong.object!r} is not valid UTF-8", err=True)
        code = ExitCode.USAGE
    except OSError as failure:
        text = _explained(failure)
        if text is None:
            raise
        click.echo(f"stratalog: {text}", err=True)
        code = ExitCode.FAILED
    _leave(code if isinstance(code, int) else ExitCode.OK)


class _Termination:
    """Treats SIGTERM like Ctrl-C, so that a command commits offsets, releases leases and stops processes that it started.

    A second SIGTERM has no effect: `timeout` sends two at once, and the second would end the cleaning up.
    """

    def __init__(self) -> None:
        self.is_requested = False
        signal.signal(signal.SIGTERM, self._interrupt)

    def _interrupt(self, *_: object) -> None:
        if self.is_requested:
            return
        self.is_requested = True
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # The shell started the command in the background.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)


def _open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed. A socket that got its number would receive the output."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            setattr(sys, name, os.fdopen(number, mode))


def _explained(failure: OSError) -> str | None:
    """Return the failure and its remedy; None for a defect, which keeps its traceback."""
    if isinstance(failure, socket.gaierror) or failure.errno == errno.EADDRNOTAVAIL:
        return f"{failure.strerror}; check the addresses to listen on"
    remedy = _REMEDIES.get(failure.errno or 0)
    if remedy is None or (failure.filename is None and failure.errno not in _FULL):
        return None
    place = "" if failure.filename is None else f"{failure.filename}: "
    return f"{place}{failure.strerror}; {remedy}"


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
