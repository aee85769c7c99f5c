"""ZooKeeper's nodes belong to the cluster alone when it has a user there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient
from kazoo.exceptions import NoAuthError

from storm_dagster.model import paths
from storm_dagster.model.conf import default_conf
from storm_dagster.model.errors import Conflict, InvalidRequest
from storm_dagster.security.settings import zookeeper_payload
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.root import close_top, secure_root
from storm_dagster.zk.session import ZkSession
from storm_dagster.zk.storm_cluster_state import StormClusterState, open_session
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

pytestmark = pytest.mark.zookeeper
SECRET = "a-secret-planted-for-tests-4711"
USER = "storm:planted-zookeeper-password"


def secured(zk_conf: dict[str, Any], user: str = USER) -> dict[str, Any]:
    return {**zk_conf, "storm.zookeeper.auth.payload": user}


def test_an_outsider_neither_reads_nor_writes(
    zk_conf: dict[str, Any], zk_connect: Callable[..., ZkSession]
) -> None:
    with StormClusterState.open(secured(zk_conf), create_root=True) as mine:
        mine.state.create_node("/tasks/wc-1-1", b"table")
        mine.state.set_ephemeral_node("/workers/wc-1-1/s1-6900", b"worker")
        mine.state.transaction().create("/topology/wc-1-1", b"base").commit()
        for outsider in (zk_connect(), zk_connect(auth="storm:another-password")):
            state = ZooKeeperClusterState(outsider)
            for path in (
                paths.CLUSTER_ID,
                "/tasks/wc-1-1",
                "/topology/wc-1-1",
                "/workers/wc-1-1/s1-6900",
            ):
                with pytest.raises(InvalidRequest, match="credentials"):
                    state.get_data(path)
                with pytest.raises(InvalidRequest, match="credentials"):
                    state.set_data(path, b"forged")
            with pytest.raises((InvalidRequest, Conflict)):
                state.transaction().create(paths.NIMBUS_MASTER, b"me:1", ephemeral=True).commit()
            with pytest.raises(InvalidRequest, match="credentials"):
                state.delete_node("/tasks")
        assert mine.state.get_data("/tasks/wc-1-1") == b"table"


def test_the_user_is_shown_again_in_a_new_connection(zk_conf: dict[str, Any]) -> None:
    with StormClusterState.open(secured(zk_conf), create_root=True) as mine:
        mine.session.drop_link()
        assert mine.cluster_id() and mine.state.get_data(paths.CLUSTER_ID)
    with StormClusterState.open(secured(zk_conf)) as again:
        assert again.cluster_id()


def test_an_open_root_is_refused_once_a_user_is_configured(zk_conf: dict[str, Any]) -> None:
    with StormClusterState.open(zk_conf, create_root=True):
        pass
    with pytest.raises(Conflict, match=r"world:anyone.*zookeeper secure"):
        StormClusterState.open(secured(zk_conf))
    with StormClusterState.open(zk_conf) as unchanged:
        assert unchanged.cluster_id()


def test_a_payload_of_another_form_is_refused(zk_conf: dict[str, Any]) -> None:
    for wrong in ("storm", "storm:", ":p"):
        with pytest.raises(InvalidRequest, match="user:password") as refused:
            StormClusterState.open(secured(zk_conf, wrong))
        assert wrong not in refused.value.message.replace("user:password", "") or wrong == "storm"


def test_a_secret_alone_gives_a_user(
    zk_conf: dict[str, Any], zk_connect: Callable[..., ZkSession]
) -> None:
    """Whoever may write to ZooKeeper decides where clients send their requests and what supervisors
    run.
    """
    with StormClusterState.open({**zk_conf, "storm.secret": SECRET}, create_root=True) as mine:
        mine.state.create_node("/tasks/wc-1-1", b"table")
        with pytest.raises(InvalidRequest, match="credentials"):
            ZooKeeperClusterState(zk_connect()).set_data("/tasks/wc-1-1", b"forged")
    assert SECRET not in str(zookeeper_payload({"storm.secret": SECRET}))
    assert zookeeper_payload({"storm.secret": SECRET, "storm.zookeeper.auth.payload": USER}) == USER


def test_an_empty_file_of_users_leaves_no_node_open(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.touch(mode=0o600)
    file.write_text("\n")
    conf = {"storm.zookeeper.auth.file": str(file)}
    with pytest.raises(InvalidRequest, match="users is empty: write a line user:password"):
        zookeeper_payload(conf)
    # A user of a secret remains when the last other one was removed from the file.
    alone = zookeeper_payload({"storm.secret": SECRET})
    assert zookeeper_payload({**conf, "storm.secret": SECRET}) == alone


def test_an_existing_tree_is_closed_and_follows_the_secret(
    tmp_path: Path, zk_conf: dict[str, Any]
) -> None:
    with StormClusterState.open(zk_conf, create_root=True) as before:
        before.state.create_node("/tasks/wc-1-1", b"table")
    file = tmp_path / "secret"
    for lines in ([SECRET], [SECRET + "-new", SECRET], [SECRET + "-new"]):
        file.touch(mode=0o600)
        file.write_text("\n".join(lines))
        conf = {**zk_conf, "storm.secret.file": str(file)}
        session = open_session({**default_conf(), **conf})
        # The first time half of it, as if it had been killed.
        if len(lines) == 1 and lines == [SECRET]:
            with pytest.raises(KeyboardInterrupt):
                secure_root(session, _interrupt)
        secure_root(session)
        assert secure_root(session) == 0
        session.close()
        with StormClusterState.open(conf) as mine:
            assert mine.state.get_data("/tasks/wc-1-1") == b"table"
    with (
        pytest.raises(InvalidRequest, match="credentials"),
        StormClusterState.open(zk_conf) as outsider,
    ):
        outsider.state.get_data("/tasks/wc-1-1")


def test_the_top_is_closed_once_and_starts_go_on_after_another_secret(
    tmp_path: Path, zk_conf: dict[str, Any]
) -> None:
    with EmbeddedZooKeeper(tmp_path / "zookeeper", durable=False) as server:
        host, _, port = server.address.rpartition(":")
        conf = {
            **default_conf(),
            **zk_conf,
            "storm.zookeeper.servers": [host],
            "storm.zookeeper.port": int(port),
        }
        outsider = KazooClient(server.address)
        outsider.start(20)
        attempts: list[Callable[[], Any]] = [
            lambda: outsider.set("/zookeeper", b""),
            *(
                lambda top=top: outsider.create(f"{top}/x", b"")
                for top in ("", "/zookeeper", "/zookeeper/quota")
            ),
        ]
        for secret in (SECRET, SECRET, SECRET + "-new"):
            session = open_session({**conf, "storm.secret": secret})
            close_top(session)
            session.close()
            for attempt in attempts:
                with pytest.raises(NoAuthError):
                    attempt()
        outsider.stop()
        outsider.close()


def _interrupt(seen: int) -> None:
    if seen >= 3:
        raise KeyboardInterrupt
