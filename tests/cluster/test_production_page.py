"""docs/production.md, followed as it stands: nine hosts with a secret, TLS and closed ZooKeeper
nodes.

Hosts are loopback addresses and folders of this machine (:mod:`storm_rigs.hosts`). What root
installs is left out; so is the page's PostgreSQL, in whose place stands one with a port of its own.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.testing.waiting import eventually
from storm_rigs.hosts import Hosts
from storm_rigs.postgres import PostgresServer

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(900),
]

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "production.md").read_text(encoding="utf-8")
NAMES = ("zk1", "zk2", "zk3", "spark1", "nimbus1", "nimbus2", "host1", "host2", "dagster1")
CLIENT = "dagster1"
HANDED_OUT = ("storm.yaml", "certify.sh", "distribute.sh")


def files() -> dict[str, str]:
    """Name -> text of the blocks whose first line is a file's name."""
    blocks = re.findall(r"^```\w+\n# (\S+\.\w+)\n(.*?)^```", PAGE, flags=re.S | re.M)
    return dict(blocks)


def commands(section: str) -> list[tuple[str, str]]:
    """(host, command) of a section's console blocks, in order; what root does is left out but for
    ``systemctl``.
    """
    (text,) = re.findall(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, flags=re.S | re.M)
    found = re.findall(r"^(\w+)@(\w+)\$ (.*)$", text, flags=re.M)
    return [
        (host, command)
        for user, host, command in found
        if user != "root" or command.startswith("systemctl ")
    ]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    postgres = PostgresServer()
    try:
        postgres.create()
        postgres.start()
        with Hosts(tmp_path, NAMES, Path(sys.executable).parent, postgres.environment) as made:
            place_files(made, postgres.port)
            yield made
    finally:
        postgres.stop()
        shutil.rmtree(postgres.folder, ignore_errors=True)


def place_files(hosts: Hosts, postgres_port: int) -> None:
    texts = files()
    for name in NAMES:
        folder = "/var/lib/zookeeper" if name.startswith("zk") else "/var/lib/storm_dagster"
        for each in (folder, "/etc/storm_dagster"):
            hosts.hosts[name].path(each).mkdir(parents=True, mode=0o700)
        if name.startswith("zk"):
            hosts.write(name, "/etc/zookeeper/zoo.cfg", texts["zoo.cfg"])
    for file in HANDED_OUT:
        hosts.write(CLIENT, f"/home/{file}", texts[file], handed_out=True)
    for file in ("definitions.py", "workspace.yaml", "dagster.yaml", "dagster.env"):
        hosts.write(CLIENT, f"/srv/dagster/{file}", texts[file].replace("5432", str(postgres_port)))
    for file, text in texts.items():
        if file.endswith(".service"):
            hosts.unit(file, text)
    (code,) = re.findall(
        r"```python\n(# hello\.py\n.*?)```", (DOCS / "index.md").read_text(), flags=re.S
    )
    hosts.write(CLIENT, "/home/hello.py", code)


def ask(hosts: Hosts, *words: str) -> dict[str, Any]:
    """The JSON document of a verb, asked from where the page asks."""
    command = f"storm-dagster {' '.join(words)} --conf-dir /etc/storm_dagster --json"
    return json.loads(hosts.run(CLIENT, command))


def follow(hosts: Hosts, section: str) -> dict[str, str]:
    """Command -> what it printed."""
    return {command: hosts.run(name, command) for name, command in commands(section)}


def test_the_page_as_it_stands(hosts: Hosts) -> None:
    follow(hosts, "ZooKeeper")
    follow(hosts, "The conf")
    follow(hosts, "Start")

    def healthy() -> bool:
        hosts.revive()
        status = ask(hosts, "status")
        registered = {row["host"] for row in status["supervisors"]}
        addresses = {hosts.hosts[name].address for name in ("host1", "host2")}
        if not (status["leader"] and status["healer"] and registered == addresses):
            return False
        return ask(hosts, "doctor")["ok"]

    eventually(
        healthy,
        300,
        "a leader, both supervisors, an armed sensor, Spark",
        interval=1,
        ignore=(AssertionError,),
    )
    said = follow(hosts, "Check the cluster")
    print(*said.values(), sep="\n")
    found = {
        (row["check"], row["state"], untimed(row["found"]))
        for row in ask(hosts, "doctor")["findings"]
    }
    assert found_on_the_page(hosts) <= found

    submitted, shown = follow(hosts, "The first submission").values()
    print(submitted, shown, sep="\n")
    runs(hosts, "hello")

    # Restarted at once, it may lead again.
    hosts.kill(leading_host(hosts), "storm@nimbus")
    hosts.run(
        CLIENT,
        "storm-dagster submit hello.py --name again --conf-dir /etc/storm_dagster",
        timeout=300,
    )
    assert ask(hosts, "status")["leader"]
    runs(hosts, "again")
    runs(hosts, "hello")
    assert ask(hosts, "doctor")["ok"]
    ask(hosts, "kill", "again", "-w", "0")

    follow(hosts, "Stop")
    eventually(lambda: not hosts.left(), 30, "the end of every process", ignore=(AssertionError,))


def untimed(text: str) -> str:
    """Without what differs from one machine to the next."""
    return re.sub(r"in \d+ ms|Spark [\d.]+$", "", text)


def found_on_the_page(hosts: Hosts) -> set[tuple[str, str, str]]:
    """(check, state, what was found) of the rows that the page shows."""
    (text,) = re.findall(r"```text\n(ZooKeeper .*?)```", PAGE, flags=re.S)
    rows = (re.split(r" {2,}", line) for line in text.splitlines())
    return {(check, state, untimed(hosts.addresses(found))) for check, state, found in rows}


def leading_host(hosts: Hosts) -> str:
    rows = ask(hosts, "status")["nimbuses"]
    (leader,) = [row for row in rows if row["leader"]]
    (name,) = [host.name for host in hosts.hosts.values() if f"{host.address}:" in leader["http"]]
    return name


def runs(hosts: Hosts, topology: str) -> None:
    def all_run() -> bool:
        tasks = ask(hosts, "show", topology)["tasks"]
        return bool(tasks) and all(task["status"] == "running" for task in tasks)

    eventually(all_run, 120, f"every task of {topology} running", interval=0.5)
