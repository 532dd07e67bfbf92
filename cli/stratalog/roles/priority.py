"""How a process gives way to others on the same machine."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

_AUTOGROUP: Final = Path("/proc/self/autogroup")
_log = logging.getLogger(__name__)


def give_way(niceness: int) -> None:
    """Have others go first wherever they want the CPU, too: ``niceness`` as of nice(2), 0 changes nothing. There is no way
    back.

    Linux shares the CPU among sessions before it looks at priorities within one (sched(7), "The autogroup feature"): a
    process that leads its own, as one that was started in the background does, gives way as a session.
    """
    if not niceness:
        return
    os.nice(niceness)
    if os.getsid(0) != os.getpid():
        return
    try:
        _AUTOGROUP.write_text(str(niceness))
    except FileNotFoundError:
        pass  # There are no such groups here.
    except OSError as refused:
        _log.warning("others on this machine may have to wait for this process: %s: %s", _AUTOGROUP, refused)
