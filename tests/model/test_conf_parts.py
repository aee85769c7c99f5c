"""Conf files beside storm.yaml: storm.d/*.yaml, merged in the order of their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from storm_dagster.cli.dev.options import DevOptions
from storm_dagster.cli.dev.plan import ClusterPlan
from storm_dagster.cli.dev.ports import choose_ports
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.testing.cluster import run_cli

SECRET = "a-secret-planted-for-tests-4711"


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    """A folder with a conf file and two further ones."""
    (tmp_path / "storm.yaml").write_text(
        "topology.workers: 2\nnimbus.http.port: 1\ntopology.acker.executors: 5\n"
    )
    folder = tmp_path / "storm.d"
    folder.mkdir()
    # Written in another order than that of their names.
    (folder / "20-last.yaml").write_text("topology.workers: 4\n")
    (folder / "10-first.yaml").write_text("topology.workers: 3\nnimbus.http.port: 7\n")
    return folder


def test_parts_win_over_storm_yaml_in_the_order_of_their_names(parts: Path) -> None:
    conf = load_cluster_conf(parts.parent)
    seen = {
        key: (conf[key], Path(conf.origins[key]).name)
        for key in ("topology.workers", "nimbus.http.port", "topology.acker.executors")
    }
    assert seen == {
        "topology.workers": (4, "20-last.yaml"),
        "nimbus.http.port": (7, "10-first.yaml"),
        "topology.acker.executors": (5, "storm.yaml"),
    }
    assert load_cluster_conf(parts.parent, {"topology.workers": 9})["topology.workers"] == 9


def test_parts_need_no_storm_yaml(parts: Path) -> None:
    (parts.parent / "storm.yaml").unlink()
    (parts / "30-empty.yaml").write_text("# nothing yet\n")
    assert load_cluster_conf(parts.parent)["topology.workers"] == 4


def test_a_volume_of_kubernetes_is_read_once(parts: Path) -> None:
    """As a Secret is mounted: links to a hidden folder, which is replaced as a whole."""
    content = parts / "..2026_11_30"
    content.mkdir()
    (content / "secret.yaml").write_text(f"storm.secret: {SECRET}\n")
    (content / "secret.yaml").chmod(0o400)
    (parts / "..data").symlink_to(content.name)
    (parts / "secret.yaml").symlink_to("..data/secret.yaml")
    (parts / ".hidden.yaml").write_text("a: [")
    conf = load_cluster_conf(parts.parent)
    assert conf["storm.secret"] == SECRET
    assert conf.origins["storm.secret"] == str(parts / "secret.yaml")


def test_one_part_alone_is_secret(parts: Path) -> None:
    (parts.parent / "storm.yaml").chmod(0o644)
    secret = parts / "secret.yaml"
    secret.write_text(f"storm.secret: {SECRET}\n")
    secret.chmod(0o644)
    with pytest.raises(InvalidRequest, match=r"storm\.d/secret\.yaml .*chmod 600") as refused:
        load_cluster_conf(parts.parent)
    assert SECRET not in refused.value.message
    secret.chmod(0o600)
    assert load_cluster_conf(parts.parent)["storm.secret"] == SECRET


def test_another_ending_is_a_warning(parts: Path) -> None:
    (parts / "more.yml").write_text("topology.workers: 8\n")
    (parts / "README.md").write_text("what these files are\n")
    conf = load_cluster_conf(parts.parent)
    assert conf["topology.workers"] == 4
    (warning,) = conf.warnings
    assert str(parts / "more.yml") in warning and ".yaml" in warning
    (parts / "more.yml").rename(parts / "MORE.YAML")
    (warning,) = load_cluster_conf(parts.parent).warnings
    assert "MORE.YAML" in warning


def test_the_conf_of_home_is_not_given_on_a_command_line(parts: Path) -> None:
    home = parts.parent
    conf = load_cluster_conf(home, {"topology.workers": 6})
    options = DevOptions(ports="auto")
    ports = choose_ports(options, conf, home)
    plan = ClusterPlan(home, options, conf, ports, conf_dir=None, overrides={})
    given = plan.given_conf()
    # A secret part must not be written into dev.json.
    assert given["topology.workers"] == 6 and "nimbus.http.port" not in given


BROKEN: dict[str, Callable[[Path], object]] = {
    "no YAML": lambda path: path.write_text("storm.secret: [planted\n"),
    "no date": lambda path: path.write_text("a: 2026-02-30 # planted\n"),
    "no number": lambda path: path.write_text("a: 0b_\n"),
    "endless lists": lambda path: path.write_text(f"a: {'[' * 5000}{']' * 5000}\n"),
    "a character that YAML does not allow": lambda path: path.write_text("a: \0planted\n"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "no map": lambda path: path.write_text("- topology.workers\n"),
    "an unknown key": lambda path: path.write_text("topology.wrokers: 3\n"),
    "a wrong type": lambda path: path.write_text("topology.workers: many\n"),
    "a link to nothing": lambda path: path.symlink_to("missing"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_part_stops_the_start_with_one_line(parts: Path, kind: str) -> None:
    path = parts / "15-broken.yaml"
    BROKEN[kind](path)
    with pytest.raises(InvalidRequest) as refused:
        load_cluster_conf(parts.parent)
    assert str(path) in refused.value.message and "\n" not in refused.value.message
    assert "planted" not in refused.value.message


def test_a_conf_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A container engine makes a folder where the file that it mounts does not exist."""
    path = tmp_path / "storm.yaml"
    path.mkdir()
    with pytest.raises(InvalidRequest, match=r"storm\.yaml cannot be read .*directory"):
        load_cluster_conf(tmp_path)
    path.rmdir()
    path.symlink_to("missing")
    with pytest.raises(InvalidRequest, match=r"storm\.yaml cannot be read .*No such file"):
        load_cluster_conf(tmp_path)


def test_a_conf_folder_that_cannot_be_searched_is_not_empty(tmp_path: Path) -> None:
    folder = tmp_path / "conf"
    folder.symlink_to(folder)
    with pytest.raises(
        InvalidRequest, match=r"conf/storm\.yaml cannot be read .*search the folder"
    ):
        load_cluster_conf(folder)


def test_a_part_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "storm.d").write_text("topology.workers: 3\n")
    with pytest.raises(InvalidRequest, match=r"storm\.d cannot be listed .*make it a folder"):
        load_cluster_conf(tmp_path)


def test_the_command_line_shows_the_file_of_each_value(parts: Path) -> None:
    where = ["--conf-dir", str(parts.parent)]
    home = parts.parent / "home"
    rows = run_cli("conf", "--json", *where, home=home).check().document["conf"]
    assert rows["topology.workers"]["origin"] == str(parts / "20-last.yaml")
    assert rows["nimbus.http.port"]["origin"] == str(parts / "10-first.yaml")
    broken = parts / "99-broken.yaml"
    broken.write_text("a: [")
    started = run_cli("daemon", "supervisor", *where, home=home)
    assert started.code == 2 and str(broken) in started.err and not started.out
    assert len(started.err.strip().splitlines()) == 1
    assert not os.path.exists(home / "supervisor")
