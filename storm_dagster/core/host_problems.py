"""Problems of hosts: disks that are nearly full, and clocks that differ. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from storm_dagster.model.amounts import duration
from storm_dagster.model.records import SupervisorInfo

FULL_MB = 512
"""Free room in MiB below which a disk counts as full."""
NEARLY_FULL_MB = 3072
"""Free room in MiB below which a disk is nearly full."""
CLOCK_SECS = 5.0
"""Difference of two clocks up to which they count as equal, seconds."""

Severity = Literal["broken", "warning"]


class ClusterProblem(NamedTuple):
    """A problem of the cluster, with its remedy."""

    severity: Severity
    subject: str
    """Kind and name of the thing: ``topology wc``, ``supervisor s1``, ``nimbus n1:6627``."""
    text: str
    """Sentence that names the subject."""
    remedy: str

    def to_document(self) -> dict[str, str]:
        """An entry of ``problems`` in ``GET /v1/problems``."""
        return dict(self._asdict())


def disk_severity(free_mb: int | None) -> Severity | None:
    """Severity of a disk with so much free room, in MiB.

    ``None`` if it has room enough, or if its room is not known.
    """
    if free_mb is None or free_mb >= NEARLY_FULL_MB:
        return None
    return "broken" if free_mb < FULL_MB else "warning"


def _disk_problem(subject: str, host: str, free_mb: int | None) -> ClusterProblem | None:
    severity = disk_severity(free_mb)
    if severity is None or free_mb is None:
        return None
    word = "full" if severity == "broken" else "nearly full"
    text = f"the disk of {subject} on {host} is {word}: {free_mb / 1024:.1f} GiB are free"
    return ClusterProblem(severity, subject, text, f"free space below storm.local.dir on {host}")


def clock_problem(subject: str, host: str, ahead_secs: float | None) -> ClusterProblem | None:
    """The problem of a clock that is so far ahead of the leader's; negative: behind it.

    ``None`` if they agree, or if the difference is not known.
    """
    if ahead_secs is None or abs(ahead_secs) <= CLOCK_SECS:
        return None
    side = "ahead of" if ahead_secs > 0 else "behind"
    text = f"the clock of {subject} on {host} is {duration(abs(ahead_secs))} {side} the leader's"
    remedy = f"set the time of {host}: timedatectl set-ntp true"
    return ClusterProblem("warning", subject, text, remedy)


def supervisor_problems(supervisors: Mapping[str, SupervisorInfo]) -> Iterator[ClusterProblem]:
    """Problems of the hosts of supervisors, by id; supervisors that measured none have none."""
    for supervisor_id, info in sorted(supervisors.items()):
        subject = f"supervisor {supervisor_id}"
        disk = _disk_problem(subject, info.host, info.disk_free_mb)
        if disk is not None:
            yield disk
        clock = clock_problem(subject, info.host, info.clock_ahead_secs)
        if clock is not None:
            yield clock


def nimbus_problems(nimbuses: Iterable[Mapping[str, Any]]) -> Iterator[ClusterProblem]:
    """Problems of the hosts of nimbuses.

    Each entry has ``address``, ``host``, ``disk_free_mb`` and ``clock_ahead_secs``.
    """
    for nimbus in nimbuses:
        subject = f"nimbus {nimbus['address']}"
        disk = _disk_problem(subject, nimbus["host"], nimbus.get("disk_free_mb"))
        if disk is not None:
            yield disk
        clock = clock_problem(subject, nimbus["host"], nimbus.get("clock_ahead_secs"))
        if clock is not None:
            yield clock
