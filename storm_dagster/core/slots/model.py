"""Values of the slot state machine.

They are the slot, its events, its instructions, and the work that assignments want of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from storm_dagster.core.upgrade.machine import code_for
from storm_dagster.model.records import Assignment, WorkerSlot
from storm_dagster.model.view import UpgradeState

SlotState = Literal[
    "empty",
    "waiting-for-code",
    "waiting-for-start",
    "running",
    "waiting-for-update",
    "killing",
    "killing-to-relaunch",
]


class Work(NamedTuple):
    """Topology and code that a slot runs.

    The worker reads its tasks from its assignment.
    """

    topology_id: str
    code_dir: str
    restarts: int = 0
    """Restarts of the assignment: a process that was started for fewer is replaced."""


class Worker(NamedTuple):
    """Process of a slot: id of its working folder, and the work it was started for."""

    id: str
    work: Work


@dataclass(frozen=True)
class SlotLimits:
    """Limits and pauses, in seconds."""

    start_timeout: float
    """From the start of a process to its first beat (``supervisor.worker.start.timeout.secs``)."""
    silence_timeout: float
    """Between two beats (``supervisor.worker.timeout.secs``)."""
    kill_after: float
    """Between TERM and KILL (``supervisor.worker.shutdown.sleep.secs``)."""
    stable_after: float = 60.0
    """A process that ran so long resets the back-off."""
    longest_delay: float = 60.0
    """Back-off between restarts: 0, 1, 2, 4 ... up to this; also after a lasting fetch failure."""
    fetch_again_after: float = 3.0
    """After a fetch that failed and may succeed."""
    stopped_delay: float = 1.0
    """After an exit that the supervisor did not order and that is not a crash.

    It is the time for the cause to be recorded.
    """


@dataclass(frozen=True)
class _OfWorker:
    worker_id: str
    """:attr:`Worker.id`."""


@dataclass(frozen=True)
class _OfCode:
    code_dir: str
    """:attr:`Work.code_dir`."""


# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Assigned:
    """Desired work of the slot; ``None``: no work."""

    work: Work | None
    lazy: bool = False
    """A process of the same topology may continue with other code.

    The wanted code is for its next start.
    """


class CodeReady(_OfCode):
    """The code is complete on this disk."""


@dataclass(frozen=True)
class CodeFailed(_OfCode):
    """The code could not be fetched. ``lasting``: an early retry would fail, too."""

    reason: str
    lasting: bool = False


@dataclass(frozen=True)
class Launched:
    """A process was started, or found at the supervisor's start (``beating``)."""

    worker: Worker
    beating: bool = False


@dataclass(frozen=True)
class LaunchFailed:
    """A ``Launch`` of that work failed. ``code_missing``: its code is no longer on the disk."""

    work: Work
    reason: str
    code_missing: bool = False


class Beat(_OfWorker):
    """The worker's heartbeat advanced."""


@dataclass(frozen=True)
class Exited(_OfWorker):
    """The process is dead.

    ``status`` is its exit code, or minus the signal's number, or ``None`` if unknown.
    """

    status: int | None


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = (
    "Assigned | CodeReady | CodeFailed | Launched | LaunchFailed | Beat | Exited | Tick"
)

# -- instructions ----------------------------------------------------------------------------------


class Fetch(_OfCode):
    """Fetch the code to this disk; answered by ``CodeReady`` or ``CodeFailed``."""


@dataclass(frozen=True)
class Launch:
    """Start a process; answered by ``Launched`` or ``LaunchFailed``."""

    work: Work


class Terminate(_OfWorker):
    """Ask the process to end (TERM)."""


class Kill(_OfWorker):
    """End the process and all its children (KILL)."""


class Clean(_OfWorker):
    """The process is dead: end its children, remove its folder."""


@dataclass(frozen=True)
class Report:
    """Error to report to the topology's owner."""

    topology_id: str
    text: str


Instruction: TypeAlias = "Fetch | Launch | Terminate | Kill | Clean | Report"


@dataclass(frozen=True)
class SupervisedSlot:
    """One slot of a supervisor: its desired work and its process."""

    port: int
    state: SlotState = "empty"
    wanted: Work | None = None
    lazy: bool = False
    """The wanted work need not replace a process of the same topology that runs other code."""
    worker: Worker | None = None
    """The last known process of the slot."""
    launching: bool = False
    """A ``Launch`` has no result yet."""
    fetching: str | None = None
    """Code whose ``Fetch`` has no result yet."""
    ready: str | None = None
    """Code that is known to be on this disk."""
    since: float = 0.0
    """Time at which this state was entered, or the process of this state was started."""
    beat_at: float = 0.0
    """Time at which the worker's heartbeat last advanced."""
    running_since: float | None = None
    """Time of the first beat of this process."""
    not_before: float = 0.0
    """No launch and no fetch before this time."""
    killed_at: float | None = None
    """Time at which KILL was last sent."""
    crashes: int = 0
    """Crashes in a row, none of them after a stable minute."""
    counted: Work | None = None
    """The work that an earlier supervisor process counted ``crashes`` for.

    It is set until the first work is wanted.
    """
    ran: Work | None = None
    """The work of the last process that beat here, while the same topology is wanted."""
    reason: str = ""
    """Reason, in words, why the wanted work does not run."""


# -- desired slots ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class DesiredSlots:
    """Desired work of each slot, and the slots assigned to several topologies."""

    work: Mapping[int, Work]
    """Port -> its work, of the ports that one topology is assigned to."""
    contested: Mapping[int, tuple[str, ...]]
    """Port -> topology ids, ascending.

    Such a slot keeps its process; no process is started there.
    """
    lazy: frozenset[int] = frozenset()
    """Ports whose process may continue with other code of the same topology.

    The work is for its next start.
    """
    workers: Mapping[tuple[str, int], WorkerSlot] = field(default_factory=dict)
    """(Topology id, port) -> the worker as its assignment places it."""


def desired_slots(
    assignments: Mapping[str, Assignment],
    supervisor_id: str,
    upgrades: Mapping[str, UpgradeState] | None = None,
) -> DesiredSlots:
    """Return the desired slots of ``supervisor_id``; both maps are by topology id.

    A topology without an entry in ``upgrades`` is not being upgraded.
    """
    desired: dict[int, set[Work]] = {}
    lazy: set[int] = set()
    workers: dict[tuple[str, int], WorkerSlot] = {}
    for topology_id, assignment in assignments.items():
        upgrade = (upgrades or {}).get(topology_id)
        for worker in assignment.workers:
            if worker.node != supervisor_id:
                continue
            code_dir, must_replace = code_for(worker, assignment, upgrade)
            work = Work(topology_id, code_dir, assignment.restarts)
            desired.setdefault(worker.port, set()).add(work)
            workers[topology_id, worker.port] = worker
            if not must_replace:
                lazy.add(worker.port)
    work_of: dict[int, Work] = {}
    contested: dict[int, tuple[str, ...]] = {}
    for port, works in desired.items():
        if len(works) == 1:
            work_of[port] = works.pop()
        else:
            contested[port] = tuple(sorted(work.topology_id for work in works))
    return DesiredSlots(
        work=work_of,
        contested=contested,
        lazy=frozenset(lazy & work_of.keys()),
        workers=workers,
    )


def check_ports(ports: tuple[int, ...]) -> str | None:
    """Reason why a supervisor cannot offer these slots, or ``None``."""
    if not ports:
        return "supervisor.slots.ports is empty: name at least one port"
    for port in ports:
        if not 1 <= port <= 65535:
            return f"supervisor.slots.ports holds {port}: ports are 1 to 65535"
    for port in sorted(ports):
        if ports.count(port) > 1:
            return f"supervisor.slots.ports names {port} twice: name each port once"
    return None
