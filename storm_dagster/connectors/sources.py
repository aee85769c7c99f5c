"""Sources of a :class:`SourceSpout`: their interface, also for other systems."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from storm_dagster.api.context import TopologyContext
from storm_dagster.connectors.tracking import PartitionEnd, SourceRecord


@dataclass(frozen=True)
class Lag:
    """Distance of a task from the end of a partition; ``None``: unknown."""

    records: int | None = None
    """Records behind the committed position."""
    secs: float | None = None
    """Age of the oldest of them; without it the spout uses the event times."""


class Source(Protocol):
    """Records that one task reads. Derive from it; the methods here have no effect.

    All calls come from one thread; each task has its own copy. An error of a method is reported, at
    most once a minute, and the call is repeated; after an error of :meth:`open` the task restarts.
    """

    assets: Sequence[str] = ()
    """Keys of the Dagster assets that it reads.

    They are upstream of the spout in the lineage of a declared topology.
    """
    blocking: ClassVar[bool] = True
    """True if calls may wait, for up to a second; the task then has a thread.

    If False, they are made on the worker's loop.
    """
    keeps_positions: ClassVar[bool] = False
    """True if the source stores positions itself.

    If False, they are kept with the component's state.
    """
    refresh_secs: ClassVar[float] = 10.0
    """Pause between two calls of :meth:`partitions`."""
    forget_secs: ClassVar[float] = 7 * 86400.0
    """Time without a partition after which its kept position is dropped."""

    def open(self, conf: Mapping[str, Any], context: TopologyContext) -> None:
        """Connect. ``conf`` is the component's, over the topology's."""

    def partitions(self) -> Collection[str] | None:
        """List all partitions, for all tasks.

        The task ``reader_of(name, tasks)`` reads a partition. ``None``: they are not known yet.
        Empty: the system distributes the records itself, and all tasks read.
        """
        return ()

    def assign(self, mine: Mapping[str, Any]) -> None:
        """Set the partitions to read: partition -> kept position, or ``None``.

        Called after each change of them.
        """

    def read(
        self, most: int, full: Collection[str]
    ) -> Sequence[SourceRecord | PartitionEnd | Exception]:
        """Read the next records, about ``most``, of partitions that are not ``full``.

        Exceptions among them are reported.
        """
        ...

    def recreated(self) -> Collection[str]:
        """Partitions that were deleted and recreated since the last call.

        Records that were read from them before are dropped: their acks do not commit a position.
        Called before each :meth:`read` and :meth:`commit`; it must not wait.
        """
        return ()

    def commit(self, after: Mapping[str, Any]) -> None:
        """Commit changed positions: partition -> position before which all is finished.

        Called about once a second, perhaps with an empty map, and only if the source keeps
        positions. It need not wait until they are stored.
        """

    def ack(self, handles: Sequence[Any]) -> None:
        """Ack records of a queue, which are finished."""

    def nack(self, handles: Sequence[Any]) -> None:
        """Return records of a queue that this task will not finish."""

    def lag(self) -> Mapping[str, Lag]:
        """Lag by partition, from known values: this must not wait."""
        return {}

    def close(self) -> None:
        """Store the committed positions, and disconnect."""
