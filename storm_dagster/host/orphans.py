"""Dead orphans of a container's first process.

The kernel makes the first process of a PID namespace the parent of each process there whose own
parent ends. A dead one keeps its pid until its parent asks for its status: without an init such as
tini, each worker that is killed would leave its dead children, until the pids are used up.
"""

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def reap_orphans() -> int:
    """Remove the dead orphans of this process, and return their number.

    It has none unless it is the first process of its container. Each child that a daemon starts
    leads a session of its own, or is still in that of the daemon: a child in any other session is
    an orphan. The status of an own child stays for the thread that waits for it.
    """
    if os.getpid() != 1:
        return 0
    own_session = os.getsid(0)
    reaped = 0
    for name in os.listdir(_PROC):
        if not name.isdecimal():
            continue
        pid = int(name)
        session = _session_of_dead_child(pid)
        if session is None or session in (pid, own_session):
            continue
        # Another thread may have been faster.
        with suppress(ChildProcessError):
            reaped += os.waitpid(pid, os.WNOHANG)[0] == pid
    return reaped


def _session_of_dead_child(pid: int) -> int | None:
    """Session of a child of this process that has ended; ``None`` for any other process."""
    try:
        raw = (_PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    # The fields after the command name: state, parent, process group, session.
    state, parent, _, session, *_ = raw[raw.rfind(b")") + 2 :].split()
    if state != b"Z" or int(parent) != os.getpid():
        return None
    return int(session)
