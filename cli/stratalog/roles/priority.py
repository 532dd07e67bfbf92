"""How a process shares the CPU with others on the same machine: who waits for it decides."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
from pathlib import Path
from typing import Final

_AUTOGROUP: Final = Path("/proc/self/autogroup")
_SET_ATTRIBUTES: Final = {"x86_64": 314, "aarch64": 274}
"""Of ``sched_setattr(2)``: the C library has no name for it."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
"""``struct sched_attr``: size, policy, flags, niceness, priority, runtime, deadline, period and two bounds of utilization."""
_log = logging.getLogger(__name__)


def take_turns(turn_us: int) -> None:
    """Have the thread that calls, and those that it starts, take turns of ``turn_us`` at the CPU: the shorter, the sooner they
    run when they are woken. 0 changes nothing.

    No more of the CPU than before: the scheduler lets go first whose turn would be over first (EEVDF; Linux takes the length of
    a turn from each thread since 6.12, without privileges). Earlier ones heed nothing of this, other systems have no such call,
    and a thread of another policy than the usual one is somebody's choice: there nothing changes.
    """
    number = _SET_ATTRIBUTES.get(platform.machine())
    if not turn_us or platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, turn_us * 1000, 0, 0, 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_char_p(wanted), ctypes.c_long(0)):
        # A container may forbid it: then it waits as long as all others.
        _log.warning("turns at the CPU stay as long as they are: %s", os.strerror(ctypes.get_errno()))


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
