"""Names of one cluster in Dagster, such as those of jobs and assets.

Both sides use them: the code location that holds the definitions, and nimbus, which launches by
name without importing Dagster. :func:`storage_problem` recognizes failures of Dagster's storage in
its responses.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from storm_dagster.model.errors import InvalidRequest

SUBMIT_JOB = "submit_topology"
REBALANCE_JOB = "rebalance_topology"
REASSIGN_JOB = "reassign_topologies"

STAGES = (
    "topology_conf",
    "topology_code",
    "task_info",
    "assignment",
    "published_assignment",
    "active_topology",
)
"""Steps of a submission, in order: asset keys below ``storm``."""

TOKEN_TAG = "storm/token"
"""Run tag: the client token of the submission that the run belongs to."""

REQUEST_TAG = "storm/request"
"""Run tag: the request of a change of a topology, by which the leader finds the run that it
launched. A run with it executes the change, also of a verb that the leader executes: a leader of an
earlier release launched it.
"""

RECORDED_TAG = "storm/recorded"
"""Run tag of a change whose request has a record, which the run claims first. A leader of a former
release launches runs without it.
"""

DECLARED_VERSION_KEY = "declared.code.version"
"""Conf key of a declared topology: version of the code and conf that it was deployed from."""

DECLARED_OWNER_KEY = "declared.owner"
"""Conf key of a declared topology: project and deployment that deploy it and get its events.

Without it the topology has no owner yet.
"""

SCHEDULED_TAG = "storm/scheduled"
"""Tag of a run of `rebalance_topology` that a schedule asked for.

The run moves tasks only if the topology is still steady when it begins.
"""
PRIORITY_TAGS = {"dagster/priority": "100"}
"""Tags of runs that a caller waits for: they pass the other runs of a queue, whose priority is 0 by
default.
"""
HEALING_TAGS = {"dagster/priority": "1000"}
"""Tags of runs that heal: they pass all others."""
# Jobs whose runs no caller waits for: they have the default priority.
_UPKEEP_JOBS = ("clean_inbox", "prune_history")

# Text that may be part of Dagster's names.
_IDENTIFIER = re.compile(r"[A-Za-z0-9_]{1,60}")
TESTED_DAGSTER = "~=1.13.0"
"""Releases whose internals the guarded UI was tested with."""


def queue_tags(job: str) -> dict[str, str]:
    """Tags of all runs of the job with this plain name.

    They give a run its place in a queue.
    """
    if job in _UPKEEP_JOBS:
        return {}
    if job == REASSIGN_JOB:
        return HEALING_TAGS
    return PRIORITY_TAGS


@dataclass(frozen=True)
class DagsterNames:
    """Names of one cluster's definitions, unique in one Dagster instance.

    Without ``cluster`` they are plain. With ``cluster="prod"`` the names of jobs, sensors,
    schedules, ops, groups and dynamic partitions begin with ``prod_``, and asset keys with
    ``prod``. :class:`InvalidRequest` if a part is not a Dagster identifier.
    """

    cluster: str | None = None
    resource_prefix: str = "storm_"
    """First part of resource keys; the cluster follows. Empty: plain keys, as ``zookeeper``."""

    def __post_init__(self) -> None:
        parts = {"cluster": self.cluster, "resource_prefix": self.resource_prefix or None}
        for field, text in parts.items():
            if text is not None and not (isinstance(text, str) and _IDENTIFIER.fullmatch(text)):
                raise InvalidRequest(
                    f"{field}={text!r:.80} cannot be part of Dagster's names: use 1 to 60 letters,"
                    " digits and underscores, for example 'prod'"
                )

    def name(self, base: str) -> str:
        """Name of a job, sensor, schedule, op or group."""
        return f"{self.cluster}_{base}" if self.cluster else base

    def asset_path(self, path: Iterable[str]) -> tuple[str, ...]:
        """Parts of an asset key."""
        return (self.cluster, *path) if self.cluster else tuple(path)

    def stage_op(self, stage: str) -> str:
        """Op of a stage of submissions, by Dagster's name of an asset's op."""
        return "__".join(self.asset_path(("storm", stage)))

    def step_name(self, step: str) -> str:
        """The stage of an op; other steps unchanged."""
        return step.removeprefix(self.stage_op(""))

    @property
    def partitions(self) -> str:
        """Name of the partitions, whose keys are names of topologies."""
        return self.name("storm_topologies")

    def resource(self, key: str) -> str:
        """Key of a resource."""
        return f"{self.resource_prefix}{self.name(key)}"


# For errors of Dagster's storage.
STORAGE_REMEDY = (
    "start the database that `storage` in dagster.yaml names (without one: fix the folder "
    "DAGSTER_HOME). "
    "Until then topologies keep running, and kill, activate and deactivate work"
)
# Parts of the messages of SQLAlchemy, of databases' drivers, and of Dagster's storage.
_SIGNS = re.compile(
    r"sqlalchemy\.exc\.|psycopg2?\.|sqlite3\.|pymysql\."
    r"|\((?:psycopg2?|sqlite3|pymysql)[.\w]*\)|DagsterPostgresException"
    r"|DagsterMySQLException|(?:Operational|Interface|Database)Error"
)
# Parts of SQLAlchemy's messages that say nothing about the problem: a link, and the statement.
_BACKGROUND = re.compile(r"\(Background on this error at: \S+\)|\[SQL:.*", re.S)
_MAX_CHARACTERS = 300
"""Length of the message that is shown."""


def storage_problem(response: Any) -> str | None:
    """The database's message in a response of Dagster.

    ``None`` if it is not about storage.
    """
    for text in _texts(response):
        if _SIGNS.search(text):
            words = " ".join(_BACKGROUND.sub("", text).split())
            if len(words) <= _MAX_CHARACTERS:
                return words
            return f"{words[:_MAX_CHARACTERS]}..."
    return None


def _texts(response: Any) -> list[str]:
    """Every message in the response, the deepest causes last."""
    if isinstance(response, str):
        return [response]
    texts: list[str] = []
    if isinstance(response, list):
        for part in response:
            texts += _texts(part)
    elif isinstance(response, dict):
        for key, part in response.items():
            if key == "stack":
                continue
            if isinstance(part, dict | list) or key in ("message", "className"):
                texts += _texts(part)
    return texts
