"""Memory limits of worker processes (``worker.memory.size``).

They apply only with ``supervisor.worker.memory.enforce``: otherwise the size is only a label of the
placement. A worker is limited by its cgroup (v2), where it has one with a controller of memory, and
its memory is watched on every machine.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storm_dagster.host.processes import ProcessEntry, processes
from storm_dagster.model.multimap import multimap
from storm_dagster.model.records import WorkerSlot
from storm_dagster.supervisor.processes import LiveWorker

_log = logging.getLogger(__name__)

_CHECK_SECS = 1.0
"""Interval of the checks."""
_MIB = 2**20


def resident_bytes(members: Sequence[ProcessEntry]) -> int:
    """Resident memory of these processes, without mapped files.

    Pages that they share since a fork count for each of them.
    """
    total = 0
    for process in members:
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()
            resident_pages = int(fields[1])
            shared_pages = int(fields[2])
            total += (resident_pages - shared_pages) * os.sysconf("SC_PAGE_SIZE")
    return total


@dataclass(eq=False)
class MemoryGuard:
    """Guard of the memory of one supervisor's workers.

    Only the supervisor's loop calls it.
    """

    conf: Mapping[str, Any]
    report: Callable[[str, int, str], None]
    """(topology id, port, text): an error of a topology."""

    def __post_init__(self) -> None:
        self._checked_at = -_CHECK_SECS
        """Time of the last check, by the clock of the loop."""
        self._limits: dict[str, tuple[LiveWorker, int]] = {}
        """Worker id -> worker, and its limit in bytes."""
        self._ended: set[str] = set()
        """Ids of the workers that this guard has ended."""

    def check(
        self,
        workers: Sequence[LiveWorker],
        now: float,
        placed: Mapping[tuple[str, int], WorkerSlot],
    ) -> None:
        """End each worker that uses more than its limit, and report it.

        Workers that the kernel ended for their memory are reported, too. ``workers`` are the live
        ones. ``placed`` are the workers of the assignments, by topology id and port. A process
        whose worker is not among them has no limit yet. There is no check without
        ``supervisor.worker.memory.enforce``, or within a second after the last one.
        """
        if not self.conf["supervisor.worker.memory.enforce"]:
            return
        if now - self._checked_at < _CHECK_SECS:
            return
        self._checked_at = now
        alive = {live.worker.id for live in workers}
        for worker_id in self._limits.keys() - alive:
            self._forget(worker_id)
        if not workers:
            return
        # A worker leads the session of its processes.
        sessions = multimap((process.session, process) for process in processes())
        for live in workers:
            members = sessions.get(live.process.pid, [])
            used = resident_bytes(members)
            _, limit = self._limits.get(live.worker.id, (live, 0))
            size = self._placed_size(placed.get((live.worker.work.topology_id, live.port)))
            # A process does not return memory: a smaller size applies from its next start on.
            if size > limit:
                limit = size
                self._set_limit(live, limit)
            if 0 < limit < used and live.worker.id not in self._ended:
                self._ended.add(live.worker.id)
                self._report(live, used, limit)
                live.process.end()

    def _placed_size(self, worker: WorkerSlot | None) -> int:
        """Memory of a worker by its placement, in bytes.

        0 without a placement.
        """
        if worker is None:
            return 0
        # Placements of earlier releases name no size.
        return worker.memory_bytes or int(self.conf["worker.memory.size"] or 0)

    def _set_limit(self, live: LiveWorker, limit: int) -> None:
        """Note a worker's limit, and give it to its cgroup if possible."""
        self._limits[live.worker.id] = (live, limit)
        cgroup = live.process.cgroup
        if cgroup is None:
            return
        try:
            cgroup.limit_memory(limit)
        except OSError as error:
            _log.info("worker %s: its memory is watched only (%s)", live.worker.id, error)

    def _forget(self, worker_id: str) -> None:
        """Drop a dead worker, and report it if the kernel ended it for its memory."""
        live, limit = self._limits.pop(worker_id)
        cgroup = live.process.cgroup
        if cgroup is not None:
            kills, peak = cgroup.oom()
            if kills and worker_id not in self._ended:
                self._report(live, limit if peak is None else peak, limit)
        self._ended.discard(worker_id)

    def _report(self, live: LiveWorker, used: int, limit: int) -> None:
        """Log and report a worker that was ended; ``used`` and ``limit`` are bytes."""
        text = (
            f"its worker used {used / _MIB:.1f} MiB of memory, its placement allows "
            f"{limit / _MIB:.1f} MiB: it was ended; raise worker.memory.size in the topology's "
            "conf (topology.master.worker.memory.size, or that of the user-defined worker, if it "
            "has one), or use more workers"
        )
        topology_id = live.worker.work.topology_id
        _log.error("slot %d, %s: %s", live.port, topology_id, text, extra={"topology": topology_id})
        self.report(topology_id, live.port, text)
