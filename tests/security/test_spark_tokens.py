"""The cluster's Spark token goes to the servers that the cluster's conf names, whatever a
topology's conf names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from storm_dagster.api import TopologyBuilder
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.home_key import begin_start
from storm_dagster.security.spark_remote import renew_spark_token, spark_token, with_spark_token
from storm_dagster.spark.query_sessions import end_query_session
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.builder import Stage

CODE = """
from storm_dagster.api import Spout


class Lines(Spout):
    def next_tuple(self):
        self.emit(["a line"])


def same(frame):
    return frame
"""


class Listener(grpc.GenericRpcHandler):
    """A server of another owner, which looks at what it is sent."""

    def __init__(self) -> None:
        self.headers: list[str] = []
        self._server = grpc.server(ThreadPoolExecutor(2), handlers=[self])
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.remote = f"sc://127.0.0.1:{self.port}"
        self._server.start()

    def service(self, handler_call_details: Any) -> None:
        """Refuse the call."""
        self.headers.append(str(handler_call_details.invocation_metadata))

    def stop(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.stop()


LISTENER = "the listener"
"""In place of its URL."""


@pytest.mark.spark
@pytest.mark.zookeeper
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("cluster", "topology", "component", "shown"),
    [
        ({}, {"topology.spark.remote": LISTENER}, {}, False),
        ({}, {"spark.remote": LISTENER}, {}, False),
        ({}, {}, {"spark.remote": LISTENER, "topology.spark.remote": LISTENER}, False),
        ({"spark.remote": LISTENER}, {}, {}, True),
        ({"topology.spark.remote": LISTENER}, {"topology.spark.remote": LISTENER}, {}, True),
    ],
    ids=[
        "topology",
        "topology's spark.remote",
        "component",
        "cluster",
        "cluster, repeated by the topology",
    ],
)
def test_a_worker_sends_the_token_only_to_servers_of_the_cluster(
    tmp_path: Path,
    stage: Stage,
    monkeypatch: pytest.MonkeyPatch,
    listener: Listener,
    cluster: Mapping[str, str],
    topology: Mapping[str, str],
    component: Mapping[str, str],
    shown: bool,
) -> None:
    monkeypatch.setenv("STORM_DAGSTER_HOME", str(tmp_path))
    token = spark_token({}, tmp_path)

    def filled(conf: Mapping[str, str]) -> dict[str, str]:
        return {key: listener.remote if value == LISTENER else value for key, value in conf.items()}

    builder = TopologyBuilder("tokens")
    builder.set_spout("lines", "rig_code:Lines", outputs=["line"])
    args = {"function": "rig_code:same", "schema": "line string", "batch_secs": 0.1}
    spark = "storm_dagster.api.spark:SparkBolt"
    config = {"topology.tick.tuple.freq.secs": 0.1, **filled(component)}
    builder.set_bolt("same", spark, inputs="lines", args=args, outputs=["line"], config=config)
    tasks = {"same": "1", "__topology_master": "2", "lines": "3"}
    stage.conf |= {"spark.remote": f"sc://127.0.0.1:{free_port()}", **filled(cluster)}
    rig = stage.workers(builder, tasks, code=CODE, conf=filled(topology))
    slot = ("s1", free_port())
    try:
        rig.assign({slot: "1-3"})
        rig.start(*slot)
        eventually(lambda: listener.headers, 120, "the worker's call")
    finally:
        rig.stop()
    assert (token in str(listener.headers)) == shown
    assert shown or "authorization" not in str(listener.headers)


def test_each_start_of_dev_has_its_own_token(tmp_path: Path) -> None:
    tokens: list[str] = []
    for _ in range(2):
        begin_start(tmp_path)
        renew_spark_token({}, tmp_path)
        tokens.append(spark_token({}, tmp_path))
        assert spark_token({}, tmp_path) == tokens[-1], "a restarted server keeps it"
        url = with_spark_token("sc://127.0.0.1:1", ["sc://127.0.0.1:1"], tmp_path)
        assert url.endswith(tokens[-1]), "clients send the same"
    assert tokens[0] != tokens[1]
    assert (tmp_path / "spark.token").stat().st_mode & 0o777 == 0o600


def test_a_topology_gets_the_token_for_an_address_of_the_cluster_alone(tmp_path: Path) -> None:
    """The URL may have other parameters; another name of the same host is another address."""
    token = spark_token({}, tmp_path)
    servers = ["sc://127.0.0.1:15002", "sc://127.0.0.1:15003/;user_id=storm"]

    def url(given: str) -> str:
        return with_spark_token(given, servers, tmp_path)

    for given in ("sc://127.0.0.1", "sc://127.0.0.1:15002/;user_id=me", "sc://127.0.0.1:15003"):
        assert token in url(given)
    for given in (
        "sc://localhost:15002",
        "sc://127.0.0.1:15004",
        "sc://127.0.0.2:15002",
        "sc://127.0.0.1:15002@elsewhere:1",
        "sc://elsewhere:1/127.0.0.1:15002",
        "sc://elsewhere:1#127.0.0.1:15002",
        "sc://127.0.0.1:15002?:15002",
    ):
        assert url(given) == given


@pytest.mark.spark
@pytest.mark.timeout(240)
def test_ending_queries_sends_no_token_to_the_topologys_own_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    monkeypatch.setenv("STORM_DAGSTER_HOME", str(tmp_path))
    token = spark_token({}, tmp_path)
    for servers, shown in (([f"sc://127.0.0.1:{free_port()}"], False), ([listener.remote], True)):
        listener.headers.clear()
        with pytest.raises(Unavailable):
            end_query_session(listener.remote, "a-1-1", servers, None if shown else "derived-token")
        assert listener.headers and (token in str(listener.headers)) == shown
        assert "derived-token" not in str(listener.headers)
