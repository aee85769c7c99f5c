"""Conf keys that went: a conf that has one of them still loads, and a warning says what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.core.submission.validation import check_confs
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.conf import CONF_KEYS, keys_without_meaning, validate_conf
from storm_dagster.model.conf_layers import SUBMITTED_KEYS
from storm_dagster.model.removed_keys import REMOVED_KEYS, RENAMED_KEYS
from storm_dagster.model.topology import decode_topology
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.stage.records import WORD_COUNT

FORMER_VALUES: dict[str, Any] = {
    "worker.gc.threshold": 700,
    "storm.zookeeper.tick.time": 2000,
    "worker.log.backups": 9,
    "topology.state.remember.secs": 600,
    "dagster.repository": "mine",
    "topology.submitted.keys": ["topology.workers"],
    "supervisor.health.check.dir": "/etc/checks",
    "dagster.history.retention.ticks.hours": 24,
    "dagster.metrics.retention.hours": 720,
    "nimbus.impersonation.acl": {},
}
"""A value of each key that the release before accepted."""


def only(warnings: list[str] | tuple[str, ...], key: str) -> str:
    (warning,) = [text for text in warnings if f"{key} is no longer a conf key" in text]
    return warning


def test_no_removed_key_is_known_by_another_table() -> None:
    assert FORMER_VALUES.keys() == REMOVED_KEYS.keys()
    assert not REMOVED_KEYS.keys() & CONF_KEYS.keys()
    assert not REMOVED_KEYS.keys() & keys_without_meaning().keys()
    assert RENAMED_KEYS.keys() <= REMOVED_KEYS.keys()
    assert set(RENAMED_KEYS.values()) <= CONF_KEYS.keys()


@pytest.mark.parametrize("key", FORMER_VALUES)
def test_a_cluster_conf_with_it_loads(key: str, tmp_path: Path) -> None:
    value = FORMER_VALUES[key]
    (tmp_path / "storm.yaml").write_text(json.dumps({key: value, "topology.workers": 3}))
    of_file = load_cluster_conf(tmp_path)
    assert REMOVED_KEYS[key] in only(of_file.warnings, key)
    assert str(tmp_path / "storm.yaml") in only(of_file.warnings, key)
    assert key not in of_file.values and of_file["topology.workers"] == 3
    of_option = load_cluster_conf(None, {key: value})
    assert only(of_option.warnings, key).startswith("-c: ") and key not in of_option.values


@pytest.mark.parametrize("unknown", ["error", "warn"], ids=["command line", "Thrift"])
@pytest.mark.parametrize("key", FORMER_VALUES)
def test_a_topology_with_it_is_accepted(key: str, unknown: Any) -> None:
    former = {key: FORMER_VALUES[key]}
    plain = decode_topology(json.dumps(WORD_COUNT))
    name, component = next(iter(plain.spouts.items()))
    spouts = {**plain.spouts, name: component.model_copy(update={"conf": former})}
    spec = plain.model_copy(update={"conf": former, "spouts": spouts})
    conf, checked, warnings = check_confs(former, spec, "the uploaded conf", unknown)
    assert key not in conf and key not in checked.conf
    assert key not in checked.spouts[name].conf
    assert len([text for text in warnings if REMOVED_KEYS[key] in text]) == 3


def test_a_renamed_key_counts_under_its_new_name(tmp_path: Path) -> None:
    former = {"supervisor.health.check.dir": "/etc/checks"}
    conf, _ = validate_conf(former, source="storm.yaml")
    assert conf == {"storm.health.check.dir": "/etc/checks"}
    both, _ = validate_conf({"storm.health.check.dir": "/new", **former}, source="storm.yaml")
    assert both == {"storm.health.check.dir": "/new"}
    (tmp_path / "storm.yaml").write_text(json.dumps(former))
    overridden = load_cluster_conf(tmp_path, {"storm.health.check.dir": "/newer"})
    assert overridden["storm.health.check.dir"] == "/newer"


def test_the_command_line_shows_the_warnings(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "storm.yaml").write_text(json.dumps(FORMER_VALUES))
    done = run_cli("conf", "--json", "-c", "worker.gc.threshold=7", home=home).check()
    for key in FORMER_VALUES:
        assert [text for text in done.document["warnings"] if REMOVED_KEYS[key] in text]
    assert not FORMER_VALUES.keys() & done.document["conf"].keys()
    health = done.document["conf"]["storm.health.check.dir"]
    assert (health["value"], health["origin"]) == ("/etc/checks", str(home / "storm.yaml"))
    shown = run_cli("conf", "-c", "worker.gc.threshold=7", home=home).check()
    assert "warning: -c: worker.gc.threshold is no longer a conf key" in shown.err


def test_dev_shows_the_warnings(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text(json.dumps(FORMER_VALUES))
    done = run_cli("dev", "--json", "--dry-run", "--ports", "auto", home=tmp_path).check()
    assert done.document["dry_run"] is True
    for key in FORMER_VALUES:
        assert f"{key} is no longer a conf key" in done.err


@pytest.mark.parametrize("role", ["nimbus", "supervisor"])
def test_the_log_file_of_a_daemon_has_the_warnings(role: str, tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text(json.dumps(FORMER_VALUES))
    log = tmp_path / "logs" / f"{role}-x1.log"
    nowhere = ("-c", "storm.zookeeper.servers=['127.0.0.1:1']", "-c", "supervisor.worker.spares=0")
    where = ("--home", str(tmp_path), "-c", f"{role}.http.port=0")
    process = subprocess.Popen(
        [sys.executable, "-m", "storm_dagster", "daemon", role, "--id", "x1", *nowhere, *where],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(
            lambda: all(
                f"{key} is no longer a conf key" in log.read_text() for key in FORMER_VALUES
            ),
            60,
            "the warnings",
            ignore=(FileNotFoundError,),
        )
    finally:
        process.kill()
        process.wait(patience(30))


def test_the_field_of_stored_code_is_not_a_conf_key() -> None:
    assert SUBMITTED_KEYS in REMOVED_KEYS
