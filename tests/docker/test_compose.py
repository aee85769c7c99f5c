"""What can be said of ``docker/`` without an engine: files parse, commands exist, conf is valid."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
import yaml

from storm_dagster.model.conf import load_cluster_conf

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict] = COMPOSE["services"]


def test_the_production_shape_is_complete() -> None:
    assert {
        "zk1",
        "zk2",
        "zk3",
        "nimbus1",
        "nimbus2",
        "supervisor1",
        "supervisor2",
        "supervisor3",
    } <= SERVICES.keys()
    assert {"spark-placement", "spark-topologies", "postgres"} <= SERVICES.keys()
    assert {"dagster-code", "dagster-webserver", "dagster-daemon"} <= SERVICES.keys()


def test_every_dependency_and_volume_is_declared() -> None:
    for name, service in SERVICES.items():
        for other in service.get("depends_on", []):
            assert other in SERVICES, f"{name} depends on {other}"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith((".", "/")) or source in COMPOSE["volumes"], f"{name} mounts {volume}"


STORM = {name: s["command"] for name, s in SERVICES.items() if s.get("command", [""])[0] == "storm-dagster"}


@pytest.mark.parametrize("service", sorted(STORM))
def test_a_daemon_command_is_one_that_the_command_line_accepts(service: str) -> None:
    from storm_dagster.cli.app import cli

    _, verb, *arguments = STORM[service]
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None, f"{verb} is no verb"
    command.make_context(verb, list(arguments), resilient_parsing=False)


def test_dagster_commands_exist() -> None:
    from importlib.metadata import entry_points

    scripts = {entry.name for entry in entry_points(group="console_scripts")}
    used = {s["command"][0] for s in SERVICES.values() if "command" in s}
    assert used <= scripts


def test_the_shared_conf_is_valid() -> None:
    conf = load_cluster_conf(DOCKER)
    assert conf["topology.min.replication.count"] == 2
    assert [seed.split(":")[0] for seed in conf["nimbus.seeds"]] == ["nimbus1", "nimbus2"]


def test_every_service_of_ours_gets_the_secret_and_only_its_user_reads_it() -> None:
    conf = load_cluster_conf(DOCKER)
    assert conf["storm.bind.external"] is True
    (secret,) = COMPOSE["secrets"]
    assert COMPOSE["secrets"][secret] == {"environment": "STORM_SECRET"}
    assert conf["storm.secret.file"] == f"/run/secrets/{secret}"
    uid = re.search(r"useradd .*--uid (\d+)", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
    assert uid is not None
    for name, service in SERVICES.items():
        if service["image"].startswith("storm-dagster"):
            (given,) = service["secrets"]
            assert (given["source"], given["uid"], given["mode"]) == (secret, uid[1], 0o400), name


def test_the_image_copies_only_files_that_exist() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    for line in re.findall(r"^COPY (.+)$", text, flags=re.M):
        *sources, _target = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source


def test_dagster_yaml_and_workspace_parse() -> None:
    assert yaml.safe_load((DOCKER / "dagster.yaml").read_text(encoding="utf-8"))
    workspace = yaml.safe_load((DOCKER / "workspace.yaml").read_text(encoding="utf-8"))
    assert workspace["load_from"][0]["grpc_server"]["location_name"] == "storm"
