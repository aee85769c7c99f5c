"""The verbs that change topologies: one row of a table each.

HTTP routes and ``/openapi.json``, jobs of Dagster, commands, functions of the client and the table
of ``docs/http.md`` are made of these rows. The function of a verb is in the table ``OPERATIONS`` of
:mod:`storm_dagster.operations.live.lifecycle`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from storm_dagster.model.requests import (
    CodeRequest,
    GrayUpgradeRequest,
    KillRequest,
    RebalanceRequest,
    UpdateRequest,
    VerbRequest,
)

StatusEvent = Literal[
    "activate",
    "deactivate",
    "drain",
    "kill",
    "rebalance",
    "finish_rebalance",
    "upgrade",
    "end_upgrade",
    "rollback",
]
"""Event that may change the status of a topology; :mod:`storm_dagster.core.transitions` has the
next status of each.
"""

Precheck = Literal[
    "offered_host",
    "uploaded_code",
    "upgrade_batch",
    "upgrade_to_complete",
    "upgrade_to_roll_back",
]
"""Check by the leader before it launches a run, in ``nimbus/requests/lifecycle.py``.

``offered_host``: a supervisor offers slots. ``uploaded_code``: the request names an upload.
``upgrade_batch``: the selected workers can be upgraded. The other two: an upgrade is under way, and
its phase allows to complete it or to roll it back.
"""

RunEffect = Literal[
    "executed",
    "removed",
    "restarted",
    "replaced",
    "batch_upgraded",
    "upgrade_completed",
    "rolled_back",
]
"""Effect that the Dagster run of a verb waits for; ``defs/lifecycle/jobs.py`` has one function for
each. ``executed``: the run ends when the verb was executed.
"""


@dataclass(frozen=True)
class Verb:
    """One verb that changes a topology."""

    name: str
    summary: str
    """Its effect, first sentence first: help, description of the job, documentation."""
    request: type[VerbRequest] = VerbRequest
    executed_by: Literal["leader", "run"] = "run"
    """``leader``: one transaction of the leader, which Dagster is notified of. ``run``: a Dagster
    run.
    """
    until: tuple[str | None, ...] = ()
    """Statuses that a client waits for after the run; ``None``: the topology is gone."""
    tasks: bool = False
    """True if the client also waits until all tasks run."""
    batches: bool = False
    """True if its run watches workers change their code, for a time that its config limits."""
    event: StatusEvent | None = None
    """Event that the topology's status must allow, before a run is launched."""
    precheck: Precheck | None = None
    """Further check before a run is launched."""
    effect: RunEffect = "executed"
    """Effect that its run waits for."""
    places_tasks: bool = False
    """True if its run materializes ``storm/assignment`` for the partition of the topology, instead
    of its own job. A dry run then returns the plan.
    """
    has_token_record: bool = False
    """True if the client token has the record of the change, as that of a submission: a repetition
    with the token then returns the first run, also after its end. Another verb has a record for
    each request, which its run claims.
    """
    action: str = ""
    """JStorm's name of the verb for the listener of actions on topologies; Storm's ``deactivate``
    instead of JStorm's ``inactivate``.
    """
    doing: str = ""
    """The verb under way in one word, such as "updating"; empty: its name."""
    step: str = "workers"
    """Step of the verb while its run executes, where ``steps_by_status`` has none."""
    steps_by_status: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Status of the topology -> step of the verb while its run executes."""
    place_on_page: int | None = None
    """Place among the verbs of a topology's page, 1 first; ``None``: not on the page."""
    usage: str = "{verb} {name}"
    """Arguments of the command that the page shows."""

    @property
    def job(self) -> str:
        """Name of its Dagster job."""
        return f"{self.name.replace('-', '_')}_topology"

    @property
    def brings_code(self) -> bool:
        """True if it takes a TARGET, which clients upload."""
        return issubclass(self.request, CodeRequest)

    def command(self, topology: str) -> str:
        """Command line that executes the verb for the topology."""
        return "storm-dagster " + self.usage.format(verb=self.name, name=topology)


_ROWS: tuple[Verb, ...] = (
    Verb(
        name="activate",
        summary="Start the spouts of a topology.",
        executed_by="leader",
        until=("ACTIVE",),
        event="activate",
        action="activate",
        place_on_page=1,
    ),
    Verb(
        name="deactivate",
        summary="Stop the spouts of a topology. Tuples in flight finish; its workers stay.",
        executed_by="leader",
        until=("INACTIVE",),
        event="deactivate",
        action="deactivate",
        place_on_page=2,
    ),
    Verb(
        name="kill",
        summary=(
            "Kill a topology. Its spouts stop, and after the wait its workers, state and code"
            " are removed. A submission under way is cancelled."
        ),
        request=KillRequest,
        executed_by="leader",
        until=(None,),
        event="kill",
        effect="removed",
        action="killTopology",
        place_on_page=7,
    ),
    Verb(
        name="restart",
        summary="Restart the workers of a topology. Its id, slots, code and conf stay the same.",
        until=("ACTIVE", "INACTIVE"),
        tasks=True,
        effect="restarted",
        action="restart",
        doing="restarting",
        place_on_page=4,
    ),
    Verb(
        name="rebalance",
        summary="Change parallelism or spread of a topology while it runs.",
        request=RebalanceRequest,
        until=("ACTIVE", "INACTIVE"),
        tasks=True,
        event="rebalance",
        precheck="offered_host",
        places_tasks=True,
        action="rebalance",
        doing="rebalancing",
        step="assignment",
        steps_by_status={"REBALANCING": "delay"},
        place_on_page=3,
        usage="{verb} {name} -n WORKERS -e COMPONENT=N",
    ),
    Verb(
        name="update",
        summary=(
            "Replace a topology's code (hot deploy). The old code runs until the new code is ready."
        ),
        request=UpdateRequest,
        tasks=True,
        precheck="uploaded_code",
        effect="replaced",
        has_token_record=True,
        action="updateTopology",
        doing="updating",
        place_on_page=5,
        usage="{verb} {name} TARGET",
    ),
    Verb(
        name="gray-upgrade",
        summary=(
            "Upgrade some workers of a topology to new code first. Without new code, upgrade the "
            "next"
            " workers."
        ),
        request=GrayUpgradeRequest,
        batches=True,
        precheck="upgrade_batch",
        effect="batch_upgraded",
        action="grayUpgrade",
        doing="upgrading",
        step="topology_code",
        steps_by_status={"UPGRADING": "workers"},
        place_on_page=6,
    ),
    Verb(
        name="complete-upgrade",
        summary=(
            "Complete a gray upgrade at its current state. The other workers get the new code at"
            " their next start."
        ),
        executed_by="leader",
        until=("ACTIVE", "INACTIVE", "KILLED", "REBALANCING", None),
        precheck="upgrade_to_complete",
        effect="upgrade_completed",
        action="completeUpgrade",
    ),
    Verb(
        name="rollback",
        summary="Undo a gray upgrade. Every upgraded worker returns to the former code.",
        executed_by="leader",
        until=("ACTIVE", "INACTIVE", "KILLED", "REBALANCING", None),
        batches=True,
        precheck="upgrade_to_roll_back",
        effect="rolled_back",
        action="rollbackTopology",
    ),
)

VERBS: Mapping[str, Verb] = {row.name: row for row in _ROWS}
"""Name -> verb, in the order in which lists show them."""


def verbs_of_page() -> list[Verb]:
    """The verbs that the page of a topology shows, in its order."""
    verbs = [verb for verb in VERBS.values() if verb.place_on_page is not None]
    return sorted(verbs, key=lambda verb: verb.place_on_page or 0)
