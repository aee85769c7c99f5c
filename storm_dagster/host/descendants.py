"""Descendants of a worker, where it has no cgroup: by marks, sessions and parents.

A worker is started with its id in a variable of its environment (:data:`MARK`). Its children
inherit the variable, and the kernel shows it for as long as a process lives, in whatever session
and with whatever parent. A child that starts a program with another environment is found by its
parent or session, if it was seen before it lost both.

Every rule is certain: a process of another origin never matches.
"""

import os
import signal
from collections.abc import Collection, Iterable, Mapping

from storm_dagster.host.processes import ProcessEntry, read_entry, signal_exactly

MARK = "STORM_DAGSTER_WORKER"
"""Variable of a worker's environment with its id, which is random and new for every start."""
_MAX_ENVIRONMENT = 128 * 1024
"""Bytes of an environment in which the mark is looked for; it is the first variable of a worker."""
_MAX_ROUNDS = 10
"""Rounds of signals, for processes that fork while they are ended."""


Identity = tuple[int, int]
"""Pid and start of a process."""


def process_table() -> dict[int, ProcessEntry]:
    """All live processes by pid; zombies are left out."""
    table: dict[int, ProcessEntry] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        entry = read_entry(int(name))
        if entry is not None:
            table[entry.pid] = entry
    return table


def descendants(
    table: Mapping[int, ProcessEntry],
    roots: Collection[Identity],
    sessions: Collection[int] = (),
) -> dict[int, ProcessEntry]:
    """The live processes of ``roots`` and of ``sessions``, and all that descend from them.

    A child of a member is a member, and so is each process of a session that a member leads: it
    descends from the leader. ``sessions`` are those of which each process descends from a root,
    though their leader may be gone.
    """
    members: dict[int, ProcessEntry] = {}
    for pid, ticks in roots:
        entry = table.get(pid)
        if entry is not None and entry.start_ticks == ticks:
            members[pid] = entry
    size = -1
    while len(members) > size:
        size = len(members)
        for pid, entry in table.items():
            if pid in members:
                continue
            parent = members.get(entry.parent)
            is_child = parent is not None and parent.start_ticks <= entry.start_ticks
            if is_child or entry.session in members or entry.session in sessions:
                members[pid] = entry
    return members


def seen_descendants(
    table: Mapping[int, ProcessEntry], worker: Identity, seen: Collection[Identity]
) -> set[Identity]:
    """The live descendants of a worker by the tree of processes, without the worker.

    ``seen`` are those of an earlier table. While one of them lives, the kernel gives the number of
    its session to no other process, and each process of that session descends from the worker: the
    worker leads its own session, so that its descendants are in that or in later ones.
    """
    members = descendants(table, {worker, *seen}, _sessions_of(table, seen))
    identities = {(entry.pid, entry.start_ticks) for entry in members.values()}
    return identities - {worker}


def _sessions_of(table: Mapping[int, ProcessEntry], seen: Collection[Identity]) -> set[int]:
    """The sessions of those of ``seen`` that live."""
    sessions: set[int] = set()
    for pid, ticks in seen:
        entry = table.get(pid)
        if entry is not None and entry.start_ticks == ticks:
            sessions.add(entry.session)
    return sessions


def user_of(pid: int) -> int | None:
    """Id of the user who started a process; ``None`` if it has ended.

    The owner of its folder in ``/proc`` is root if the process asks for that.
    """
    try:
        with open(f"/proc/{pid}/status", "rb") as stream:
            for line in stream:
                if line.startswith(b"Uid:"):
                    return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return None


def find_marked(
    table: Iterable[ProcessEntry], worker_id: str, user: int | None = None
) -> set[Identity]:
    """Find the processes that were started with the mark of that worker.

    With ``user`` only those of that user are asked. Processes whose environment this user cannot
    read are left out. A process sets the size of its environment as it likes: only the begin is
    read, in which the mark is.
    """
    line = f"\0{MARK}={worker_id}\0".encode()
    processes: set[Identity] = set()
    for entry in table:
        if user is not None and user_of(entry.pid) != user:
            continue
        try:
            with open(f"/proc/{entry.pid}/environ", "rb", buffering=0) as stream:
                environment = stream.read(_MAX_ENVIRONMENT)
        except OSError:
            continue
        if line in b"\0" + environment + b"\0":
            processes.add((entry.pid, entry.start_ticks))
    return processes


def kill_descendants(
    worker_id: str,
    seen: Collection[Identity] = (),
    worker_pid: int = 0,
    user: int | None = None,
) -> int:
    """KILL all that descends from a dead worker, and return the number of processes.

    ``seen`` are descendants that were seen before. ``worker_pid`` is 0 if another process has that
    pid by now. ``user`` is the worker's, if it is known. A worker without an id has no mark.
    """
    ended: set[Identity] = set()
    for _ in range(_MAX_ROUNDS):
        table = process_table()
        sessions = _sessions_of(table, seen)
        if worker_pid:
            # A worker leads the session of its processes.
            sessions.add(worker_pid)
        roots = {*seen, *ended}
        if worker_id:
            roots |= find_marked(table.values(), worker_id, user)
        members = descendants(table, roots, sessions).values()
        identities = {(entry.pid, entry.start_ticks) for entry in members}
        identities -= ended
        if not identities:
            break
        for pid, ticks in identities:
            signal_exactly(pid, ticks, signal.SIGKILL)
        ended |= identities
    return len(ended)
