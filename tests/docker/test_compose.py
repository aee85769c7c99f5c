"""What can be said of ``docker/`` without an engine: files parse, commands exist, conf is valid,
all is closed by default.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import storm_dagster
from storm_dagster.host.conf_files import load_cluster_conf

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {
    name: service
    for name, service in SERVICES.items()
    if service["image"].startswith("storm-dagster")
}
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
ONE_SHOT = {"spark-warm", "cli"}


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
    assert {
        "spark",
        "spark-master",
        "spark-worker1",
        "spark-worker2",
        "postgres",
        "dagster-code",
        "dagster-web",
        "dagster-daemon",
        "cli",
        "prometheus",
    } <= SERVICES.keys()


def test_every_dependency_volume_network_and_secret_is_declared() -> None:
    for name, service in SERVICES.items():
        for other in service.get("depends_on", {}):
            assert other in SERVICES, f"{name} depends on {other}"
            assert (
                service["depends_on"][other]["condition"] == "service_healthy" or other in ONE_SHOT
            )
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            known = source in COMPOSE["volumes"] or (source.startswith("./") and source != "./")
            assert known, f"{name} mounts {volume}"
            if source.startswith("./") and source != "./topologies":
                assert (DOCKER / source).is_file(), f"{name} mounts {source}"
        assert set(service["networks"]) <= COMPOSE["networks"].keys()
        assert set(service.get("secrets", [])) <= COMPOSE["secrets"].keys()


STORM = {
    name: s["command"]
    for name, s in SERVICES.items()
    if s.get("command", [""])[0] == "storm-dagster"
}


@pytest.mark.parametrize("service", sorted(STORM))
def test_a_daemon_command_is_one_that_the_command_line_accepts(service: str) -> None:
    from storm_dagster.cli.app import cli

    _, verb, role, *arguments = STORM[service]
    assert verb == "daemon"
    # The file is the container's.
    arguments = [
        str(DOCKER / "workspace.yaml") if part.endswith("workspace.yaml") else part
        for part in arguments
    ]
    daemon = cli.get_command(click.Context(cli), verb)
    assert isinstance(daemon, click.Group)
    command = daemon.get_command(click.Context(daemon), role)
    assert command is not None, f"{role} is not a daemon"
    command.make_context(role, arguments, resilient_parsing=False)


def test_dagster_commands_exist() -> None:
    from importlib.metadata import entry_points

    scripts = {entry.name for entry in entry_points(group="console_scripts")}
    used = {s["command"][0] for name, s in SERVICES.items() if "command" in s and name != "cli"}
    assert used <= scripts


def test_the_shared_conf_is_valid() -> None:
    conf = load_cluster_conf(DOCKER)
    assert conf["topology.min.replication.count"] == 2
    assert [seed.split(":")[0] for seed in conf["nimbus.seeds"]] == ["nimbus1", "nimbus2"]
    megabytes = len(conf["supervisor.slots.ports"]) * conf["worker.memory.size"] / 2**20
    for name in ("supervisor1", "supervisor2", "supervisor3"):
        limit = int(SERVICES[name]["mem_limit"].removesuffix("m"))
        assert limit >= megabytes + 256, f"{name}: its slots and itself do not fit into {limit} MB"


def test_every_service_is_hardened_and_bounded() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and service["pids_limit"], name
        assert service["logging"]["options"]["max-size"], name
        assert (
            "cap_add" not in service
            and "privileged" not in service
            and service.get("user") != "root"
        ), name
        if name not in ONE_SHOT:
            assert (
                service["restart"] == "unless-stopped"
                and service["healthcheck"]["test"]
                and service["cpus"]
            ), name


def test_the_first_command_starts_every_service_that_lasts() -> None:
    wanted, found = ["cli"], {"cli"}
    while wanted:
        wanted += (more := SERVICES[wanted.pop()].get("depends_on", {}).keys() - found)
        found |= more
    assert SERVICES.keys() - {"prometheus"} == found


def test_the_page_upgrades_every_service_that_lasts() -> None:
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    loop = re.search(r"^\$ for service in (.*); do$", page, re.MULTILINE)
    assert loop
    assert sorted(loop[1].split()) == sorted(SERVICES.keys() - ONE_SHOT - {"prometheus"})


@pytest.mark.parametrize(("address", "ends"), [("127.0.0.9", True), ("127.0.0.1", False)])
def test_a_daemon_starts_again_on_another_address(tmp_path: Path, address: str, ends: bool) -> None:
    """The addresses of this machine are what a file says."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "addresses").write_text("127.0.0.1 ")
    for name, text in {
        "hostname": f"cat {tmp_path}/addresses && touch {tmp_path}/read",
        "storm-dagster": "exec sleep $1",
        "sleep": "exec /bin/sleep $([ $1 = 5 ] && echo 0.05 || echo $1)",
    }.items():
        (commands / name).write_text(f"#!/bin/sh\n{text}\n")
        (commands / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    entry = subprocess.Popen(
        [DOCKER / "parts" / "entrypoint", "storm-dagster", "3" if not ends else "300"],
        env=environment,
    )
    while not (tmp_path / "read").exists():
        time.sleep(0.01)
    (tmp_path / "addresses").write_text(f"{address} ")
    assert entry.wait(60) == (-signal.SIGTERM if ends else 0)


def test_the_connect_server_runs_its_jobs_on_the_workers() -> None:
    assert load_cluster_conf(DOCKER)["spark.connect.master"] == "spark://spark-master:7077"
    assert "spark-master" in SERVICES["spark"]["depends_on"]
    for name in ("spark-worker1", "spark-worker2"):
        service = SERVICES[name]
        assert (
            "spark-master" in service["depends_on"]
            and service["image"] == SERVICES["spark"]["image"]
        )
        assert f"storm.local.hostname={name}" in service["command"] and service["hostname"] == name
        port = service["command"][service["command"].index("--port") + 1]
        assert service["healthcheck"]["test"][-3:] == ["tcp", name, port]


def test_only_loopback_is_published_and_inner_networks_reach_nothing() -> None:
    assert all(COMPOSE["networks"][name] == {"internal": True} for name in ("cluster", "database"))
    for name, service in SERVICES.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        if "supervisor" in name or name.startswith(("zk", "spark")):
            assert service["networks"] == ["cluster"], f"{name} has no way to the database or out"


def test_every_service_of_the_cluster_gets_the_secret_in_a_file() -> None:
    conf = load_cluster_conf(DOCKER)
    assert conf["storm.bind.external"] is True
    assert conf["storm.secret.file"] == "/run/secrets/storm_secret"
    for name, service in OURS.items():
        if service["image"].split(":")[0] in ("storm-dagster", "storm-dagster-worker"):
            assert "storm_secret" in service["secrets"], name
        assert not any(
            "PASSWORD" in key and not key.endswith("_FILE")
            for key in service.get("environment", {})
        ), name
    for secret in COMPOSE["secrets"].values():
        assert re.fullmatch(r"\$\{SECRETS:-\./secrets\}/\w+", secret["file"])


def test_the_conf_names_every_service_that_is_called_without_tls() -> None:
    """With a secret, services on other hosts that the conf does not name are sent nothing."""
    named = set(load_cluster_conf(DOCKER)["storm.security.plaintext.peers"])
    called = {
        name
        for name in SERVICES
        if re.fullmatch(r"(zk|nimbus|supervisor)\d+|spark|spark-master|dagster-web", name)
    }
    assert named == called and {"zk3", "nimbus2", "supervisor3"} <= called


def test_what_must_survive_lies_in_volumes() -> None:
    for name in ("zk1", "zk2", "zk3"):
        targets = {volume.split(":")[1] for volume in SERVICES[name]["volumes"]}
        assert targets == {"/data", "/datalog"}, (
            "a transaction log in no volume is lost with the container"
        )
    state = load_cluster_conf(DOCKER)["topology.state.dir"]
    for name in ("supervisor1", "supervisor2", "supervisor3"):
        assert f"state:{state}" in SERVICES[name]["volumes"], "a task that moves finds its state"
    assert "postgres:/var/lib/postgresql/data" in SERVICES["postgres"]["volumes"]


def test_the_image_copies_only_files_that_exist() -> None:
    for line in re.findall(r"^COPY (.+)$", DOCKERFILE, flags=re.M):
        *sources, _target = line.split()
        for source in sources:
            assert (ROOT / source).exists(), source
    for name in (
        "setup",
        "lock",
        "wheelhouse-locks",
        "base/make",
        *(f"parts/{part.name}" for part in (DOCKER / "parts").iterdir()),
    ):
        assert os.access(DOCKER / name, os.X_OK), f"docker/{name} is not executable"


def test_images_have_the_version_and_the_user_of_the_repository() -> None:
    version = storm_dagster.__version__
    for name, service in SERVICES.items():
        image = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", service["image"])
        assert image.partition(":")[2] == version, name
    (uid,) = re.findall(r"^ARG UID=(\d+)$", DOCKERFILE, flags=re.M)
    assert f"uid={uid}\n" in (DOCKER / "setup").read_text(encoding="utf-8")
    assert DOCKERFILE.count("\nUSER storm\n") == 5, "every image runs as it"


def pins_of(lock: Path) -> dict[str, tuple[str, list[str]]]:
    """Normalized name -> version and hashes; each line of the lock belongs to one of them."""
    text = lock.read_text(encoding="utf-8").replace("\\\n", "")
    pins: dict[str, tuple[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        pin, *options = line.split()
        name, _, version = pin.partition("==")
        pins[canonicalize_name(name.partition("[")[0])] = (version, options)
    return pins


def test_the_locked_versions_are_those_that_the_package_asks_for() -> None:
    locked = pins_of(DOCKER / "requirements.lock")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "dependencies"
    ]
    beside = (DOCKER / "requirements-cluster.txt").read_text(encoding="utf-8").splitlines()
    for requirement in map(Requirement, [*declared, *(x for x in beside if x[:1] != "#")]):
        version, _ = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is locked to {version}"


def test_every_locked_package_has_hashes_and_workers_have_the_same() -> None:
    locked = pins_of(DOCKER / "requirements.lock")
    for name, (version, options) in locked.items():
        assert version and options, f"{name} has no hash: run docker/lock"
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", option) for option in options), name
    workers = pins_of(DOCKER / "requirements-worker.lock")
    asked = (DOCKER / "requirements-worker.txt").read_text(encoding="utf-8").splitlines()
    names = {canonicalize_name(Requirement(x).name) for x in asked if x[:1] != "#"}
    assert names <= workers.keys() <= locked.keys()
    assert workers == {name: locked[name] for name in workers}


def test_images_install_only_what_has_a_locked_hash() -> None:
    setup = (DOCKER / "setup").read_text(encoding="utf-8")
    installs = re.findall(r"pip (?:install|wheel) (?:\\\n|.)+", DOCKERFILE + setup)
    of_packages = [each for each in installs if "--no-deps" not in each]
    assert len(of_packages) == 3, "two images, and the wheelhouse"
    assert all("--require-hashes -r " in each for each in of_packages)


def test_a_wheel_that_was_built_here_is_added_to_its_own_pin(tmp_path: Path) -> None:
    published, built = tmp_path / "a_b-1.0-py3-none-any.whl", tmp_path / "c_d-2.0-py3-none-any.whl"
    published.write_bytes(b"published")
    built.write_bytes(b"built")
    digests = [hashlib.sha256(each.read_bytes()).hexdigest() for each in (published, built)]
    lock = f"# by docker/lock\na-b==1.0 \\\n    --hash=sha256:{digests[0]}\nc-d==2.0 \\\n    --hash=sha256:{'0' * 64}\n"
    (tmp_path / "locks").mkdir()
    (tmp_path / "locks" / "x.lock").write_text(lock)
    subprocess.run(
        [sys.executable, DOCKER / "wheelhouse-locks", tmp_path, tmp_path / "locks" / "x.lock"],
        check=True,
        timeout=60,
    )
    pins = pins_of(tmp_path / "x.lock")
    assert pins["a-b"] == ("1.0", [f"--hash=sha256:{digests[0]}"])
    assert sorted(pins["c-d"][1]) == sorted(
        [f"--hash=sha256:{'0' * 64}", f"--hash=sha256:{digests[1]}"]
    )


@pytest.mark.parametrize(
    ("secret", "said"), [("", "there is no secret"), ("short", "is weak"), ("a" * 64, "is weak")]
)
def test_setup_refuses_a_missing_or_weak_secret_with_one_line(
    tmp_path: Path, secret: str, said: str
) -> None:
    env = {**os.environ, "STORM_SECRET": secret, "SECRETS": str(tmp_path / "none")}
    done = subprocess.run(
        [str(DOCKER / "setup")], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout
    assert (
        said in done.stderr and "STORM_SECRET=$(openssl rand -hex 32) docker/setup" in done.stderr
    )


def test_dagster_yaml_and_workspace_parse() -> None:
    assert yaml.safe_load((DOCKER / "dagster.yaml").read_text(encoding="utf-8"))
    (server,) = yaml.safe_load((DOCKER / "workspace.yaml").read_text(encoding="utf-8"))["load_from"]
    command = SERVICES["dagster-code"]["command"]
    assert server["grpc_server"]["socket"] == command[command.index("--socket") + 1]
    assert server["grpc_server"]["location_name"] == load_cluster_conf(DOCKER)["dagster.location"]


def test_setup_tags_images_with_the_version_of_the_package() -> None:
    """The script reads the version out of a file of the package, without running Python."""
    (line,) = re.findall(r"^version=.*$", (DOCKER / "setup").read_text("utf-8"), flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", f'{line}; echo "$version"'], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.strip() == storm_dagster.__version__
