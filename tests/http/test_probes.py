"""Probes of the daemons: whether a restart helps, and whether work can be given to them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from storm_dagster.host.processes import RunFile
from storm_dagster.http.authentication import NoTokens
from storm_dagster.http.description import HttpApi
from storm_dagster.http.probes import LoopPasses, Probes
from storm_dagster.model import paths
from storm_dagster.testing.waiting import eventually
from storm_dagster.web.service import guard_application
from storm_rigs.protocols.tokens import TokensOfTest
from storm_rigs.servers.blob_server import serve_blobs
from storm_rigs.servers.fault_proxy import FaultProxy
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.supervisor_processes import SupervisorRig

NO_SESSION = ["no session with ZooKeeper"]
SECRET = "a-secret-planted-for-tests-4711"
Probe = Callable[[str], httpx.Response]


def probe_of(app: Any) -> Probe:
    """Probes of an application, without a server."""

    def probe(path: str) -> httpx.Response:
        async def get() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                return await http.get(path)

        return asyncio.run(get())

    return probe


def problems(response: httpx.Response) -> list[str]:
    """Problems of a probe, which has the status 503 with some and 200 without any."""
    document = response.json()
    assert response.status_code == (503 if document["problems"] else 200), response.text
    assert document["status"] == ("failed" if document["problems"] else "ok")
    return document["problems"]


def test_a_loop_without_a_pass_for_a_minute_is_not_live() -> None:
    now = 1000.0
    loop = LoopPasses(lambda: now)
    api = HttpApi("daemon", "1")
    api.add(Probes(loop.problems, lambda: ["no session with ZooKeeper"]))
    probe = probe_of(Starlette(routes=api.routes()))
    now += 59
    assert problems(probe("/livez")) == []
    assert problems(probe("/readyz")) == ["no session with ZooKeeper"]
    now += 3
    assert problems(probe("/livez")) == ["the loop of this daemon made no pass for 62 s"]
    # A loop that hangs does no work.
    assert problems(probe("/readyz"))[1:] == ["no session with ZooKeeper"]
    loop.passed()
    assert problems(probe("/livez")) == []


def test_a_long_pass_is_live_while_its_own_thread_makes_progress() -> None:
    now = 1000.0
    loop = LoopPasses(lambda: now)
    loop.passed()
    for _ in range(10):
        now += 50
        loop.progressed()
    assert loop.problems() == []
    # Progress of other threads says nothing about the loop.
    now += 61
    other = threading.Thread(target=loop.progressed)
    other.start()
    other.join()
    assert loop.problems() == ["the loop of this daemon made no pass for 561 s"]
    loop.progressed()
    assert loop.problems() == []
    # It does not go on for ever.
    for _ in range(10):
        now += 50
        loop.progressed()
    assert loop.problems() == ["the loop of this daemon has not ended its pass for 1061 s"]
    loop.passed()
    assert loop.problems() == []


@pytest.mark.zookeeper
def test_a_leader_that_reads_a_large_cluster_is_live(stage: Stage) -> None:
    world = stage.world()
    world.submit("wc")
    now = 0.0
    loop = LoopPasses(lambda: now)
    answers = 0

    def on_answer() -> None:
        """Each answer takes most of a minute."""
        nonlocal now, answers
        now += 50
        answers += 1
        loop.progressed()

    loop.passed()
    world.cluster.session.on_answer = on_answer
    world.cluster.load_view()
    # A node that does not exist is an answer as well.
    assert world.cluster.state.get_data("/nowhere") is None
    assert answers >= 4 and loop.problems() == []
    now += 61
    assert loop.problems() != []


async def _no_dagster(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError(f"a request came through: {scope['path']}")


def test_dagsters_web_application_answers_probes_without_a_proof() -> None:
    conf = {"storm.secret": SECRET}
    probe = probe_of(guard_application(_no_dagster, conf, "127.0.0.1", TokensOfTest(SECRET)))
    assert problems(probe("/livez")) == problems(probe("/readyz")) == []
    assert probe("/graphql").status_code == 401
    probe = probe_of(guard_application(_no_dagster, conf, "127.0.0.1", NoTokens()))
    assert problems(probe("/livez")) == []
    assert "access tokens" in problems(probe("/readyz"))[0]


def _proxied(stage: Stage, link: FaultProxy) -> dict[str, Any]:
    """Conf of a daemon that reaches ZooKeeper through the link alone."""
    return {
        **stage.conf,
        "storm.zookeeper.servers": ["127.0.0.1"],
        "storm.zookeeper.port": link.port,
    }


def _http_port(stage: Stage) -> int:
    """HTTP port of supervisor s1, once it has started."""
    path = RunFile.path_of(stage.home, "supervisor", "s1")
    eventually(path.exists, what="a start without ZooKeeper")
    record = RunFile.read(path)
    assert record is not None
    return record.ports["http"]


def await_problems(get: Callable[[], httpx.Response], expected: list[str]) -> None:
    """Wait until a probe has these problems."""
    eventually(
        lambda: problems(get()) == expected,
        what=f"a probe with the problems {expected}",
        ignore=(httpx.HTTPError,),
    )


def _get(port: int, path: str) -> httpx.Response:
    return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=20, trust_env=False)


@pytest.mark.zookeeper
def test_a_supervisor_is_ready_while_the_cluster_sees_it(stage: Stage) -> None:
    cluster = stage.cluster
    stage.home.mkdir()
    with (
        FaultProxy("127.0.0.1", stage.conf["storm.zookeeper.port"]) as link,
        serve_blobs() as blobs,
    ):
        link.cut()
        conf = {
            **_proxied(stage, link),
            "nimbus.seeds": [blobs.url.removeprefix("http://")],
            "supervisor.http.port": 0,
            "supervisor.heartbeat.frequency.secs": 1,
            "supervisor.monitor.frequency.secs": 0.5,
        }
        rig = SupervisorRig(stage.home, conf, cluster, blobs, "")
        try:
            rig.supervisor()
            port = _http_port(stage)
            await_problems(lambda: _get(port, "/readyz"), NO_SESSION)
            assert problems(_get(port, "/livez")) == []
            assert _get(port, "/healthz").json()["status"] == "ok"
            link.restore()
            await_problems(lambda: _get(port, "/readyz"), [])
            assert cluster.state.get_data(paths.supervisor("s1")) is not None
            link.cut()
            await_problems(lambda: _get(port, "/readyz"), NO_SESSION)
            assert problems(_get(port, "/livez")) == []
            link.restore()
            await_problems(lambda: _get(port, "/readyz"), [])
        finally:
            rig.stop()


@pytest.mark.zookeeper
def test_a_nimbus_is_ready_with_a_session_and_a_leader(stage: Stage) -> None:
    with FaultProxy("127.0.0.1", stage.conf["storm.zookeeper.port"]) as link:
        nimbus = stage.nimbus(conf=_proxied(stage, link)).await_leading()
        assert problems(nimbus.get("/readyz")) == problems(nimbus.get("/livez")) == []
        link.cut()
        await_problems(lambda: nimbus.get("/readyz"), NO_SESSION)
        assert problems(nimbus.get("/livez")) == []
        link.restore()
        await_problems(lambda: nimbus.get("/readyz"), [])
        nimbus.stop()


@pytest.mark.zookeeper
def test_a_nimbus_without_code_of_active_topologies_is_not_ready(stage: Stage) -> None:
    world = stage.world()
    world.submit("planted")
    nimbus = stage.nimbus("n2").await_serving()
    eventually(
        lambda: any(
            "are not copied to this nimbus" in text for text in problems(nimbus.get("/readyz"))
        ),
        what="missing code",
    )
    # Whoever probes proves nothing, and reads no name.
    text = json.dumps(nimbus.get("/readyz").json())
    assert "planted" not in text and "127.0.0.1" not in text
    assert problems(nimbus.get("/livez")) == []
