"""Probes of the daemons in the containers, and the sizes that supervisors find there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from containers import Containers, Failure

PORTS = {
    "nimbus1": 7621,
    "nimbus2": 7621,
    "supervisor1": 7622,
    "supervisor2": 7622,
    "supervisor3": 7622,
    "dagster-web": 3000,
}
"""Service -> the port of its probes."""
NEED_ZOOKEEPER = tuple(service for service in PORTS if service != "dagster-web")
"""Services that do not work without a quorum."""


def probe(made: Containers, service: str, path: str) -> int:
    """Status of a probe, asked in the service's own container and without a proof."""
    script = (
        f"exec 3<>/dev/tcp/{service}/{PORTS[service]} || exit 1; "
        f"printf 'GET {path} HTTP/1.0\\r\\nHost: {service}:{PORTS[service]}\\r\\n\\r\\n' >&3; "
        "read -r -t 10 _ status _ <&3 && echo $status"
    )
    text = made.exec(service, "bash", "-c", script, check=False).strip()
    return int(text) if text.isdecimal() else 0


def wait_for_probes(
    made: Containers, expected: Mapping[tuple[str, str], int], timeout: float
) -> None:
    """Wait until each (service, path) answers with its status."""
    deadline = time.monotonic() + timeout
    while True:
        seen = {key: probe(made, *key) for key in expected}
        if seen == expected:
            return
        if time.monotonic() > deadline:
            wrong = {key: status for key, status in seen.items() if status != expected[key]}
            raise Failure(f"probes answer {wrong} instead of {dict(expected)}")
        time.sleep(1)


def check_probes(made: Containers, say: Callable[[str], None]) -> None:
    """Every daemon of a healthy cluster is live and ready."""
    paths = ("/livez", "/readyz")
    wait_for_probes(made, {(service, path): 200 for service in PORTS for path in paths}, 30)
    say("every nimbus, supervisor and Dagster's webserver is live and ready")


def check_probes_without_quorum(made: Containers) -> None:
    """Without ZooKeeper, daemons are live and not ready: a restart would not help."""
    live = {(service, "/livez"): 200 for service in NEED_ZOOKEEPER}
    not_ready = {(service, "/readyz"): 503 for service in NEED_ZOOKEEPER}
    wait_for_probes(made, {**live, **not_ready}, 60)


def check_sizes(made: Containers, say: Callable[[str], None]) -> None:
    """Each supervisor offers the memory and the CPUs to which compose limits its container."""
    status = json.loads(made.exec("nimbus1", "storm-dagster", "status", "--json"))
    rows = {row["host"]: row for row in status["supervisors"]}
    for service in (name for name in PORTS if name.startswith("supervisor")):
        check_size(made, service, rows[service])
    say("each supervisor offers the memory and the CPUs of its container")


def check_size(made: Containers, service: str, row: Mapping[str, Any]) -> None:
    """:class:`Failure` unless the row of the supervisor has the sizes of its container."""
    limits = made.docker(
        "inspect", "--format", "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}", made.name(service)
    ).split()
    memory_mb = int(limits[0]) // 2**20
    machine_cpus = int(made.exec(service, "nproc"))
    cpu = min(int(limits[1]) // 10**7, machine_cpus * 100)
    if (row["memory_mb"], row["cpu"]) != (memory_mb, cpu):
        raise Failure(
            f"{service} offers {row['memory_mb']} MiB ({row['memory_source']}) and CPU "
            f"{row['cpu']} % ({row['cpu_source']}); its container has {memory_mb} MiB and {cpu} %"
        )
    if not row["memory_source"].startswith("/"):
        raise Failure(f"{service} names {row['memory_source']!r} and no file as its memory's limit")
