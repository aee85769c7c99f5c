"""Documents under ``/v1``. Clients rely on these keys; newer versions may add others, except to closed documents."""

from __future__ import annotations

from typing import Any, Literal

from storm_dagster.core.diagnosis import FindingKind
from storm_dagster.http.schemas import Natural, document, types_of

_TYPES = types_of(
    {
        str: "id name address version component node host error token stream cluster_id text remedy",
        str | None: "leader_http run_id next raw",
        bool: "leader degraded healer blacklisted",
        int: "task port time count number failed_task tries first_ms last_ms replayed_ms executors",
        int | None: "epoch missing pid",
        Natural: "uptime_secs workers not_running waiting back_pressure",
        float: "capacity",
        float | None: "lag",
        list[int]: "tasks ports used",
        list[str]: "problems hosts",
        dict[str, str]: "corrupt",
        dict[str, float]: "stats",
        dict[str, dict[str, float]]: "latency",
        dict[str, dict[str, dict[str, float]]]: "stream_latency",
        Literal["ACTIVE", "INACTIVE", "KILLED", "REBALANCING", "UPGRADING", "ROLLBACK"]: "status",
        Literal["spout", "bolt"]: "type",
    }
)


def _document(name: str, doc: str, keys: str, extra: Any = None, *, optional: Any = "", **others: Any) -> Any:
    return document(name, keys, _TYPES, others, doc=doc, extra=extra, optional=optional)


HealthDocument = _document(
    "HealthDocument",
    "Health of one nimbus.",
    "leader leader_http epoch id address version missing",
    status=Literal["ok", "degraded", "no leader", "no connection to ZooKeeper"],
    cluster_id=str | None,
    uptime_secs=int,
)
SubmittedDocument = _document("SubmittedDocument", "Run that submits.", "run_id token")
RunDocument = _document("RunDocument", "A run of Dagster.", "", status=str)
_ListRow = _document(
    "ListRow",
    "One topology in a list.",
    "id name status uptime_secs workers not_running degraded",
    "ignore",
    executors=Natural,
    tasks=Natural,
)
ListDocument = _document("ListDocument", "All topologies.", "", "forbid", topologies=list[_ListRow])
_ShowWorker = _document(
    "ShowWorker", "A worker of a topology.", "node host port pid tasks uptime_secs", version=str | None
)
_SLOT = {"node": str | None, "host": str | None, "port": int | None}
_ShowTask = _document(
    "ShowTask",
    "A task of a topology; without a slot while it waits for one.",
    "component uptime_secs stats",
    id=int,
    status=Literal["starting", "running", "dead", "unassigned"],
    **_SLOT,
)
_ShowComponent = _document(
    "ShowComponent",
    "A component with its statistics of all time; ``latency`` and ``stream_latency`` are of the last ten minutes.",
    "type executors tasks stats waiting capacity lag latency stream_latency",
)
_ShowError = _document(
    "ShowError",
    "An error that a task reported ``count`` times; ``time`` of the last one in epoch seconds.",
    "component task host port time error count",
)
_ShowFinding = _document(
    "ShowFinding",
    "What is slow or goes wrong, and what to do; ``component`` is empty for the topology as a whole.",
    "component text remedy",
    kind=FindingKind,
    severity=Literal["warning", "note"],
)
ShowDocument = _document(
    "ShowDocument",
    "One topology with its tasks, workers, statistics and errors; ``back_pressure`` counts the workers that hold\n"
    "its spouts back.",
    "id name status uptime_secs back_pressure problems",
    findings=list[_ShowFinding],
    workers=list[_ShowWorker],
    tasks=list[_ShowTask],
    components=dict[str, _ShowComponent],
    errors=list[_ShowError],
)
_StateEntry = _document("StateEntry", "A key of a task's state.", "task", "ignore")
StateDocument = _document(
    "StateDocument",
    "A page of keyed state; ``next`` begins the page after it.",
    "id component next",
    "forbid",
    entries=list[_StateEntry],
)
_DeadLetter = _document(
    "DeadLetter",
    "A tuple that failed too often; ``raw`` is null if it cannot be emitted again. Times in milliseconds since 1970.",
    "number task stream error component failed_task tries first_ms last_ms raw replayed_ms",
    "ignore",
    optional="replayed_ms",
    spout=str,
)
DeadLettersDocument = _document(
    "DeadLettersDocument",
    "A page of dead letters; ``next`` begins the page after it.",
    "id next",
    "forbid",
    letters=list[_DeadLetter],
)
ChangedDocument = _document(
    "ChangedDocument",
    "Answer to a change; ``run_id`` is null when the leader does it without Dagster.",
    "run_id id name",
    status=str,
)
BlacklistDocument = _document("BlacklistDocument", "Hosts that get no new work.", "hosts", "forbid")
_ClusterNimbus = _document(
    "ClusterNimbus",
    "A nimbus.",
    "host leader missing",
    port=int | None,
    uptime_secs=int | None,
    version=str | None,
    http=str | None,
)
_ClusterSupervisor = _document(
    "ClusterSupervisor",
    "A supervisor; ``used`` are the ports of its slots that are assigned.",
    "id host ports used uptime_secs version blacklisted",
    http=str | None,
)
ClusterDocument = _document(
    "ClusterDocument",
    "Nimbuses and supervisors; ``corrupt`` maps a damaged record's path to the reason.",
    "cluster_id healer corrupt",
    nimbuses=list[_ClusterNimbus],
    supervisors=list[_ClusterSupervisor],
)
