"""Limits of silence from which tasks, workers and hosts count as dead."""

from dataclasses import dataclass, field

from storm_dagster.core.usable_slots import UserBounds
from storm_dagster.model.conf import Conf


@dataclass(frozen=True)
class LivenessLimits:
    """Limits, in seconds of silence if not stated otherwise."""

    task_secs: float = 30
    """Of a topology master, of a worker that ran, and of a host."""
    launch_secs: float = 120
    """Of a worker that starts or restarts; also the longest freeze after a mass loss."""
    supervisor_secs: float = 30
    """Of a registered supervisor, until it gets no new work."""
    mass_loss_percent: float = 30
    """Share of lost workers, in percent, above which healing is frozen."""
    window_secs: float = 0
    """Maximum time between losses of one fault.

    ZooKeeper ends sessions in buckets, and clients reconnect late.
    """
    users: UserBounds = field(default_factory=UserBounds)
    """Bounds of what the topologies of one user may hold."""

    @staticmethod
    def from_conf(conf: Conf) -> "LivenessLimits":
        """Read the limits from a cluster conf."""
        return LivenessLimits(
            task_secs=conf.get("nimbus.task.timeout.secs", 30),
            launch_secs=conf.get("nimbus.task.launch.secs", 120),
            supervisor_secs=conf.get("nimbus.supervisor.timeout.secs", 30),
            mass_loss_percent=conf.get("nimbus.mass.loss.percent", 30),
            # Twice the session timeout, which is in milliseconds.
            window_secs=conf.get("storm.zookeeper.session.timeout", 4000) / 500,
            users=UserBounds.from_conf(conf),
        )
