"""Events of bolts reach a real Dagster at least once, while nimbus, Dagster and the worker die in
turn. The stream does not wait for Dagster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import pytest

from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_ports
from storm_rigs.stage.daemons import Daemons

pytestmark = [
    pytest.mark.long,
    pytest.mark.zookeeper,
    pytest.mark.dagster,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

DEFINITIONS = """
import dagster as dg

defs = dg.Definitions(assets=[dg.AssetSpec(["lake", "clicks"], partitions_def=dg.DynamicPartitionsDefinition(name="hours"))])
"""
CLICKS = dg.AssetKey(["lake", "clicks"])


class Dagster:
    """A webserver on one port and one storage, which can be stopped and started."""

    def __init__(self, home: Path) -> None:
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        (home / "lake_defs.py").write_text(DEFINITIONS)
        self.home = home
        self.port = free_ports(1)[0]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/graphql"

    def start(self) -> None:
        command = [
            str(Path(sys.executable).with_name("dagster-webserver")),
            "-f",
            str(self.home / "lake_defs.py"),
        ]
        with (self.home / "webserver.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "-h", "127.0.0.1", "-p", str(self.port)],
                env={**os.environ, "DAGSTER_HOME": str(self.home)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        server_info = self.url.replace("graphql", "server_info")

        def up() -> bool:
            return httpx.get(server_info, timeout=2, trust_env=False).is_success

        eventually(up, 120, "Dagster's webserver", ignore=(httpx.HTTPError,))

    def stop(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        # The group that this class started: webserver and code server.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(patience(20))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def running(home: Path) -> Iterator[Dagster]:
    dagster = Dagster(home)
    dagster.start()
    try:
        yield dagster
    finally:
        dagster.stop()


def test_every_acked_hour_comes_to_dagster_whoever_dies(
    tmp_path: Path, zookeeper_server: str, zk_root: str
) -> None:
    """Each kill comes while events are under way. What is acked is taken, and comes to Dagster."""
    lake = tmp_path / "lake"
    lake.mkdir()
    with (
        running(tmp_path / "dagster") as dagster,
        dg.DagsterInstance.from_config(str(dagster.home)) as instance,
    ):
        host, _, port = zookeeper_server.rpartition(":")
        conf = {
            "storm.zookeeper.port": int(port),
            "storm.zookeeper.root": zk_root,
            "storm.zookeeper.session.timeout": 4000,
            "dagster.graphql.url": dagster.url,
        }

        def stored() -> Counter[int]:
            records = instance.fetch_materializations(CLICKS, limit=10_000).records
            found = [record.asset_materialization for record in records]
            assert all(one is not None and one.partition == f"hour-{number(one)}" for one in found)
            return Counter(number(one) for one in found)

        def acked() -> set[int]:
            path = lake / "acked"
            return {int(line) for line in path.read_text().split()} if path.exists() else set()

        def acked_hours() -> set[int]:
            return {one for one in acked() if one % 3 == 0}

        def more_hours(count: int) -> bool:
            """More hours are acked than at the begin of the wait."""
            return len(acked_hours() - before) > count

        def all_stored() -> bool:
            return acked_hours() <= set(stored())

        with Daemons(
            tmp_path / "home", [host], nimbuses=2, supervisors=1, slots=1, conf=conf
        ) as daemons:
            target = f"{Path(__file__).parent / 'topologies' / 'hours.py'}:HoursTopology"
            topology_id = daemons.submit(target, "hours", conf={"hours.folder": str(lake)})
            ((pid, token),) = daemons.wait_running(topology_id).values()
            before: set[int] = set()
            eventually(lambda: more_hours(5), 60, "the first hours")
            eventually(lambda: len(stored()) > 5, 60, "the first hours in Dagster")

            unauthorized = {"events": []}
            path = f"{daemons.url(daemons.leader())}/v1/topologies/hours/events"
            refused = httpx.post(
                path, json=unauthorized, headers={"Authorization": "Bearer x"}, trust_env=False
            )
            assert refused.status_code == 401, "only live workers of the topology may report"
            known = {"Authorization": f"Bearer {token}"}
            assert (
                httpx.post(path, json=unauthorized, headers=known, trust_env=False).json()["stored"]
                == []
            )
            assert (
                httpx.post(path, json={"events": 1}, headers=known, trust_env=False).status_code
                == 400
            )

            leader = daemons.leader()
            daemons.kill("nimbus", leader)
            before = acked_hours()
            daemons.leader(other_than=leader)
            eventually(lambda: more_hours(5), 90, "hours after the death of the leader")

            dagster.stop()
            before = acked_hours()
            eventually(lambda: more_hours(20), 90, "hours that are acked without Dagster")
            os.kill(pid, signal.SIGKILL)
            daemons.heal()
            eventually(
                lambda: {one for one, _ in daemons.wait_running(topology_id).values()} != {pid},
                90,
                "its heir",
            )
            leader = daemons.leader()
            daemons.kill("nimbus", leader)
            before = acked_hours()
            daemons.leader(other_than=leader)
            eventually(lambda: more_hours(5), 90, "hours after both deaths")
            daemons.heal()
            waiting = acked_hours() - set(stored())
            assert len(waiting) > 20, "they are taken, and wait"
            dagster.start()
            (lake / "end").touch()
            eventually(all_stored, 120, "what waited is in Dagster")
            eventually(lambda: acked() >= set(range(max(acked()) + 1)), 120, "all is acked")
            eventually(all_stored, 60, "all hours in Dagster")
            (found,) = {check.asset_key for check in checks(instance)}
            assert found == CLICKS


def number(materialization: Any) -> int:
    assert {"storm/topology", "storm/event"} <= set(materialization.metadata)
    return int(materialization.metadata["number"].value)


def checks(instance: dg.DagsterInstance) -> list[dg.AssetCheckEvaluation]:
    """The evaluations of checks that Dagster has."""
    records = instance.event_log_storage.get_asset_check_execution_history(
        dg.AssetCheckKey(CLICKS, "complete"), limit=10
    )
    found: list[dg.AssetCheckEvaluation] = []
    for record in records:
        event = record.event.dagster_event if record.event is not None else None
        if event is not None:
            data = event.event_specific_data
            assert isinstance(data, dg.AssetCheckEvaluation)
            found.append(data)
    return found
