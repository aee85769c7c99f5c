"""The service of real nimbuses: who answers what, and nothing that a caller says reaches a shell, a
path or a secret.
"""

from __future__ import annotations

import importlib
import json
import socket
import struct
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from thriftpy2.thrift import TApplicationException
from thriftpy2.utils import serialize

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.core.upgrade.selection import Selection
from storm_dagster.host.processes import RunFile
from storm_dagster.model.names import code_key, conf_key, jar_key
from storm_dagster.nimbus.thrift.idl import decoder, load_idl
from storm_dagster.nimbus.thrift.methods import METHODS, RefusedMethod
from storm_dagster.operations.live import lifecycle
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.operations.archives import pack_archive
from storm_rigs.protocols.thrift_calls import encode_call
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import World

# Made when it is imported, from the definition file of Storm: no type checker knows what it has.
storm = importlib.import_module("streamparse.thrift")


def topology(**conf: object) -> Any:  # A structure whose fields no type checker knows.
    common = storm.ComponentCommon(
        inputs={},
        streams={"default": storm.StreamInfo(output_fields=["word"], direct=False)},
        parallelism_hint=1,
        json_conf=json.dumps(conf),
    )
    shell = storm.ComponentObject(
        shell=storm.ShellComponent(execution_command="python", script="s.py")
    )
    return storm.StormTopology(
        spouts={"s": storm.SpoutSpec(spout_object=shell, common=common)}, bolts={}, state_spouts={}
    )


def jar(tmp_path: Path) -> bytes:
    path = tmp_path / "a.jar"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("resources/s.py", "print()")
    return path.read_bytes()


def upload(client, raw: bytes) -> str:
    location = client.beginFileUpload()
    client.uploadChunk(location, raw)
    client.finishFileUpload(location)
    return location


def test_every_method_answers_a_call_without_arguments(nimbus: NimbusThread) -> None:
    """Clients may leave out whatever they like: the answer is a value or an error that says what is
    missing.
    """
    service = load_idl().Nimbus
    assert set(storm.Nimbus.thrift_services) <= set(service.thrift_services)
    with nimbus.connect() as link:
        for name in service.thrift_services:
            frame = encode_call(name, 3)
            link.sendall(struct.pack("!i", len(frame)) + frame)
            stream = link.makefile("rb")
            protocol = decoder(stream.read(int.from_bytes(stream.read(4), "big")))
            said, kind, seqid = protocol.read_message_begin()
            assert (said, seqid) == (name, 3)
            if kind == 3:
                error = TApplicationException()
                error.read(protocol)
                message = error.message or ""
                assert message and "inside nimbus" not in message, name
                is_refused = isinstance(METHODS[name], RefusedMethod)
                assert ("is not served: " in message) is is_refused, message
                assert "has no method" not in message
            else:
                result = getattr(service, f"{name}_result")()
                result.read(protocol)
                assert required_fields(result) == [], name


def test_streamparse_s_structures_have_the_same_fields_as_ours() -> None:
    ours, differing = load_idl(), []
    for name in dir(storm):
        theirs = getattr(storm, name)
        spec = getattr(theirs, "thrift_spec", None)
        if not spec or not hasattr(ours, name):
            continue
        for number, entry in spec.items():
            mine = getattr(ours, name).thrift_spec.get(number)
            # (type, name, [what it holds], required)
            if mine is None or (mine[0], mine[1], mine[-1]) != (entry[0], entry[1], entry[-1]):
                differing.append((name, number, entry[1]))
    assert differing == []
    for method in storm.Nimbus.thrift_services:
        args = getattr(storm.Nimbus, f"{method}_args").thrift_spec
        mine = getattr(ours.Nimbus, f"{method}_args").thrift_spec
        assert {n: entry[0] for n, entry in args.items()} == {
            n: entry[0] for n, entry in mine.items()
        }, method


def required_fields(value: object, where: str = "") -> list[str]:
    """Names of required fields of a structure, however deep, that are not set: Java refuses to read
    those.
    """
    missing: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            missing += required_fields(key, where) + required_fields(item, f"{where}[{key!r:.20}]")
    elif isinstance(value, list):
        for item in value:
            missing += required_fields(item, where)
    else:
        for entry in getattr(value, "thrift_spec", {}).values():
            inner = getattr(value, entry[1])
            if inner is None and entry[-1]:
                missing.append(f"{where}.{entry[1]}")
            missing += required_fields(inner, f"{where}.{entry[1]}")
    return missing


def test_an_empty_cluster_answers_every_question(nimbus: NimbusThread) -> None:
    client, newer = nimbus.thrift_client(), nimbus.thrift_client(ours=True)
    summary = client.getClusterInfo()
    assert summary.topologies == [] and summary.supervisors == []
    assert [row.port for row in summary.nimbuses] == [nimbus.port] and summary.nimbuses[0].isLeader
    assert required_fields(summary) == [] and required_fields(client.getLeader()) == []
    assert newer.getTopologySummaries() == []
    assert client.getTopologyHistory("bob").topo_ids == []
    assert json.loads(client.getNimbusConf())["nimbus.thrift.max_buffer_size"] == 16384000
    for call in (
        lambda: client.getTopologyInfo("x-1-1"),
        lambda: client.getTopologyInfoWithOpts("x-1-1", storm.GetInfoOptions()),
        lambda: client.getTopologyPageInfo("x-1-1", "600", False),
        lambda: client.getComponentPageInfo("x-1-1", "c", "600", False),
        lambda: client.getSupervisorPageInfo("s", None, False),
        lambda: client.getTopologyConf("x-1-1"),
        lambda: client.getTopology("x-1-1"),
        lambda: client.getUserTopology("x-1-1"),
        lambda: client.killTopology("x"),
        lambda: client.killTopologyWithOpts("x", storm.KillOptions(wait_secs=0)),
        lambda: client.activate("x"),
        lambda: client.deactivate("x"),
        lambda: client.rebalance("x", storm.RebalanceOptions()),
    ):
        with pytest.raises(storm.NotAliveException, match=r"x|supervisor"):
            call()
    for call in (
        lambda: newer.getTopologySummary("x-1-1"),
        lambda: newer.getTopologyInfoByName("x"),
    ):
        with pytest.raises(load_idl().NotAliveException):
            call()


def test_refused_methods_say_why(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    for call in (
        lambda: client.debug("x", "", True, 10.0),
        lambda: client.uploadNewCredentials("x", storm.Credentials(creds={})),
    ):
        with pytest.raises(TApplicationException, match="is not served: ") as caught:
            call()
        assert caught.value.type == TApplicationException.UNKNOWN_METHOD


def test_what_declares_no_exception_says_not_alive_all_the_same(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    for call in (
        lambda: client.setLogConfig("x", storm.LogConfig()),
        lambda: client.getLogConfig("x"),
        lambda: client.getComponentPendingProfileActions("x", "c", 0),
    ):
        with pytest.raises(TApplicationException, match="NotAlive: topology 'x'"):
            call()


def test_a_name_that_cannot_be_is_refused(nimbus: NimbusThread) -> None:
    client = nimbus.thrift_client()
    assert client.isTopologyNameAllowed("word-count_1.2") is True
    for name in ("", "a b", "a/b", "12345", "null", "x" * 201, "é", None):
        with pytest.raises(storm.AuthorizationException):
            client.isTopologyNameAllowed(name)


@pytest.mark.parametrize("user", ["x;touch p", "`id`", "$(id)", "a\nb", "a\0b", "../x", "x" * 300])
def test_no_user_name_reaches_a_command(nimbus: NimbusThread, user: str) -> None:
    with pytest.raises(storm.AuthorizationException, match="not a user name"):
        nimbus.thrift_client().getTopologyHistory(user)


def test_secrets_are_not_in_any_conf(start_nimbus: Callable[..., NimbusThread]) -> None:
    nimbus = start_nimbus(
        storm__zookeeper__auth__scheme="digest", storm__zookeeper__auth__payload="me:planted-secret"
    )
    text = nimbus.thrift_client().getNimbusConf()
    assert (
        "planted-secret" not in text and json.loads(text)["storm.zookeeper.auth.scheme"] == "digest"
    )


def test_what_is_wrong_is_said_before_anything_is_stored(
    nimbus: NimbusThread, tmp_path: Path
) -> None:
    client = nimbus.thrift_client()
    location = upload(client, jar(tmp_path))
    text = upload(client, b"no archive at all")
    before = sorted(path.name for path in (nimbus.home / "nimbus" / nimbus.id / "blobs").rglob("*"))
    no_spout = topology()
    no_spout.spouts = {}
    unknown_input = topology()
    unknown_input.bolts = {"b": storm.Bolt(bolt_object=topology().spouts["s"].spout_object, common=storm.ComponentCommon(
        inputs={storm.GlobalStreamId(componentId="nobody", streamId="default"): storm.Grouping(all=storm.NullStruct())},
        streams={},
    ))}  # fmt: skip
    cases = [
        ("a/b", location, "{}", topology(), "letters, digits"),
        ("x", location, "{", topology(), "not valid JSON"),
        ("x", location, "[]", topology(), "must be a JSON object"),
        ("x", location, json.dumps({"topology.workers": "many"}), topology(), "topology.workers"),
        ("x", location, "{}", no_spout, "no spout"),
        ("x", location, "{}", unknown_input, "nobody"),
        ("x", text, "{}", topology(), "neither zip"),
        ("x", "0" * 32, "{}", topology(), "no uploaded archive"),
        ("x", location, "{}", None, "without a topology"),
    ]
    for name, where, conf, struct_, why in cases:
        with pytest.raises(storm.InvalidTopologyException, match=why):
            client.submitTopology(name, where, conf, struct_)
    with pytest.raises(storm.InvalidTopologyException, match="credentials"):
        creds = storm.Credentials(creds={"k": "v"})
        client.submitTopologyWithOpts(
            "x", location, "{}", topology(), storm.SubmitOptions(initial_status=1, creds=creds)
        )
    # Unknown conf keys are warnings on this port. Then there is no Dagster here, which is not the
    # client's fault.
    with pytest.raises(TApplicationException, match="Unavailable: no Dagster is configured"):
        client.submitTopology(
            "x", location, json.dumps({"topology.wrokers": 1, "mine": 2}), topology()
        )
    after = sorted(path.name for path in (nimbus.home / "nimbus" / nimbus.id / "blobs").rglob("*"))
    assert after == before


def test_followers_read_and_name_the_leader(start_nimbus: Callable[..., NimbusThread]) -> None:
    leader = start_nimbus()
    follower = start_nimbus("n2", leads=False)
    client = follower.thrift_client()
    named = client.getLeader()
    assert named.isLeader and named.port == leader.port
    assert {(row.port, row.isLeader) for row in client.getClusterInfo().nimbuses} == {
        (leader.port, True),
        (follower.port, False),
    }
    for call in (
        client.beginFileUpload,
        lambda: client.beginCreateBlob("k", None),
        lambda: client.submitTopology("x", "0" * 32, "{}", topology()),
        lambda: client.killTopology("x"),
        lambda: client.rebalance("x", storm.RebalanceOptions()),
        lambda: client.deleteBlob("k"),
    ):
        with pytest.raises(TApplicationException, match=f"leader 127.0.0.1:{leader.port}"):
            call()


def test_a_frame_over_the_limit_ends_its_connection_and_nothing_else(
    start_nimbus: Callable[..., NimbusThread],
) -> None:
    nimbus = start_nimbus(nimbus__thrift__max_buffer_size=100_000)
    client = nimbus.thrift_client()
    location = client.beginFileUpload()
    client.uploadChunk(location, b"x" * 99_000)
    with nimbus.connect() as link:
        link.sendall(struct.pack("!i", 100_001))
        assert link.recv(1) == b""
    client.finishFileUpload(location)


def test_random_bytes_at_a_real_nimbus(nimbus: NimbusThread) -> None:
    whole = serialize(topology())
    for cut in range(0, len(whole), 7):
        frame = struct.pack("!HBBi", 0x8001, 0, 1, 14) + b"submitTopology" + struct.pack("!i", 1)
        frame += b"\x0c\x00\x04" + whole[:cut] + b"\xff" * 5
        with nimbus.connect() as link:
            link.sendall(struct.pack("!i", len(frame)) + frame)
            link.shutdown(socket.SHUT_WR)
            while link.recv(65536):
                pass
    nimbus.await_thrift(leading=False)


def test_readers_show_the_code_and_conf_that_run_after_an_upgrade(
    start_nimbus: Callable[..., NimbusThread],
) -> None:
    """Thrift and REST; the blobs of the former code are gone, so that whoever still looks at them
    fails.
    """
    nimbus = start_nimbus()
    record = RunFile.read(RunFile.path_of(nimbus.home, "nimbus", nimbus.id))
    assert record is not None
    blobs = LocalBlobStore(nimbus.home / "nimbus" / nimbus.id / "blobs")
    with (
        StormClusterState.open(nimbus.conf) as cluster,
        closing(nimbus.thrift_client(ours=True)) as client,
    ):
        world = World(cluster, blobs, dict(nimbus.conf.values))
        world.supervisor("s1")
        conf = {"topology.workers": 2, "topology.master.single.worker": True}
        topology_id = world.submit("wc", conf={**conf, "my.key": "old"})
        world.upload("new", conf={**conf, "my.key": "new"}, archive=pack_archive("new"))
        lifecycle.gray_upgrade(world.context(), "wc", Selection(number=1), handle="new")
        lifecycle.complete_upgrade(world.context(), "wc")
        code_dir = world.named().code_dir
        assert code_dir != topology_id
        for key in (jar_key(topology_id), conf_key(topology_id), code_key(topology_id)):
            blobs.delete(key)
        world.run_workers(topology_id)
        eventually(
            lambda: json.loads(client.getTopologyConf(topology_id))["my.key"] == "new",
            timeout=60,
            ignore=(Exception,),
        )
        assert (
            json.loads(client.getTopologyPageInfo(topology_id, ":all-time", True).topology_conf)[
                "my.key"
            ]
            == "new"
        )
        assert (
            set(client.getTopology(topology_id).bolts)
            > set(client.getUserTopology(topology_id).bolts)
            == {"split", "count"}
        )
        assert client.getTopologyInfo(topology_id).replication_count == 1
        assert [each.replication_count for each in client.getClusterInfo().topologies] == [1]
        with httpx.Client(base_url=f"http://127.0.0.1:{record.ports['http']}") as http:
            page = http.get(f"/api/v1/topology/{topology_id}").raise_for_status().json()
            assert page["configuration"]["my.key"] == "new"
            for path in (
                f"/api/v1/topology/{topology_id}/component/split",
                f"/api/v1/topology/{topology_id}/visualization",
                "/v1/topologies/wc/placement?task=1",
            ):
                http.get(path).raise_for_status()
