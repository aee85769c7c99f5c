"""Records of open operations, below ``/tokens`` and ``/operations``."""

from typing import Any, Literal

from storm_dagster.model.records import Record


class TokenRecord(Record):
    """Record of one submission or update, with the topology id of its token.

    The leader writes it when it accepts the request, before it launches the run. A later leader
    finds by it that a run may exist.
    """

    topology_id: str
    name: str
    epoch: int
    published: bool = False
    """Set by the transaction that publishes, so that a late repetition does not submit a killed
    topology a second time.
    """
    verb: Literal["submit", "update"] = "submit"
    started_secs: int = 0
    """Epoch seconds of its acceptance; 0: an earlier release wrote the record."""
    request: dict[str, Any] = {}
    """Fields of the request, with which a leader launches the run if there is none. Empty: no
    leader launches it, because the error told the caller to repeat the request, or a run wrote the
    record.
    """
    user: str = ""
    """User of the request; empty in a cluster without authentication."""
    ended: bool = False
    """Its run ended without a published topology. A repetition with the token starts a new run."""
    run: str = ""
    """Id of the Dagster run that took it over when the leader changed; no other run may publish
    it. Empty: the leader did not change.
    """
    cancelled_by: str = ""
    """Verb that cancelled the submission, ``kill``; empty for any other record.

    Such a record is ``published`` as well, although no topology was: a run or a leader of a former
    release, which does not know this field, then refuses to publish it or to launch it.
    """


class OperationRecord(Record):
    """Record of an accepted change that a Dagster run executes.

    The leader writes ``/operations/<request>`` before it launches the run, whose tag
    ``storm/request`` is the same request; the run, or the leader, deletes it when the run has
    ended. Updates have a :class:`TokenRecord` instead.
    """

    topology_id: str
    name: str
    verb: str
    epoch: int
    started_secs: int
    """Epoch seconds of its acceptance."""
    user: str = ""
    """User of the request; empty in a cluster without authentication."""
    request: dict[str, Any] = {}
    """Fields of the request."""
    is_abandoned: bool = False
    """True if the error told the caller to repeat the request: no leader then launches its run."""
    run_id: str = ""
    """Id of the run, once it is launched."""
