"""Record of an operation under way, ``/operations/<request>``."""

from typing import Any

from storm_dagster.model.records import Record


class OperationRecord(Record):
    """Record of an accepted change of a running topology that a Dagster run executes.

    The leader writes ``/operations/<request>`` before it launches the run, whose tag
    ``storm/request`` is the same request; the run, or the leader, deletes it when the run has
    ended. Updates have a :class:`TokenRecord` instead.
    """

    topology_id: str
    name: str
    verb: str
    epoch: int
    started_secs: int
    """When it was accepted, epoch seconds."""
    user: str = ""
    """User who asked for it; empty: the cluster does not ask who its users are."""
    request: dict[str, Any] = {}
    """Fields of the request."""
    is_abandoned: bool = False
    """The caller was told to repeat the request, so that no leader launches its run."""
    run_id: str = ""
    """The run, once it is launched."""
