"""The secret of a running cluster is changed, as docs/security.md says, while a topology counts."""

from __future__ import annotations

import secrets
import signal
from collections import Counter
from pathlib import Path

import pytest

from storm_dagster.client.http import NimbusClient
from storm_dagster.model.errors import NotAuthenticated, StormDagsterError
from storm_dagster.security.settings import Security
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.chaos.workload import WordCount

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

WORDS = WordCount(Path(__file__).parents[2] / "examples" / "wordcount.py", files=12, limit=8_000)
DAEMONS = (
    "nimbus",
    "supervisor",
    "spark",
    "dagster-code",
    "dagster-daemon",
    "dagster-webserver",
)


def restart_daemons(cluster: LocalCluster) -> None:
    """End each daemon in turn; `dev` starts it again, with what the file says then. Workers
    stay.
    """
    for role in DAEMONS:
        for record in cluster.processes(role):
            # Spark's server may take its time over sessions that are open.
            cluster.kill(role, record.id, signal.SIGKILL if role == "spark" else signal.SIGTERM)
            eventually(
                lambda record=record: not record.alive(), 60, f"the end of {role} {record.id}"
            )

    def answers() -> bool:
        status = cluster.cli("status")
        return status["leader"] is not None and status["dagster"]["state"] == "ok"

    eventually(
        answers, 120, "answers of nimbus and Dagster", ignore=(StormDagsterError,), interval=0.5
    )


def test_the_secret_changes_under_a_counting_topology(tmp_path: Path) -> None:
    file = tmp_path / "secret"

    def know(*lines: str) -> None:
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o600)

    old, new = secrets.token_hex(32), secrets.token_hex(32)
    know(old)
    expected: Counter[str] = WORDS.expected
    with LocalCluster(tmp_path / "home", conf={"storm.secret.file": str(file)}) as cluster:
        cluster.cli("submit", *WORDS.submit_arguments("words", rate=60))
        pids = {worker["pid"] for worker in cluster.wait_running("words")["workers"]}

        know(new, old)
        restart_daemons(cluster)
        cluster.cli("daemon", "zookeeper", "secure")
        assert {worker["pid"] for worker in cluster.wait_running("words")["workers"]} == pids, (
            "no worker was ended"
        )

        know(new)
        restart_daemons(cluster)
        cluster.cli("daemon", "zookeeper", "secure")
        cluster.wait_running("words", 120)
        seeds = [nimbus.http for nimbus in cluster.endpoints.nimbuses]
        with NimbusClient(seeds, security=Security(old)) as former, pytest.raises(NotAuthenticated):
            former.get("/v1/topologies")

        # The whole cluster, too, starts with the new secret alone.
        cluster.stop()
        cluster.start()
        cluster.wait_running("words", 120)

        # A worker and a topology that start now prove themselves by the new secret alone.
        cluster.kill("worker")
        cluster.wait_running("words", 120)
        cluster.cli("submit", *WORDS.submit_arguments("later", rate=2000))
        for name in ("words", "later"):
            eventually(
                lambda name=name: WORDS.finished(cluster, name),
                300,
                f"all lines of {name}",
                interval=0.5,
            )
            assert WORDS.counts(cluster, name) == expected
