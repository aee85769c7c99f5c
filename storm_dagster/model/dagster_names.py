"""Names under which Dagster shows one cluster: jobs, sensors, ops, groups, partitions, asset keys,
resource keys.

Both sides use them: the code location that holds the definitions, and nimbus, which launches by
name without importing Dagster. Failures of Dagster's own storage are told from others in its
responses here, too.
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
launched. A run with it executes the change, also of a verb that the leader executes: a leader of a
former release launched it.
"""

RECORDED_TAG = "storm/recorded"
"""Run tag of a change whose request has a record, which the run claims before it does anything. A
leader of a former release launches runs without it.
"""

DECLARED_VERSION_KEY = "declared.code.version"
"""Conf key of a declared topology: version of the code and conf that it was deployed from."""

PRIORITY_TAGS = {"dagster/priority": "100"}
"""Tags of runs that a caller waits for: they pass the other runs of a queue, whose priority is 0 by
default.
"""
HEALING_TAGS = {"dagster/priority": "1000"}
"""Tags of runs that heal: they pass all others."""
_UPKEEP_JOBS = ("clean_inbox", "prune_history")

_IDENTIFIER = re.compile(r"[A-Za-z0-9_]{1,60}")
TESTED_DAGSTER = "~=1.13.0"
"""Releases whose internals the guarded UI was tested with."""


def queue_tags(job: str) -> dict[str, str]:
    """Tags of all runs of our job with this plain name, whoever launches them: its place in a queue
    of runs.
    """
    return {} if job in _UPKEEP_JOBS else HEALING_TAGS if job == REASSIGN_JOB else PRIORITY_TAGS


@dataclass(frozen=True)
class DagsterNames:
    """Names of one cluster's definitions, unique among clusters of one Dagster instance.

    Without ``cluster`` they are the plain ones. With ``cluster="prod"`` jobs, sensors, schedules,
    ops and groups begin with ``prod_``, asset keys with ``prod``, and the dynamic partitions are
    the cluster's own. :class:`InvalidRequest` when either part is no Dagster identifier.
    """

    cluster: str | None = None
    resource_prefix: str = "storm_"
    """First part of resource keys; the cluster follows. Empty: plain keys, as ``zookeeper``."""

    def __post_init__(self) -> None:
        for what, text in (
            ("cluster", self.cluster),
            ("resource_prefix", self.resource_prefix or None),
        ):
            if text is not None and not (isinstance(text, str) and _IDENTIFIER.fullmatch(text)):
                raise InvalidRequest(
                    f"{what}={text!r:.80} cannot be part of Dagster's names: use 1 to 60 letters, digits and "
                    "underscores, for example 'prod'"
                )

    def name(self, base: str) -> str:
        """Name of a job, sensor, schedule, op or group."""
        return f"{self.cluster}_{base}" if self.cluster else base

    def asset_path(self, path: Iterable[str]) -> tuple[str, ...]:
        """Parts of an asset key."""
        return (self.cluster, *path) if self.cluster else tuple(path)

    def stage_op(self, stage: str) -> str:
        """Op of a stage of submissions: Dagster's own name for the op of its asset."""
        return "__".join(self.asset_path(("storm", stage)))

    def step_name(self, step: str) -> str:
        """The stage whose op ``step`` is; other steps as they are."""
        return step.removeprefix(self.stage_op(""))

    @property
    def partitions(self) -> str:
        """Name of the dynamic partitions, whose keys are names of topologies."""
        return self.name("storm_topologies")

    def resource(self, key: str) -> str:
        """Key of a resource."""
        return f"{self.resource_prefix}{self.name(key)}"


STORAGE_REMEDY = (
    "start the database that `storage` in dagster.yaml names (without one: fix the folder DAGSTER_HOME). "
    "Topologies run on meanwhile, and kill, activate and deactivate work"
)
_SIGNS = re.compile(
    r"sqlalchemy\.exc\.|psycopg2?\.|sqlite3\.|pymysql\.|\((?:psycopg2?|sqlite3|pymysql)[.\w]*\)|DagsterPostgresException"
    r"|DagsterMySQLException|(?:Operational|Interface|Database)Error"
)
_BACKGROUND = re.compile(r"\(Background on this error at: \S+\)|\[SQL:.*", re.S)
_LONGEST = 300


def storage_problem(answer: Any) -> str | None:
    """The database's words in an answer (or text) of Dagster; ``None`` when it is not about
    storage.
    """
    for text in _texts(answer):
        if _SIGNS.search(text):
            words = " ".join(_BACKGROUND.sub("", text).split())
            return words if len(words) <= _LONGEST else f"{words[:_LONGEST]}..."
    return None


def _texts(answer: Any) -> list[str]:
    """Every message in the response, the deepest causes last."""
    if isinstance(answer, str):
        return [answer]
    if isinstance(answer, list):
        return [text for part in answer for text in _texts(part)]
    if isinstance(answer, dict):
        return [
            text
            for key, part in answer.items()
            if key != "stack" and (isinstance(part, dict | list) or key in ("message", "className"))
            for text in _texts(part)
        ]
    return []
