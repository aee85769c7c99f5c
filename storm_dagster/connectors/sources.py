"""Sources, which a :class:`SourceSpout` reads: the protocol for another system."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from storm_dagster.api.context import TopologyContext
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord


@dataclass(frozen=True)
class Lag:
    """Lag of a task in a partition; ``None`` is unknown."""

    records: int | None = None
    """Number of records behind the committed position."""
    secs: float | None = None
    """Age of the oldest of them. Without it the spout computes it from the event times."""


class LostPosition(Exception):
    """A stored position that is of another partition than the one that has its name now."""


class SourceRecovered(Exception):
    """Returned by ``Source.read``: the system that an earlier error named answers again."""


class Source(Protocol):
    """Source of the records of one task.

    Derive from it: methods that you do not define have no effect. All calls come from one thread,
    to the task's own copy. An error of a method is reported, at most once a minute, and the call
    repeated; after an error of :meth:`open` the task restarts. From an error of :meth:`partitions`,
    :meth:`read`, :meth:`commit` or :meth:`ack` until the same call returns, the system is away: the
    metric ``what it waits for`` names it, and the errors show begin and end, each once.
    """

    system: str = ""
    """Name of the system for readers, without passwords; by default that of the class."""

    assets: Sequence[str] = ()
    """Keys of the Dagster assets that it reads.

    They are upstream of the spout in the lineage of a declared topology.
    """
    blocking: ClassVar[bool] = True
    """True if calls may wait, for up to a second; the task then has a thread.

    If not, calls are made on the worker's loop.
    """
    keeps_positions: ClassVar[bool] = False
    """True if the source stores positions itself.

    If not, they are stored with the component's state.
    """
    refresh_secs: ClassVar[float] = 10.0
    """Pause between two calls of :meth:`partitions`."""
    forget_secs: ClassVar[float] = 7 * 86400.0
    """Time without a partition after which its stored position is dropped."""

    def open(self, conf: Mapping[str, Any], context: TopologyContext) -> None:
        """Connect. ``conf`` is the topology's conf, overridden by the component's."""

    def partitions(self) -> Collection[str] | None:
        """All partitions, of all tasks.

        The task of ``reader_of(name, tasks)`` reads each. ``None``: not known yet. Empty: the
        system distributes the records itself, and all tasks read.
        """
        return ()

    def identity(self, partition: str) -> Any:
        """Identity of a partition that is read: a JSON value that another one of its name lacks.

        Such as the id of a table. It is stored beside the position, unless the source keeps
        positions itself. ``None``: unknown.
        """
        return None

    def resume(self, partition: str, position: Any, identity: Any) -> Any:
        """Position to read from, by the stored position and identity; ``None``: the beginning.

        Called before :meth:`assign`. ``identity`` is ``None`` if it is unknown, such as that of a
        position that an earlier release has stored. By default the position counts, unless the
        partition has another identity now: then :class:`LostPosition` is raised, which is reported,
        and the position is ``None``.
        """
        current = self.identity(partition)
        if identity is None or current is None or current == identity:
            return position
        raise LostPosition(
            f"partition {partition} is read from its beginning: its position {position!r} is of "
            f"the one with the identity {identity!r}, and it has {current!r} now"
        )

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Read these partitions: partition -> stored position, or ``None``.

        Called whenever they change.
        """

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """The next records, about ``most``, of partitions that are not ``full``.

        Full are the partitions of which the spout has enough pending records. Exceptions among the
        records are reported: :class:`SystemUnavailable` begins an outage, as if it were raised, and
        :class:`SourceRecovered` ends it.
        """
        ...

    def recreated(self) -> Collection[str]:
        """Partitions that were deleted and recreated since the last call.

        Records that were read of them before are dropped: their acks commit no position. Called
        before each :meth:`read` and :meth:`commit`; this must not wait.
        """
        return ()

    def commit(self, after: Mapping[str, Any]) -> None:
        """Store changed positions: partition -> position before which all is finished.

        Called about once a second, also without changes, if the source keeps positions. It need not
        wait until they are stored.
        """

    def ack(self, handles: Sequence[Any]) -> None:
        """Ack finished records of a queue."""

    def nack(self, handles: Sequence[Any]) -> None:
        """Return records of a queue that this task will not finish."""

    def lag(self) -> Mapping[str, Lag]:
        """Lag by partition, if it is known without a request: this must not wait."""
        return {}

    def close(self) -> None:
        """Store the committed positions, and disconnect."""
