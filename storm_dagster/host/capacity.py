"""CPU and memory that a supervisor offers: of its conf, or all that its process may use."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storm_dagster.host.machine_size import Size, cpus, memory_bytes
from storm_dagster.model.conf import ClusterConf

_log = logging.getLogger(__name__)

CPU_KEY = "supervisor.cpu.capacity"
MEMORY_KEY = "supervisor.memory.capacity.mb"
_MIB = 2**20


@dataclass(frozen=True)
class Capacity:
    """CPU and memory of one supervisor, and where the two numbers come from."""

    cpu: int
    """Percent points of one core."""
    cpu_source: str
    """A conf key, ``the machine``, or a limit of the process."""
    memory_mb: int
    memory_source: str
    problems: tuple[str, ...] = ()
    """A sentence, with a remedy, for each limit that is unreadable or too low."""

    @staticmethod
    def of(conf: Mapping[str, Any]) -> "Capacity":
        """Read ``supervisor.cpu.capacity`` and ``supervisor.memory.capacity.mb``.

        A key that is null stands for all that this process may use.
        """
        own_cpus = cpus()
        own_memory = memory_bytes()
        problems = [
            f"{problem}; set {key}"
            for problem, key in ((own_cpus.problem, CPU_KEY), (own_memory.problem, MEMORY_KEY))
            if problem and conf[key] is None
        ]
        problems += memory_problems(conf, own_memory)
        cpu = conf[CPU_KEY]
        memory_mb = conf[MEMORY_KEY]
        return Capacity(
            # Less than 1 would mean that it is not stated.
            cpu=max(1, round(own_cpus.amount * 100)) if cpu is None else cpu,
            cpu_source=own_cpus.source if cpu is None else CPU_KEY,
            memory_mb=int(own_memory.amount / _MIB) if memory_mb is None else memory_mb,
            memory_source=own_memory.source if memory_mb is None else MEMORY_KEY,
            problems=tuple(problems),
        )

    @property
    def text(self) -> str:
        """Both numbers with their sources, for a log line or a table."""
        return (
            f"CPU {self.cpu} % of a core ({self.cpu_source}), memory {self.memory_mb} MiB "
            f"({self.memory_source})"
        )


def memory_problems(conf: Mapping[str, Any], memory: Size) -> list[str]:
    """Sentences on slots that need more memory than a limit of this process.

    ``worker.memory.size`` is what one slot needs. All slots together are compared only with
    ``supervisor.worker.memory.enforce``: otherwise the size is a label that workers need not fill.
    """
    if not memory.is_limited:
        return []
    size = int(conf["worker.memory.size"])
    slots = len(conf["supervisor.slots.ports"])
    limit_text = f"{memory.amount / _MIB:.0f} MiB ({memory.source})"
    remedy = "lower worker.memory.size or supervisor.slots.ports, or raise the limit"
    if memory.amount < size:
        return [
            f"the memory limit of {limit_text} is less than one worker needs, {size / _MIB:.0f} MiB"
            f" (worker.memory.size): the kernel may end a worker, or all of them, before it has "
            f"its size; {remedy}"
        ]
    if conf["supervisor.worker.memory.enforce"] and memory.amount < slots * size:
        return [
            f"the memory limit of {limit_text} is less than {slots} slots need, "
            f"{slots * size / _MIB:.0f} MiB: the kernel may end all workers at once before one has "
            f"its size; {remedy}"
        ]
    return []


def load_capacity(conf: ClusterConf) -> Capacity:
    """Read the capacity of this supervisor, and log it with its sources."""
    capacity = Capacity.of(conf.values)
    _log.info("this supervisor offers %s", capacity.text)
    for problem in capacity.problems:
        _log.warning("%s", problem)
    return capacity
