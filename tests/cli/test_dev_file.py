"""``HOME/dev.json``: conf and ports of a local cluster, which the next ``dev`` and clients read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.cli.dev.ports import DevPorts, choose_ports
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.endpoints import ClusterFile, DevFile, ZooKeeperTls, cluster_conf
from storm_dagster.model.errors import Corrupt
from storm_dagster.testing.cluster import run_cli

OPTIONS = DevOptions(ports="auto", supervisors=1, slots=1)
CONF = {"topology.workers": 3, "storm.secret": "x" * 64}


def ports_of(home: Path) -> DevPorts:
    return choose_ports(OPTIONS, load_cluster_conf(home), home)


def make_running(home: Path) -> None:
    """The file that only a running cluster has."""
    ClusterFile(zookeeper="127.0.0.1:1", zookeeper_root="/storm").write(home)


def write_former(home: Path, ports: DevPorts) -> None:
    """The two files of the release before."""
    (home / "dev.json").write_text(json.dumps(CONF) + "\n")
    (home / "dev.json").chmod(0o600)
    (home / "ports.json").write_text(json.dumps(ports.to_document()) + "\n")


def test_one_file_of_this_user_alone_has_conf_and_ports(tmp_path: Path) -> None:
    ports = ports_of(tmp_path)
    assert list(tmp_path.iterdir()) == [], "to choose ports remembers nothing"
    DevFile(conf=CONF, ports=ports.to_document()).write(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == "dev.json" and path.stat().st_mode & 0o777 == 0o600
    assert DevFile.read(tmp_path).conf == CONF
    assert ports_of(tmp_path) == ports


def test_a_home_keeps_its_slots_when_its_dagster_changes(tmp_path: Path) -> None:
    conf = load_cluster_conf(tmp_path)
    existing = replace(OPTIONS, own_dagster=False)
    own_ports = ports_of(tmp_path)
    DevFile(conf={}, ports=own_ports.to_document()).write(tmp_path)
    assert DevFile.read(tmp_path).own_dagster
    without = choose_ports(existing, conf, tmp_path)
    assert without == replace(own_ports, webserver=0)
    DevFile(conf={}, ports=without.to_document()).write(tmp_path)
    assert not DevFile.read(tmp_path).own_dagster
    again = ports_of(tmp_path)
    assert again.webserver > 0 and replace(again, webserver=0) == without


def test_only_a_running_cluster_has_that_conf(tmp_path: Path) -> None:
    DevFile(conf=CONF, ports={}).write(tmp_path)
    assert cluster_conf(tmp_path)["topology.workers"] == 1
    make_running(tmp_path)
    conf = cluster_conf(tmp_path)
    assert (conf["topology.workers"], conf["storm.secret"]) == (3, CONF["storm.secret"])
    assert conf.origins["topology.workers"] == str(tmp_path / "dev.json")


def test_stop_keeps_the_file(tmp_path: Path) -> None:
    ports = ports_of(tmp_path)
    DevFile(conf=CONF, ports=ports.to_document()).write(tmp_path)
    make_running(tmp_path)
    run_cli("stop", "--json", home=tmp_path).check()
    assert not (tmp_path / "cluster.json").exists()
    assert DevFile.read(tmp_path).conf == CONF and ports_of(tmp_path) == ports


def test_a_home_of_the_release_before_is_read(tmp_path: Path) -> None:
    ports = ports_of(tmp_path)
    write_former(tmp_path, ports)
    assert ports_of(tmp_path) == ports
    make_running(tmp_path)
    assert cluster_conf(tmp_path)["topology.workers"] == 3, "its dev still runs"
    DevFile(conf={}, ports=ports.to_document()).write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.json", "dev.json"}
    assert ports_of(tmp_path) == ports


def test_a_stopped_home_of_the_release_before_has_its_ports_alone(tmp_path: Path) -> None:
    ports = ports_of(tmp_path)
    write_former(tmp_path, ports)
    (tmp_path / "dev.json").unlink()
    assert ports_of(tmp_path) == ports and DevFile.read(tmp_path).conf == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"conf": [], "ports": {}}', "\udc80"])
def test_a_damaged_file_is_named_and_hinders_no_start(text: str, tmp_path: Path) -> None:
    (tmp_path / "dev.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert ports_of(tmp_path).zookeeper
    make_running(tmp_path)
    with pytest.raises(Corrupt, match=r"dev\.json is damaged .*stop the cluster"):
        cluster_conf(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"zookeeper": 1}', '{"zookeeper": "x"}'])
def test_damaged_former_ports_are_chosen_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "ports.json").write_text(text)
    assert ports_of(tmp_path).zookeeper != 1


def test_clients_speak_tls_as_the_file_of_the_cluster_says(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text(
        "storm.zookeeper.ssl.enable: true\nstorm.zookeeper.ssl.truststore.path: /etc/other.pem\n"
    )
    ClusterFile(zookeeper="127.0.0.1:1", zookeeper_root="/storm").write(tmp_path)
    assert not cluster_conf(tmp_path)["storm.zookeeper.ssl.enable"], "of the release before"
    tls = ZooKeeperTls(ca="/h/authority.pem", certificate="/h/client.pem", key="/h/client.pem")
    ClusterFile(zookeeper="127.0.0.1:1", zookeeper_root="/storm", zookeeper_tls=tls).write(tmp_path)
    conf = cluster_conf(tmp_path)
    assert conf["storm.zookeeper.ssl.enable"] and conf["storm.zookeeper.ssl.hostnameVerification"]
    assert conf["storm.zookeeper.ssl.truststore.path"] == "/h/authority.pem"
    assert conf["storm.zookeeper.ssl.keystore.path"] == "/h/client.pem"
