"""Storm's own command line against a whole cluster: the commands of the table in
``docs/migration.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.product.storm_command_line import StormCommandLine

pytestmark = [
    *(pytest.mark.cluster, pytest.mark.spark, pytest.mark.dagster, pytest.mark.long),
    pytest.mark.timeout(1800),
]

WORDCOUNT = Path(__file__).parents[2] / "examples" / "wordcount.py"


@pytest.fixture(scope="module")
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    return shared_cluster


def test_storms_commands_do_what_the_page_says(cluster: LocalCluster, tmp_path: Path) -> None:
    host, _, port = cluster.endpoints.nimbuses[0].thrift.rpartition(":")
    storm = StormCommandLine(host, int(port), tmp_path)

    def shown() -> dict[str, Any]:
        return cluster.show("wordcount")

    def has(status: str) -> bool:
        return shown()["status"] == status

    def done(command: str, *args: str) -> str:
        code, said = storm.run(command, *args)
        assert code == 0, said
        return said

    def refused(command: str, *args: str) -> str:
        code, said = storm.run(command, *args)
        assert code != 0, said
        return said

    cluster.cli("submit", str(WORDCOUNT), "-c", "topology.workers=2")
    cluster.wait_running("wordcount")
    listed = done("ListTopologies")
    assert "wordcount" in listed and "ACTIVE" in listed
    done("Rebalance", "wordcount", "-w", "0", "-n", "4", "-e", "count=4")
    eventually(
        lambda: len(shown()["workers"]) == 4 and has("ACTIVE"), 120, "four workers", interval=0.5
    )
    assert len([task for task in shown()["tasks"] if task["component"] == "count"]) == 4
    assert "not topology.debug: update" in refused(
        "Rebalance", "wordcount", "-t", '{"topology.debug": true}'
    )
    assert "resources of count" in refused(
        "Rebalance", "wordcount", "-r", '{"count": {"cpu.pcore.percent": 10}}'
    )
    done("Deactivate", "wordcount")
    eventually(lambda: has("INACTIVE"), 60, "INACTIVE", interval=0.5)
    done("Activate", "wordcount")
    eventually(lambda: has("ACTIVE"), 60, "ACTIVE", interval=0.5)
    assert "wordcount" in done("GetErrors", "wordcount")
    done("SetLogLevel", "wordcount", "-l", "ROOT=DEBUG:30")
    done("Blobstore", "list")
    assert "credentials are not kept" in refused("UploadCredentials", "wordcount", "-e", "k", "v")
    done("KillTopology", "wordcount", "-w", "0")
    eventually(lambda: not cluster.topologies(), 60, "the end of wordcount", interval=0.5)
