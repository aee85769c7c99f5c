"""Faults for the cluster of containers. Each is undone by the function that injects it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from containers import LASTING, PROJECT, ROOT, Containers, Failure
from daemons import check_probes_without_quorum
from watcher import Watcher

Fault = Callable[[], None]
NETWORKS = {
    "postgres": ("database",),
    "dagster-code": ("cluster", "database"),
    "dagster-daemon": ("cluster", "database"),
}
FAULT_SECS = 25.0
"""How long something is paused or cut off: longer than every session."""
DRAINS = "rolling restart of the supervisors"
"""The fault that repeats no number: tasks move while no tuple is under way."""


def all_faults(made: Containers, watcher: Watcher) -> dict[str, Fault]:
    """Name -> fault, in the order in which they are tried."""
    busiest = lambda: watcher.worker_of(1)[0]  # noqa: E731
    targets: dict[str, Callable[[], str]] = {
        "supervisor": busiest,
        "leading nimbus": lambda: made.leader(),
        "leading ZooKeeper": lambda: made.zookeeper_leader(),
        "spark": lambda: "spark",
        "Spark's master": lambda: "spark-master",
        "a Spark worker": lambda: "spark-worker1",
        "postgres": lambda: "postgres",
        "code server": lambda: "dagster-code",
        "webserver": lambda: "dagster-web",
        "Dagster's daemon": lambda: "dagster-daemon",
    }

    def each(how: str, action: Callable[[Containers, str], None]) -> dict[str, Fault]:
        return {
            f"{what} {how}": lambda target=target: action(made, target())
            for what, target in targets.items()
        }

    return {
        **each("killed", kill),
        "a worker killed": lambda: kill_worker(made, watcher),
        "a worker over its memory": lambda: eat_memory(made),
        "a supervisor's disk full 60 s": lambda: fill_disk(made, "supervisor3"),
        "ZooKeeper without quorum 120 s": lambda: lose_quorum(made),
        "down and up again": lambda: down_and_up(made, watcher),
        "rolling restart of all services": lambda: roll(made),
        DRAINS: lambda: drain_supervisors(made),
        "upgrade of all services": lambda: upgrade(made),
        **each("cut off 25 s", cut_off),
        **each("paused 25 s", pause),
    }


def kill(made: Containers, service: str) -> None:
    """``docker kill``; started again after 25 s, as an operator or an orchestrator would."""
    made.docker("kill", made.name(service))
    time.sleep(FAULT_SECS)
    made.docker("start", made.name(service))


def pause(made: Containers, service: str) -> None:
    """All processes of the container stand still."""
    made.docker("pause", made.name(service))
    try:
        time.sleep(FAULT_SECS)
    finally:
        made.docker("unpause", made.name(service))


def cut_off(made: Containers, service: str) -> None:
    """The container loses its networks, and may get other addresses with them."""
    networks = [f"{PROJECT}_{network}" for network in NETWORKS.get(service, ("cluster",))]
    for network in networks:
        made.docker("network", "disconnect", "--force", network, made.name(service))
    try:
        time.sleep(FAULT_SECS)
    finally:
        for network in networks:
            made.docker("network", "connect", "--alias", service, network, made.name(service))


def kill_worker(made: Containers, watcher: Watcher) -> None:
    """``kill -9`` in the supervisor's container."""
    host, _, pid = watcher.worker_of(1)
    made.exec(host, "bash", "-c", f"kill -9 {pid}")


def eat_memory(made: Containers) -> None:
    """One task takes more and more memory until its worker is ended."""
    made.exec("supervisor2", "touch", "/var/lib/storm_state/written/eat")
    time.sleep(15)


def fill_disk(made: Containers, service: str) -> None:
    """HOME of a supervisor has no room (its volume is small in this test)."""
    path = "/var/lib/storm_dagster/fill"
    made.exec(
        service, "bash", "-c", f"dd if=/dev/zero of={path} bs=1M 2>/dev/null; true", timeout=120
    )
    try:
        time.sleep(60)
    finally:
        made.exec(service, "rm", "-f", path)


def lose_quorum(made: Containers) -> None:
    """Two servers of three are away for two minutes, in which no daemon is ready."""
    for service in ("zk1", "zk2"):
        made.docker("kill", made.name(service))
    began = time.monotonic()
    try:
        check_probes_without_quorum(made)
        time.sleep(max(0.0, began + 120 - time.monotonic()))
    finally:
        for service in ("zk1", "zk2"):
            made.docker("start", made.name(service))


def roll(made: Containers) -> None:
    """One service after the other, each when the one before is healthy."""
    for service in LASTING:
        made.compose("restart", service)
        made.wait_healthy(service)


def drain_supervisors(made: Containers) -> None:
    """Each supervisor gets SIGTERM and starts again; it ends when its tasks have moved."""
    for service in (name for name in LASTING if name.startswith("supervisor")):
        since = made.exec(service, "date", "-u", "+%Y-%m-%dT%H:%M:%SZ").strip()
        made.compose("restart", service, timeout=240)
        made.wait_healthy(service)
        text = made.docker("logs", "--since", since, made.name(service))
        last = text.rpartition("the drain is over: ")[2].partition("\n")[0]
        if not last.startswith("all slots are empty"):
            raise Failure(f"{service} ended before its tasks had moved: {last or text[-500:]}")


def down_and_up(made: Containers, watcher: Watcher) -> None:
    """Containers and networks are removed and made again; volumes stay."""
    watcher.close()
    made.compose("down", "--timeout", "30", timeout=240)
    made.compose("up", "-d", timeout=400)
    made.wait_healthy()
    watcher.start()


def upgrade(made: Containers) -> None:
    """Other images under the names of those that run, and the commands of docs/production.md, taken
    from the page.
    """
    page = (ROOT / "docs" / "production.md").read_text(encoding="utf-8")
    loop = next(line for line in page.splitlines() if line.startswith("$ for service in "))
    services = loop.removeprefix("$ for service in ").partition(";")[0].split()
    if sorted(services) != sorted(LASTING):
        raise Failure(f"docs/production.md upgrades {services}, and not {LASTING}")
    secret = made.secret_of("nimbus1")
    made.setup(STORM_SECRET="")
    made.change_images(secrets.token_hex(4))
    before = {service: made.container(service) for service in services}
    for service in services:
        made.compose("up", "-d", "--no-deps", "--wait", service, timeout=300)
    kept = [service for service in services if made.container(service) == before[service]]
    if kept:
        raise Failure(f"still the containers of the former images: {kept}")
    if made.secret_of("nimbus1") != secret:
        raise Failure("docker/setup without STORM_SECRET changed the secret")
