"""Schemas of Storm's REST answers: the keys that its users rely on, each with its type."""

from __future__ import annotations

from storm_dagster.http.schemas import (
    ANY,
    BOOL,
    INT,
    NUM,
    STR,
    Schema,
    arr,
    choice,
    map_of,
    nullable,
    obj,
)

__all__ = [
    "CLUSTER_SUMMARY",
    "COMPONENT",
    "ERRORS",
    "LAG",
    "METRICS",
    "NIMBUSES",
    "OPERATION",
    "OWNERS",
    "STACKS",
    "SUPERVISORS",
    "SUPERVISOR_PAGE",
    "TOPOLOGIES",
    "TOPOLOGY",
    "TOPOLOGY_WORKERS",
    "VISUALIZATION",
    "VISUALIZATION_TABLE",
]

_DECIMALS: Schema = {"type": "string", "pattern": r"^[0-9]+\.[0-9]{3}$"}
_UPTIME: Schema = {
    "type": "string",
    "pattern": r"^([0-9]+d [0-9]+h [0-9]+m |[0-9]+h [0-9]+m |[0-9]+m )?[0-9]+s$",
}
_KIND = choice("spout", "bolt")

CLUSTER_SUMMARY = obj(
    {
        "stormVersion": STR,
        **dict.fromkeys(
            (
                "supervisors",
                "topologies",
                "slotsTotal",
                "slotsUsed",
                "slotsFree",
                "executorsTotal",
                "tasksTotal",
            ),
            INT,
        ),
        "schedulerDisplayResource": BOOL,
        **dict.fromkeys(
            (
                "totalMem",
                "totalCpu",
                "availMem",
                "availCpu",
                "memAssignedPercentUtil",
                "cpuAssignedPercentUtil",
            ),
            NUM,
        ),
    }
)
_SUPERVISOR = obj(
    {
        **dict.fromkeys(("id", "host", "logLink", "version"), STR),
        "uptime": _UPTIME,
        **dict.fromkeys(("uptimeSeconds", "slotsTotal", "slotsUsed", "slotsFree"), INT),
        **dict.fromkeys(("totalMem", "totalCpu", "usedMem", "usedCpu", "availMem", "availCpu"), NUM),
        "blacklisted": BOOL,
    }
)
SUPERVISORS = obj({"supervisors": arr(_SUPERVISOR), "schedulerDisplayResource": BOOL})
_WORKER = obj(
    {
        **dict.fromkeys(("supervisorId", "host", "topologyId", "topologyName", "workerLogLink"), STR),
        "uptime": _UPTIME,
        **dict.fromkeys(("port", "executorsTotal", "uptimeSeconds"), INT),
        **dict.fromkeys(("assignedMemOnHeap", "assignedMemOffHeap", "assignedCpu"), NUM),
        "componentNumTasks": map_of(INT),
    }
)
SUPERVISOR_PAGE = obj(
    {"supervisors": arr(_SUPERVISOR), "workers": arr(_WORKER), "schedulerDisplayResource": BOOL}
)
NIMBUSES = obj(
    {
        "nimbuses": arr(
            obj(
                {
                    "host": STR,
                    "port": INT,
                    "status": choice("Leader", "Not a Leader", "Offline"),
                    **dict.fromkeys(("version", "nimbusUpTime", "nimbusUpTimeSeconds", "nimbusLogLink"), STR),
                }
            )
        )
    }
)
_RESOURCES = dict.fromkeys(
    (
        *("requestedMemOnHeap", "requestedMemOffHeap", "requestedTotalMem", "requestedCpu"),
        *("assignedMemOnHeap", "assignedMemOffHeap", "assignedTotalMem", "assignedCpu"),
    ),
    NUM,
)
_TOPOLOGY_HEAD = {
    **dict.fromkeys(("id", "encodedId", "name", "owner", "status", "stormVersion"), STR),
    "uptime": _UPTIME,
    **dict.fromkeys(
        ("uptimeSeconds", "tasksTotal", "workersTotal", "executorsTotal", "replicationCount"), INT
    ),
    "schedulerInfo": nullable(STR),
    **_RESOURCES,
}
TOPOLOGIES = obj({"topologies": arr(obj(_TOPOLOGY_HEAD)), "schedulerDisplayResource": BOOL})
OWNERS = obj(
    {
        "owners": arr(
            obj(
                {
                    "owner": STR,
                    **dict.fromkeys(("totalTopologies", "totalExecutors", "totalWorkers", "totalTasks"), INT),
                    **dict.fromkeys(
                        (
                            *("totalMemoryUsage", "totalCpuUsage", "totalReqOnHeapMem", "totalReqOffHeapMem"),
                            *(
                                "totalReqMem",
                                "totalReqCpu",
                                "totalAssignedOnHeapMem",
                                "totalAssignedOffHeapMem",
                            ),
                        ),
                        NUM,
                    ),
                    **dict.fromkeys(
                        (
                            *("memoryGuarantee", "cpuGuarantee", "isolatedNodes"),
                            *("memoryGuaranteeRemaining", "cpuGuaranteeRemaining"),
                        ),
                        choice("N/A"),
                    ),
                }
            )
        ),
        "schedulerDisplayResource": BOOL,
    }
)
_COUNTS = dict.fromkeys(("emitted", "transferred", "acked", "failed"), INT)
_WINDOW = {"windowPretty": STR, "window": STR, **_COUNTS}
_LAST_ERROR = {
    **dict.fromkeys(("lastError", "errorHost", "errorWorkerLogLink"), STR),
    **dict.fromkeys(("errorPort", "errorTime", "errorLapsedSecs"), nullable(INT)),
}
_PART = {
    **dict.fromkeys(("executors", "tasks"), INT),
    **_COUNTS,
    **dict.fromkeys(("requestedMemOnHeap", "requestedMemOffHeap", "requestedCpu"), NUM),
    **_LAST_ERROR,
}
_BOLT_FIGURES = {
    "executed": INT,
    **dict.fromkeys(("executeLatency", "processLatency", "capacity"), _DECIMALS),
}
TOPOLOGY = obj(
    {
        **_TOPOLOGY_HEAD,
        "user": nullable(STR),
        "schedulerDisplayResource": BOOL,
        "msgTimeout": INT,
        "window": STR,
        "windowHint": STR,
        "topologyStats": arr(obj({**_WINDOW, "completeLatency": _DECIMALS})),
        "workers": arr(_WORKER),
        "spouts": arr(obj({"spoutId": STR, "encodedSpoutId": STR, "completeLatency": _DECIMALS, **_PART})),
        "bolts": arr(obj({"boltId": STR, "encodedBoltId": STR, **_BOLT_FIGURES, **_PART})),
        "configuration": map_of(ANY),
        "debug": BOOL,
        "samplingPct": NUM,
        "visualizationTable": arr(ANY),
    }
)
TOPOLOGY_WORKERS = obj(
    {
        "hostPortList": arr(obj({"host": STR, "port": INT})),
        "logviewerPort": INT,
        "logviewerScheme": choice("http", "https"),
    }
)
_EXECUTOR = {
    **dict.fromkeys(("id", "encodedId", "host", "workerLogLink"), STR),
    "uptime": _UPTIME,
    **dict.fromkeys(("uptimeSeconds", "port"), INT),
    **_COUNTS,
}
_ERROR = {
    **dict.fromkeys(("errorHost", "errorWorkerLogLink", "error"), STR),
    **dict.fromkeys(("time", "errorPort", "errorLapsedSecs"), INT),
}
COMPONENT = obj(
    {
        **dict.fromkeys(
            ("id", "encodedId", "name", "topologyId", "encodedTopologyId", "topologyStatus"), STR
        ),
        "user": nullable(STR),
        "componentType": _KIND,
        **dict.fromkeys(("executors", "tasks"), INT),
        "window": STR,
        "windowHint": STR,
        "schedulerDisplayResource": BOOL,
        **dict.fromkeys(("requestedMemOnHeap", "requestedMemOffHeap", "requestedCpu", "samplingPct"), NUM),
        **dict.fromkeys(("debug", "profilingAndDebuggingCapable", "profileActionEnabled"), BOOL),
        "eventLogLink": STR,
        "profilerActive": arr(ANY),
        "componentErrors": arr(obj(_ERROR)),
        "outputStats": arr(
            obj(
                {"stream": STR, "emitted": INT, "transferred": INT},
                {"completeLatency": _DECIMALS, "acked": INT, "failed": INT},
            )
        ),
        "executorStats": arr(obj(_EXECUTOR, {"completeLatency": _DECIMALS, **_BOLT_FIGURES})),
    },
    {
        "spoutSummary": arr(obj({**_WINDOW, "completeLatency": _DECIMALS})),
        "boltStats": arr(obj({**_WINDOW, **_BOLT_FIGURES})),
        "inputStats": arr(
            obj(
                {
                    **dict.fromkeys(("component", "encodedComponentId", "stream"), STR),
                    **dict.fromkeys(("executed", "acked", "failed"), INT),
                    **dict.fromkeys(("executeLatency", "processLatency"), _DECIMALS),
                }
            )
        ),
    },
)
ERRORS = obj({"topologyErrors": arr(obj({"component": STR, **_ERROR}))})
_STREAM_VALUES = arr(obj({"stream_id": STR, "value": ANY}, {"component_id": STR}))
METRICS = obj(
    {
        "window": STR,
        "windowHint": STR,
        "reported": arr(obj({"component_id": STR, "task": STR, "metrics": ANY})),
        "spouts": arr(
            obj(
                {
                    "id": STR,
                    **dict.fromkeys(
                        ("emitted", "transferred", "acked", "failed", "complete_ms_avg"), _STREAM_VALUES
                    ),
                }
            )
        ),
        "bolts": arr(
            obj(
                {
                    "id": STR,
                    **dict.fromkeys(
                        (
                            *("emitted", "transferred", "acked", "failed"),
                            *("executed", "executed_ms_avg", "process_ms_avg"),
                        ),
                        _STREAM_VALUES,
                    ),
                }
            )
        ),
    }
)
LAG = map_of(
    obj({"spoutId": STR, "spoutType": STR, "spoutLagResult": obj({"totalLag": NUM, "tasks": map_of(NUM)})})
)
VISUALIZATION = map_of(
    obj(
        {
            ":type": _KIND,
            ":capacity": NUM,
            ":latency": NUM,
            ":transferred": map_of(INT),
            ":stats": arr(
                obj({":host": STR, ":port": INT, ":uptime_secs": INT, ":transferred": map_of(map_of(INT))})
            ),
            ":link": STR,
            ":inputs": arr(obj(dict.fromkeys((":component", ":stream", ":sani-stream", ":grouping"), STR))),
        }
    )
)
VISUALIZATION_TABLE = obj(
    {"visualizationTable": arr(arr(obj({":stream": STR, ":sani-stream": STR, ":checked": BOOL})))}
)
OPERATION = obj({"topologyOperation": STR, "topologyId": STR, "status": choice("success")})
STACKS = obj({"status": choice("ok"), "id": STR, "dumplink": STR, "stacks": map_of(arr(STR))})
