"""Record ``/unreported``: changes that Dagster does not have yet.

The leader writes it, and ``lifecycle_sensor`` reads which topologies were removed.
"""

from pydantic import Field

from storm_dagster.model.records import Record


class UnreportedEvent(Record):
    """A change without a Dagster run."""

    asset: tuple[str, ...]
    partition: str
    description: str
    gone: bool = False
    """True if the topology was removed."""
    metadata: dict[str, str] = {}
    """Metadata of an observation; empty: the event is a materialization."""


class UnreportedEvents(Record):
    """Content of ``/unreported``; each list holds its newest entries."""

    events: tuple[UnreportedEvent, ...] = Field(default=(), alias="deeds")
    requests: tuple[str, ...] = ()
    """Requests that a leader of an earlier release executed itself while Dagster was late. A run of
    such a request, with the request as its tag ``storm/request``, makes no change. This release
    only keeps them.
    """
    removed: tuple[str, ...] = ()
    """Ids of topologies that the leader removed. ``lifecycle_sensor`` removes the partition keys
    of their names.
    """
