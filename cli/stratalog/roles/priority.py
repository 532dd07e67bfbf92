"""Sets how a process shares the CPU with others on the same machine: its time slice and its niceness."""

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
"""System call numbers of ``sched_setattr(2)``, which the C library has no function for."""
_ATTRIBUTES: Final = struct.Struct("=IIQiIQQQII")
"""``struct sched_attr``: size, policy, flags, niceness, priority, runtime, deadline, period and two bounds of utilization."""
_log = logging.getLogger(__name__)


def take_turns(turn_us: int) -> None:
    """Set the CPU time slice of the calling thread, and of threads that it starts, to ``turn_us``. 0 changes nothing.

    A shorter slice runs sooner after a wake-up and does not get more CPU: the scheduler (EEVDF) runs the thread with the
    earliest deadline first. Linux has taken the slice from each thread since 6.12, without privileges; earlier versions ignore
    it. Does nothing on other systems, or if the thread's scheduling policy is not the default one.
    """
    number = _SET_ATTRIBUTES.get(platform.machine())
    if not turn_us or platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, turn_us * 1000, 0, 0, 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(ctypes.c_long(number), ctypes.c_long(0), ctypes.c_char_p(wanted), ctypes.c_long(0)):
        # A container may forbid it; the default slice then applies.
        _log.warning("cannot set the CPU time slice to %d us: %s", turn_us, os.strerror(ctypes.get_errno()))


def give_way(niceness: int) -> None:
    """Lower this process's CPU priority by ``niceness`` as of nice(2). 0 changes nothing. It cannot be undone.

    Linux divides the CPU among sessions first, and by niceness only within one (sched(7), "The autogroup feature"). So a
    process that leads a session, as one started in the background does, also lowers its session's priority.
    """
    if not niceness:
        return
    os.nice(niceness)
    if os.getsid(0) != os.getpid():
        return
    try:
        _AUTOGROUP.write_text(str(niceness))
    except FileNotFoundError:
        pass  # This system has no autogroups.
    except OSError as refused:
        _log.warning("cannot lower the CPU priority of this session to niceness %d: %s: %s", niceness, _AUTOGROUP, refused)
