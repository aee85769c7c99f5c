"""Records of operations under way: ``/tokens/<token>`` and ``/operations/<request>``."""

from typing import Any, Literal

from storm_dagster.model.records import Record


class TokenRecord(Record):
    """Record of one submission or update: the topology id that its client token got.

    The leader writes it when it accepts the request, before it launches the run. A later leader
    finds by it that a run may exist.
    """

    topology_id: str
    name: str
    epoch: int
    published: bool = False
    """Set by the transaction that publishes: a late repetition never brings a killed topology
    back.
    """
    verb: Literal["submit", "update"] = "submit"
    started_secs: int = 0
    """When it was accepted, epoch seconds; 0: a former release wrote the record."""
    request: dict[str, Any] = {}
    """Fields of the request, with which a leader launches the run when there is none. Empty: no
    leader does, because the caller was told to repeat the request, or a run wrote the record.
    """
    user: str = ""
    """User who asked for it; empty: the cluster does not ask who its users are."""
    ended: bool = False
    """Its run ended without a published topology. A repetition with the token begins again."""


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
