"""Several nimbuses on one root: exactly one acts, blobs are copied, nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from storm_dagster.blobstore import LocalBlobStore
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.client.http import NimbusClient
from storm_dagster.model import paths
from storm_dagster.model.errors import Corrupt, KeyNotFound, Unavailable
from storm_dagster.model.records import StormBase, encode_record
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.session import ZkSession
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper
from storm_rigs.servers.ports import free_ports
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.conf import zookeeper_conf
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = pytest.mark.zookeeper

KEY = "wc-1-100-stormjar.jar"
CODE = ["wc-1-100-stormcode.ser", "wc-1-100-stormconf.ser", KEY]


def leaders(*nimbuses: NimbusThread) -> list[str]:
    found = []
    for nimbus in nimbuses:
        try:
            if nimbus.leads():
                found.append(nimbus.id)
        except (httpx.HTTPError, AssertionError):
            continue
    return found


def store_of(nimbus: NimbusThread) -> LocalBlobStore:
    return LocalBlobStore(nimbus.folder / "blobs")


def make_active(state: ZooKeeperClusterState, topology_id: str = "wc-1-100") -> None:
    base = StormBase(
        name=topology_id.rsplit("-", 2)[0],
        launch_time_secs=1,
        status="ACTIVE",
        workers=1,
        executors={},
        token="t",
    )
    state.create_node(paths.topology(topology_id), encode_record(base))


@pytest.fixture
def state(zk_connect: Callable[..., ZkSession]) -> Callable[[], ZooKeeperClusterState]:
    return lambda: ZooKeeperClusterState(zk_connect())


def test_one_leads_and_followers_answer_reads_only(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    first = stage.nimbus("n1").await_leading()
    second, third = stage.nimbus("n2"), stage.nimbus("n3")
    for nimbus in (second, third):
        eventually(
            lambda n=nimbus: n.health()["leader_http"] == first.health()["leader_http"],
            what="the follower to know its leader",
            ignore=(AssertionError, httpx.HTTPError),
        )
    assert leaders(first, second, third) == ["n1"]
    refused = httpx.put(second.url + "/v1/blobs/k", content=b"x", trust_env=False)
    assert (
        refused.status_code == 503
        and first.health()["address"] in refused.json()["error"]["message"]
    )
    for path in ("/v1/uploads", "/v1/submit"):
        assert httpx.post(second.url + path, json={"name": "x"}, trust_env=False).status_code == 503
    rows = eventually(
        lambda: (
            (found := second.get("/v1/cluster").json()["nimbuses"]) and len(found) == 3 and found
        ),
        what="three nimbuses",
    )
    assert [row["leader"] for row in rows] == [True, False, False] and all(
        row["http"] for row in rows
    )
    tree = state()
    assert (
        len(tree.get_children(paths.NIMBUS_SLAVE))
        == len(tree.get_children(paths.NIMBUS_SLAVE_DETAIL))
        == 2
    )


def test_blobs_are_pushed_registered_and_survive_the_leader(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    first = stage.nimbus("n1", topology__min__replication__count=2).await_leading()
    second = stage.nimbus("n2", topology__min__replication__count=2).await_serving()
    with NimbusBlobClient(first.url) as blobs:
        for key in CODE:
            blobs.put(key, key.encode())
        blobs.put("staging.tok.conf", b"{}")
    # Acknowledged means: on both.
    assert store_of(second).keys() == sorted([*CODE, "staging.tok.conf"])
    tree = state()
    make_active(tree)
    assert sorted(tree.get_children(paths.BLOBSTORE)) == sorted(CODE), (
        "only topology blobs are registered"
    )
    eventually(lambda: len(tree.get_children(paths.blob(KEY))) == 2, what="both registrations")
    assert {holder.rpartition("-")[2] for holder in tree.get_children(paths.blob(KEY))} == {"1"}

    epoch = first.health()["epoch"]
    first.stop()
    second.await_leading()
    assert second.health()["epoch"] == epoch + 1 and second.health()["missing"] == 0
    with NimbusBlobClient(second.url) as blobs:
        assert blobs.read(KEY) == KEY.encode() and blobs.read("staging.tok.conf") == b"{}"


def test_missing_copies_are_refused_unless_degraded_is_allowed(stage: Stage) -> None:
    only = stage.nimbus("n1", topology__max__replication__wait__time__sec=1).await_leading()
    with NimbusBlobClient(only.url, min_replication=2, deadline_secs=0.1) as blobs:
        with pytest.raises(Unavailable, match="2 were asked for"):
            blobs.put("k", b"x")
    with NimbusBlobClient(only.url, min_replication=2, allow_degraded=True) as blobs:
        assert blobs.put("k", b"x").size == 1


@pytest.mark.long
def test_the_error_about_missing_copies_names_the_missing_hosts_in_time(
    stage: Stage,
) -> None:
    """One nimbus was killed: a client that waits 30 s for an answer learns which one, though 60 s
    are configured.
    """
    seeds = [f"127.0.0.1:{port}" for port in free_ports(2)]
    more = {"topology__min__replication__count": 2, "nimbus__seeds": seeds}
    only = stage.nimbus(
        "n1", nimbus__http__port=int(seeds[0].rpartition(":")[2]), **more
    ).await_leading()
    with NimbusClient([only.url]) as client:
        path = f"/v1/uploads/{client.post('/v1/uploads')['handle']}/conf"
        with pytest.raises(Unavailable, match=f"http://{seeds[1]} of nimbus.seeds is not there"):
            client.request(
                "PUT", path, content=b"{}", headers={"X-Content-SHA256": sha256(b"{}").hexdigest()}
            )


def test_a_late_follower_fetches_everything(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    first = stage.nimbus("n1").await_leading()
    with NimbusBlobClient(first.url) as blobs:
        for key in CODE:
            blobs.put(key, key.encode())
        blobs.put("upload.h.archive", b"archive")
        blobs.put("upload.again.archive", b"archive")
        blobs.put("wc-1-100-placement.json", b"{}")
    tree = state()
    make_active(tree)
    second = stage.nimbus("n2").await_serving()
    wanted = sorted([*CODE, "upload.again.archive", "upload.h.archive", "wc-1-100-placement.json"])
    eventually(lambda: store_of(second).keys() == wanted, what="the follower's blobs")
    assert store_of(second).read(KEY) == KEY.encode()
    eventually(lambda: len(tree.get_children(paths.blob(KEY))) == 2, what="both registrations")


def test_copies_of_an_unfinished_submission_reach_a_late_nimbus(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    """Its topology is not visible yet. A session that ends takes the announcement of a copy along,
    not the copy.
    """
    first = stage.nimbus("n1").await_leading()
    stage.nimbus("n2").await_serving()
    with NimbusBlobClient(first.url, min_replication=2) as blobs:
        blobs.put(KEY, b"one")
    tree = state()
    holders = eventually(
        lambda: (found := tree.get_children(paths.blob(KEY))) and len(found) == 2 and found,
        what="both registrations",
    )
    for holder in holders:
        tree.delete_node(paths.blob(KEY, holder))
    eventually(
        lambda: sorted(tree.get_children(paths.blob(KEY))) == sorted(holders),
        what="both registrations again",
    )
    third = stage.nimbus("n3").await_serving()
    eventually(lambda: store_of(third).exists(KEY), what="a copy on the third")
    eventually(lambda: len(tree.get_children(paths.blob(KEY))) == 3, what="its registration")


def test_an_update_reaches_a_nimbus_that_was_away(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    first = stage.nimbus("n1").await_leading()
    second = stage.nimbus("n2").await_serving()
    tree = state()
    key = "lib.jar"  # a blob of users, since the code of a live topology does not change
    with NimbusBlobClient(first.url, min_replication=2) as blobs:
        blobs.put(key, b"one")
    second.stop()
    with NimbusBlobClient(first.url) as blobs:
        blobs.put(key, b"two")
        blobs.put(key, b"two")  # the same content is no new version
    assert [holder.rpartition("-")[2] for holder in tree.get_children(paths.blob(key))] == ["2"]
    assert store_of(second).read(key) == b"one"
    stage.nimbus("n2").await_serving()
    eventually(lambda: store_of(second).read(key) == b"two", what="the new content")


def test_a_deletion_reaches_the_followers(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    first = stage.nimbus("n1").await_leading()
    second = stage.nimbus("n2").await_serving()
    with NimbusBlobClient(first.url, min_replication=2) as blobs:
        blobs.put(KEY, b"x")
        assert store_of(second).exists(KEY)
        blobs.delete(KEY)
    tree = state()
    assert (
        tree.get_children(paths.BLOBSTORE) == []
        and tree.get_children(paths.BLOBSTORE_MAX_SEQUENCE) == []
    )
    eventually(lambda: not store_of(second).exists(KEY), what="the deletion on the follower")


def test_a_returning_leader_does_not_restore_a_deleted_blob(stage: Stage) -> None:
    first = stage.nimbus("n1").await_leading()
    second = stage.nimbus("n2").await_serving()
    with NimbusBlobClient(first.url, min_replication=2) as blobs:
        blobs.put("lib.jar", b"of a user")
    second.stop()
    with NimbusBlobClient(first.url) as blobs:
        blobs.delete("lib.jar")
    first.stop()
    second = stage.nimbus("n2").await_leading()
    assert store_of(second).exists("lib.jar"), "nobody has told it"
    with NimbusBlobClient(second.url) as blobs:
        blobs.put("upload.m.conf", b"what a follower takes after it, in the order of keys")
    first = stage.nimbus("n1").await_serving()
    eventually(lambda: store_of(first).exists("upload.m.conf"), 60, "the leader's blobs")
    assert not store_of(first).exists("lib.jar")


def test_the_one_with_all_blobs_leads(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    """The leader dies; a nimbus that lacks code declines in favour of the one that has it."""
    first = stage.nimbus("n1").await_leading()
    with NimbusBlobClient(first.url) as blobs:
        for key in CODE:
            blobs.put(key, key.encode())
    make_active(state())
    first.stop()
    # n3 holds nothing and starts first; n1 has all.
    third = stage.nimbus("n3").await_serving()
    again = stage.nimbus("n1")
    again.await_leading()
    eventually(lambda: store_of(third).exists(KEY), what="n3 to have fetched the code")
    assert leaders(third, again) == ["n1"]


def test_what_is_damaged_is_fetched_again_and_hides_nothing_else(
    stage: Stage, state: Callable[[], ZooKeeperClusterState], caplog: pytest.LogCaptureFixture
) -> None:
    """First a copy, then the registration of one blob of three."""
    first = stage.nimbus("n1").await_leading()
    with NimbusBlobClient(first.url) as blobs:
        for key in CODE:
            blobs.put(key, key.encode())
    tree = state()
    make_active(tree)
    second = stage.nimbus("n2").await_serving()
    store = store_of(second)
    eventually(lambda: store.keys() == sorted(CODE), what="the follower's blobs")
    (store.directory / "objects" / store.meta(KEY).sha256).write_bytes(b"damaged")
    with pytest.raises(Corrupt):
        store.read(KEY)
    eventually(
        lambda: store.read(KEY) == KEY.encode(), what="a sound copy", ignore=(Corrupt, KeyNotFound)
    )

    tree.set_data(paths.blob_max_sequence(CODE[0]), b"{")
    third = stage.nimbus("n3").await_serving()
    eventually(lambda: store_of(third).keys() == sorted(CODE[1:]), what="what is not damaged")
    assert paths.blob_max_sequence(CODE[0]) in caplog.text


@pytest.mark.long
def test_code_that_nobody_holds_blocks_no_one(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    """The topology is degraded; it is not deleted, and leadership is not blocked for ever."""
    first = stage.nimbus("n1").await_leading()
    tree = state()
    make_active(tree)
    first.stop()
    second = stage.nimbus("n2").await_leading()
    assert second.health()["missing"] == 3 and second.health()["status"] == "degraded"
    rows = second.get("/v1/topologies").json()["topologies"]
    assert [(row["name"], row["degraded"]) for row in rows] == [("wc", True)]
    assert tree.exists(paths.topology("wc-1-100"))


def test_a_lost_session_ends_leadership_at_once(
    stage: Stage, state: Callable[[], ZooKeeperClusterState]
) -> None:
    """Somebody removes the leader's node; the leader is deposed, follows, and may lead again."""
    first = stage.nimbus("n1").await_leading()
    epoch = first.health()["epoch"]
    tree = state()
    tree.delete_node(paths.NIMBUS_MASTER)
    eventually(lambda: (first.health()["epoch"] or 0) > epoch, what="a new epoch")
    stale = httpx.put(
        first.url + "/v1/blobs/k",
        content=b"x",
        headers={"X-Storm-Epoch": str(epoch)},
        trust_env=False,
    )
    assert stale.status_code == 409 and stale.json()["error"]["type"] == "Fenced"


def test_replicas_of_an_old_epoch_are_refused(stage: Stage) -> None:
    first = stage.nimbus("n1").await_leading()
    second = stage.nimbus("n2").await_serving()
    epoch = first.health()["epoch"]
    for claimed, status in ((epoch - 1, 409), (epoch + 1, 409)):
        answer = httpx.put(
            second.url + "/v1/replicas/k",
            content=b"x",
            headers={"X-Storm-Epoch": str(claimed), "X-Content-SHA256": "0" * 64},
            trust_env=False,
        )
        assert answer.status_code == status
    own = httpx.delete(
        first.url + "/v1/replicas/k", headers={"X-Storm-Epoch": str(epoch)}, trust_env=False
    )
    assert own.status_code == 409, "a leader takes no copies of itself"
    assert store_of(second).keys() == []


def test_shared_store_needs_no_copies(stage: Stage, tmp_path: Path) -> None:
    shared = {"nimbus.blobstore.class": "fsspec", "blobstore.dir": f"file://{tmp_path}/shared"}
    first = stage.nimbus("n1", shared).await_leading()
    with NimbusBlobClient(first.url, min_replication=3) as blobs:
        blobs.put(KEY, b"x")
    second = stage.nimbus("n2", shared).await_serving()
    assert second.get(f"/v1/blobs/{KEY}").content == b"x"
    first.stop()
    second.await_leading()
    with NimbusBlobClient(second.url) as blobs:
        blobs.delete(KEY)
        assert not blobs.exists(KEY)


def test_a_leader_cut_off_from_zookeeper_takes_no_writes(stage: Stage, tmp_path: Path) -> None:
    """The server stands still; the leader stops acting before its session ends, and leads again
    later.
    """
    with EmbeddedZooKeeper(tmp_path / "zk", durable=False) as server:
        stage.conf |= zookeeper_conf(server.address)
        nimbus = stage.nimbus().await_leading()
        epoch = nimbus.health()["epoch"]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            eventually(lambda: not nimbus.leads(), what="the leader to stop acting")
            refused = httpx.put(
                nimbus.url + "/v1/blobs/k", content=b"x", trust_env=False, timeout=30
            )
            assert refused.status_code == 503 and refused.json()["error"]["type"] == "Unavailable"
            assert nimbus.health()["status"] == "no connection to ZooKeeper"
        finally:
            os.kill(server.pid, signal.SIGCONT)
        nimbus.await_leading()
        assert nimbus.health()["epoch"] >= epoch
        with NimbusBlobClient(nimbus.url) as blobs:
            assert blobs.put("k", b"x").size == 1
        nimbus.stop()


def test_failed_initialization_drops_leadership_and_logs_the_reason(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from storm_dagster.nimbus import daemon

    genuine = daemon._initialize
    failures = [Unavailable("the blob store is not mounted"), RuntimeError("surprise")]

    def failing(nimbus: Nimbus, epoch: int, sync_wake: threading.Event) -> None:
        if failures:
            raise failures.pop(0)
        genuine(nimbus, epoch, sync_wake)

    monkeypatch.setattr(daemon, "_initialize", failing)
    nimbus = stage.nimbus().await_leading()
    assert nimbus.health()["epoch"] == 3, "two epochs were given up"
    assert (
        "not mounted" in caplog.text
        and "surprise" in caplog.text
        and "tries again in 2 s" in caplog.text
    )


@pytest.mark.long
def test_the_last_copy_of_a_blob_outlives_a_leader_without_it(stage: Stage) -> None:
    """Stored while the other was away; its holder comes back as a follower, long after blobs like
    it are dropped.
    """
    expired = {"nimbus.inbox.jar.expiration.secs": 1}
    first = stage.nimbus("n1", expired).await_leading()
    with NimbusBlobClient(first.url) as blobs:
        blobs.put("mylib.jar", b"the only copy")
        blobs.put("gone.jar", b"deleted while its holder is away")
        blobs.put("upload.h.archive", b"of a submission that nobody goes on with")
    first.stop()
    second = stage.nimbus("n2", expired).await_leading()
    with NimbusBlobClient(second.url) as blobs:
        with pytest.raises(KeyNotFound):
            blobs.delete("gone.jar")
        blobs.put("other.jar", b"so that the leader has blobs of its own")
        # Both hold something in common: without that nothing is ever dropped.
        blobs.put("upload.h.conf", b"x")
        first = stage.nimbus("n1", expired).await_serving()
        eventually(lambda: blobs.exists("mylib.jar"), timeout=60, what="the copy at the new leader")
        assert blobs.read("mylib.jar") == b"the only copy"
        store = LocalBlobStore(first.folder / "blobs")

        def dropped() -> bool:
            blobs.put("other.jar", os.urandom(8))  # It looks when a blob is registered, too.
            return not store.exists("gone.jar") and not store.exists("upload.h.archive")

        eventually(
            dropped,
            timeout=60,
            what="the end of what was deleted and of an old upload",
            interval=0.5,
        )
    assert store.read("mylib.jar") == b"the only copy"
