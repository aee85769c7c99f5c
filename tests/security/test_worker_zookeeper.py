"""A worker's user in ZooKeeper does what its topology needs, and nothing to others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError
from kazoo.security import make_digest_acl

from storm_dagster.api import TopologyBuilder
from storm_dagster.host.files import make_home_private
from storm_dagster.model import paths
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import (
    Assignment,
    ComponentTasks,
    EpochRecord,
    StateHome,
    StormBase,
    TaskBeats,
    TaskTable,
    WorkerNode,
    WorkerSlot,
    encode_record,
)
from storm_dagster.model.slot import Slot
from storm_dagster.security.settings import zookeeper_payload
from storm_dagster.security.zookeeper_access import PAYLOAD, ZooKeeperUsers
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.root import secure_root
from storm_dagster.zk.storm_cluster_state import StormClusterState, open_session
from storm_rigs.servers.blob_server import serve_blobs, zip_bytes
from storm_rigs.servers.ports import free_port
from storm_rigs.stage.supervisor_processes import SupervisorRig

pytestmark = pytest.mark.zookeeper
SECRET = "a-secret-planted-for-tests-4711"
MINE, OTHER = "mine-1-1", "other-2-2"
TABLE = TaskTable(
    components={
        "numbers": ComponentTasks(type="spout", tasks="1"),
        "attack": ComponentTasks(type="bolt", tasks="2"),
        "__acker": ComponentTasks(type="bolt", tasks="3"),
        "__topology_master": ComponentTasks(type="bolt", tasks="4"),
    }
)
NODE = WorkerNode(pid=1, token="t", version=0, tasks="1-4", started_ms=1, status="running")


def publish(cluster: StormClusterState, topology_id: str, port: int = 6900) -> None:
    """What a submission writes."""
    base = StormBase.model_validate(
        {
            "name": "wc",
            "launch_time_secs": 1,
            "status": "ACTIVE",
            "workers": 1,
            "executors": {},
            "token": "t",
        }
    )
    assignment = Assignment(
        topology_id=topology_id,
        code_dir=topology_id,
        node_host={"s1": "127.0.0.1"},
        workers=(WorkerSlot(node="s1", host="127.0.0.1", port=port, tasks="1-4"),),
        task_start_secs={},
        timestamp_ms=1,
    )
    for path, data in {
        paths.tasks(topology_id): encode_record(TABLE),
        paths.taskbeats(topology_id): encode_record(
            TaskBeats(topology_id=topology_id, topology_master=4)
        ),
        paths.task_errors(topology_id): b"",
        paths.metrics(topology_id): b"",
        paths.workers(topology_id): b"",
        paths.gray_upgrade(topology_id): b"",
        paths.gray_upgrade(topology_id, "conf"): b"",
        paths.gray_upgrade(topology_id, "upgrading_workers"): b"",
        paths.assignment(topology_id): encode_record(assignment),
        f"{paths.assignment(topology_id)}/part-0": b"part",
        paths.topology(topology_id): encode_record(base),
        paths.state_home(topology_id): encode_record(StateHome(marker="")),
        paths.log_levels(topology_id): b"{}",
    }.items():
        cluster.state.create_node(path, data)


@pytest.fixture
def cluster(zk_conf: dict[str, Any]) -> Iterator[StormClusterState]:
    """A cluster with a secret and two topologies."""
    with StormClusterState.open({**zk_conf, "storm.secret": SECRET}, create_root=True) as cluster:
        cluster.state.set_data(
            paths.EPOCH, encode_record(EpochRecord(leader="h:1", http="http://h:2"))
        )
        publish(cluster, MINE)
        publish(cluster, OTHER)
        yield cluster


def worker_conf(zk_conf: dict[str, Any], topology_id: str = MINE) -> dict[str, Any]:
    users = ZooKeeperUsers.of({"storm.secret": SECRET})
    assert users is not None
    return {**zk_conf, **users.worker_conf(topology_id)}


def tree(cluster: StormClusterState, path: str = "/") -> list[str]:
    names = cluster.state.find_children(path) or []
    return [path, *(node for name in names for node in tree(cluster, f"{path.rstrip('/')}/{name}"))]


def allowed(client: KazooClient, node: str) -> str:
    """Letters of what the client may do to the node (read, write, create, delete, change the
    ACL).
    """
    tries: dict[str, Callable[[], object]] = {
        "r": lambda: client.get(node),
        "w": lambda: client.set(node, b"forged"),
        "c": lambda: client.create(f"{node}/planted", b""),
        "a": lambda: client.set_acls(node, [make_digest_acl("thief", "p", all=True)]),
    }
    done = ""
    for letter, attempt in tries.items():
        try:
            attempt()
        except NoAuthError:
            continue
        done += letter
    if "c" in done:
        try:
            client.delete(f"{node}/planted")
            done += "d"
        except NoAuthError:
            pass
    return done


def test_a_workers_user_does_what_a_worker_does(
    zk_conf: dict[str, Any], cluster: StormClusterState
) -> None:
    with StormClusterState.open(worker_conf(zk_conf)) as mine:
        found = mine.read_assignment(MINE)
        assert (
            found is not None and mine.storm_base(MINE) and mine.read_tasks(MINE) and mine.epoch()
        )
        version = found[1].version
        mine.write_worker_node(MINE, "s1", 6900, NODE, assignment_version=version)
        changed = NODE.model_copy(update={"status": "starting"})
        mine.write_worker_node(MINE, "s1", 6900, changed, assignment_version=version)
        assert mine.live_workers(MINE) == cluster.live_workers(MINE) == {("s1", 6900): changed}
        beats = TaskBeats(topology_id=MINE, topology_master=4, version=version)
        mine.write_beats(MINE, beats, assignment_version=version)
        mine.register_metrics(MINE, 1.0, ["attack:n"], assignment_version=version)
        home = mine.change_state_home(
            MINE, lambda now: now.model_copy(update={"marker": "m"}), assignment_version=version
        )
        assert cluster.read_state_home(MINE) == home and mine.read_log_levels(MINE).loggers == {}
        for number in range(12):
            mine.report_error(MINE, 2, f"error {number}", component="attack", time=number)
        assert len(cluster.errors_by_component(MINE)["attack"]) == 10
        # The supervisor writes into the same folders.
        cluster.report_error(MINE, 2, "of the supervisor", component="attack", time=99)
        assert mine.remove_worker_node(MINE, "s1", 6900)
    assert cluster.load_view().corrupt == {}


def test_a_workers_user_reaches_its_own_nodes_alone(
    zookeeper_server: str, zk_conf: dict[str, Any], cluster: StormClusterState
) -> None:
    with (
        StormClusterState.open(worker_conf(zk_conf)) as mine,
        StormClusterState.open(worker_conf(zk_conf, OTHER)) as his,
    ):
        for each, topology_id in ((mine, MINE), (his, OTHER)):
            each.write_worker_node(topology_id, "s1", 6900, NODE, assignment_version=0)
            each.report_error(topology_id, 2, "an error", component="c", time=1)
        lines = worker_conf(zk_conf)[PAYLOAD].split("\n")
        client = KazooClient(zookeeper_server, auth_data=[("digest", line) for line in lines])
        client.start(10)
        try:
            got = {
                path: allowed(client, f"{zk_conf['storm.zookeeper.root']}{path}")
                for path in tree(cluster)
            }
        finally:
            client.stop()
            client.close()
    assert {path: letters for path, letters in got.items() if letters} == {
        paths.CLUSTER_ID: "r",
        paths.EPOCH: "r",
        paths.assignment(MINE): "r",
        f"{paths.assignment(MINE)}/part-0": "r",
        paths.topology(MINE): "r",
        paths.log_levels(MINE): "r",
        paths.state_home(MINE): "rw",
        paths.tasks(MINE): "r",
        paths.taskbeats(MINE): "rw",
        paths.metrics(MINE): "rw",
        paths.workers(MINE): "rcd",
        f"{paths.workers(MINE)}/s1-6900": "rw",
        # It makes the folder of a component, and what is in it.
        paths.task_errors(MINE): "rc",
        paths.task_errors(MINE, "c"): "rcd",
        f"{paths.task_errors(MINE, 'c')}/e0000000000": "rw",
    }


def test_what_a_worker_closes_hides_nothing_of_others(
    zookeeper_server: str, zk_conf: dict[str, Any], cluster: StormClusterState
) -> None:
    """A node that the cluster cannot read must not keep the leader from reading the cluster."""
    lines = worker_conf(zk_conf)[PAYLOAD].split("\n")
    own = make_digest_acl("me", "p", all=True)
    client = KazooClient(
        zookeeper_server, auth_data=[*(("digest", line) for line in lines), ("digest", "me:p")]
    )
    client.start(10)
    root = zk_conf["storm.zookeeper.root"]
    try:
        for closed in (paths.worker(MINE, "s1", 6900), f"{paths.task_errors(MINE)}/c"):
            client.create(f"{root}{closed}", b"", [own])
            client.create(f"{root}{closed}/deeper", b"", [own])
    finally:
        client.stop()
        client.close()
    view = cluster.load_view()
    assert set(view.topologies) == {OTHER} and list(view.corrupt) == [
        paths.worker(MINE, "s1", 6900)
    ]
    assert view.held_slots == {("s1", 6900)}
    assert cluster.errors_by_component(MINE) == {}
    assert secure_root(cluster.session) == 0
    with pytest.raises(Conflict, match="new children"):
        cluster.state.delete_node(paths.workers(MINE))


def test_an_older_tree_is_opened_to_workers(zk_conf: dict[str, Any]) -> None:
    """Nodes of an earlier release are the cluster's alone."""
    conf = {**zk_conf, "storm.secret": SECRET}
    with StormClusterState.open(conf, create_root=True) as cluster:
        publish(cluster, MINE)
        cluster.state.delete_node(paths.state_home(MINE))
        user, _, password = str(zookeeper_payload(conf)).partition(":")
        owner = [make_digest_acl(user, password, all=True)]
        for path in tree(cluster):
            node = cluster.session.full(path)
            cluster.session.call(
                lambda client, node=node: client.set_acls_async(node, owner), "an ACL"
            )
    with pytest.raises(Conflict, match="zookeeper secure"):
        StormClusterState.open(conf)
    session = open_session({**default_conf(), **conf})
    try:
        with pytest.raises(KeyboardInterrupt):
            secure_root(session, _interrupt)
        with pytest.raises(Conflict, match="zookeeper secure"):
            StormClusterState.open(conf)
        assert secure_root(session) > 0 and secure_root(session) == 0
    finally:
        session.close()
    with (
        StormClusterState.open(conf) as cluster,
        StormClusterState.open(worker_conf(zk_conf)) as mine,
    ):
        mine.write_worker_node(MINE, "s1", 6900, NODE, assignment_version=0)
        mine.change_state_home(
            MINE, lambda now: now.model_copy(update={"marker": "m"}), assignment_version=0
        )
        assert cluster.read_state_home(MINE).marker == "m"


def _interrupt(seen: int) -> None:
    if seen >= 20:
        raise KeyboardInterrupt


def test_without_a_user_nodes_are_as_before(zk_conf: dict[str, Any]) -> None:
    with StormClusterState.open(zk_conf, create_root=True) as cluster:
        publish(cluster, MINE)
        full = cluster.session.full(paths.workers(MINE))
        acl, _ = cluster.session.call(lambda client: client.get_acls_async(full), "an ACL")
        assert [each.id.scheme for each in acl] == ["world"]


# -- a real worker of another user -----------------------------------------------------------------

_CODE = '''
import json, os, pathlib, threading, time
from kazoo.client import KazooClient
from kazoo.exceptions import KazooException
from storm_dagster.api import Bolt, Spout

HOME = pathlib.Path(os.environ["HOME"])


class Numbers(Spout):
    outputs = ["n"]

    def initialize(self, conf, context):
        self.n = 0

    def next_tuple(self):
        if self.n < 100:
            self.emit([self.n], tup_id=self.n)
            self.n += 1


class Attack(Bolt):
    """Sums, and on order tries everything with all that it finds."""

    def initialize(self, conf, context):
        self.conf, self.sum = conf, 0
        threading.Thread(target=self.attack, daemon=True).start()

    def process(self, tup):
        self.sum += tup.values[0]

    def attack(self):
        while self.sum < 4950 or not (HOME / "orders").exists():
            time.sleep(0.05)
        orders = json.loads((HOME / "orders").read_text())
        spec = json.loads(pathlib.Path("SPEC.json").read_text())
        texts, read = [json.dumps(spec), json.dumps(dict(os.environ)), json.dumps(self.conf, default=str)], []
        for path in orders["files"]:
            try:
                texts.append(pathlib.Path(path).read_text(errors="replace"))
                read.append(path)
            except OSError:
                pass
        lines = spec["conf"]["storm.zookeeper.auth.payload"].split("\\n")
        client = KazooClient(orders["zookeeper"], auth_data=[("digest", line) for line in lines])
        client.start(30)
        done = []
        for node in orders["nodes"]:
            for name, attempt in {
                "read": lambda: client.get(node),
                "written": lambda: client.set(node, b"forged"),
                "created": lambda: client.create(node + "/forged"),
                "ACL": lambda: client.set_acls(node, client.get_acls(node)[0]),
                "deleted": lambda: client.delete(node),
            }.items():
                try:
                    attempt()
                except KazooException:
                    continue
                done.append([name, node])
        found = {"uid": os.getuid(), "sum": self.sum, "texts": texts, "read": read, "done": done}
        (HOME / "found.tmp").write_text(json.dumps(found))
        (HOME / "found.tmp").rename(HOME / "found")
'''


@pytest.fixture
def home() -> Iterator[Path]:
    """A HOME that other users can reach, and an interpreter for them beside it."""
    top = Path(tempfile.mkdtemp(prefix="storm-users-", dir="/tmp"))
    top.chmod(0o755)
    python = top / "python"
    python.mkdir()
    before = os.umask(0o077)
    mounted = False
    try:
        if subprocess.call(["mount", "--bind", sys.base_prefix, python]):
            pytest.skip("no interpreter can be shown to other users here")
        mounted = True
        yield make_home_private(top / "home")
    finally:
        os.umask(before)
        if mounted:
            subprocess.check_call(["umount", "-l", python])
        shutil.rmtree(top)


@pytest.fixture
def rig(home: Path, zk_conf: dict[str, Any], cluster: StormClusterState) -> Iterator[SupervisorRig]:
    secret = home / "secret"
    secret.write_text(SECRET)
    with serve_blobs() as blobs:
        conf = {
            **zk_conf,
            "storm.secret.file": str(secret),
            "supervisor.run.worker.as.user": True,
            "supervisor.worker.user": "65533",
            "nimbus.seeds": [blobs.url.removeprefix("http://")],
            "supervisor.http.port": 0,
            "supervisor.monitor.frequency.secs": 0.5,
        }
        rig = SupervisorRig(home, conf, cluster, blobs, "")
        yield rig
        rig.stop()


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs processes of other users")
def test_code_of_a_topology_has_no_way_to_others(
    home: Path,
    rig: SupervisorRig,
    zookeeper_server: str,
    zk_conf: dict[str, Any],
    cluster: StormClusterState,
) -> None:
    builder = TopologyBuilder("wc")
    builder.set_spout("numbers", "attack:Numbers", outputs=["n"])
    builder.set_bolt("attack", "attack:Attack", inputs="numbers")
    environment = {
        "PYTHONPATH": os.pathsep.join([sysconfig.get_path("purelib"), *filter(None, sys.path)]),
        "LD_LIBRARY_PATH": str(home.parent / "python" / "lib"),
    }
    conf = {
        "topology.python": str(home.parent / "python" / "bin" / "python3"),
        "topology.environment": environment,
    }
    ports = {MINE: free_port(), OTHER: free_port()}
    for topology_id, port in ports.items():
        found = cluster.read_assignment(topology_id)
        assert found is not None
        slots = tuple(slot.model_copy(update={"port": port}) for slot in found[0].workers)
        moved = encode_record(found[0].model_copy(update={"workers": slots}))
        cluster.state.set_data(paths.assignment(topology_id), moved)
        user = {"topology.submitter.user": "nobody"} if topology_id == MINE else {}
        rig.blobs.put_code(topology_id, {**conf, **user}, zip_bytes({"attack.py": _CODE.encode()}))
        rig.blobs.blobs[f"{topology_id}-stormcode.ser"] = builder.build().to_json()
    rig.supervisor(ports=tuple(ports.values()))

    def running() -> bool:
        live = [cluster.live_workers(each).get(Slot("s1", port)) for each, port in ports.items()]
        return all(each is not None and each.status == "running" for each in live)

    eventually(running, 60, "both topologies")
    nodes = [path for path in tree(cluster) if MINE not in path.split("/")]
    assert paths.worker(OTHER, "s1", ports[OTHER]) in nodes
    own = home / "users" / "65534"
    files = [path for path in sorted(home.rglob("*")) if path.is_file() and not path.is_symlink()]
    (mine,) = (
        path.parent for path in files if path.name == "SPEC.json" and path.stat().st_uid == 65534
    )
    foreign = [str(path) for path in files if not {mine, own} & set(path.parents)]
    assert any(SECRET in Path(path).read_text(errors="replace") for path in foreign)
    assert any(path.endswith("own/SPEC.json") for path in foreign)
    orders = {
        "zookeeper": zookeeper_server,
        "nodes": [cluster.session.full(path) for path in nodes],
        "files": foreign,
    }
    before = {path: cluster.state.get_data(path) for path in nodes}
    (own / "orders.tmp").write_text(json.dumps(orders))
    (own / "orders.tmp").chmod(0o644)
    (own / "orders.tmp").rename(own / "orders")
    eventually((own / "found").exists, 60, "the attack")
    found = json.loads((own / "found").read_text())
    assert (found["uid"], found["sum"]) == (65534, 4950)
    payload = str(zookeeper_payload({"storm.secret": SECRET}))
    assert not [
        text for text in found["texts"] if SECRET in text or payload.partition(":")[2] in text
    ]
    assert found["read"] == []
    assert found["done"] == [
        ["read", cluster.session.full(path)]
        for path in nodes
        if path in (paths.CLUSTER_ID, paths.EPOCH)
    ]
    assert {path: cluster.state.get_data(path) for path in nodes} == before
