"""docs/production.md, followed as it stands: nine hosts with a secret, TLS and closed ZooKeeper
nodes.

A host is a loopback address and a folder of this machine. What the page names by a host name gets
the address, what it names by an absolute path lies in the folder, ``scp`` copies between folders,
and ``systemctl`` starts what a unit's ``ExecStart`` says. Addresses are drawn at random from 127/8,
so that the page's own ports are free. What root installs is left out; so is the page's PostgreSQL,
in whose place stands one with a port of its own.
"""

from __future__ import annotations

import configparser
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.host.java import java_command
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.embedded import zookeeper_jars
from storm_rigs.servers.postgres import PostgresServer

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


_FOLDERS = ("etc", "var/lib", "srv")
_SCP = """#!/bin/bash
# scp -p FILE storm@HOST:PATH
set -eu
host=${{3#storm@}}; to={root}/${{host%%:*}}; path=${{host#*:}}
cp -p "$2" "$to$path"
case $2 in *.yaml) sed -i -E "s#([ ])/(etc|var/lib)/#\\1$to/\\2/#" "$to$path";; esac
"""
_ZK_SERVER = """#!/bin/bash
# zkServer.sh --config DIR start-foreground, from pyspark's jars
exec {java} -Xmx128m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Dzookeeper.jmx.log4j.disable=true \\
  -cp {jars} org.apache.zookeeper.server.quorum.QuorumPeerMain "$2/zoo.cfg"
"""


@dataclass
class Host:
    """One host."""

    name: str
    address: str
    folder: Path
    services: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    """Unit -> its main process."""

    def path(self, absolute: str) -> Path:
        """Path on this machine of a path of the page."""
        return self.folder / absolute.lstrip("/")


class Hosts:
    """The hosts ``names``, in ``root``; a context manager that ends what it has started.

    ``programs`` holds the programs of ``/opt/storm/bin``. ``environment`` wins over what a unit's
    file sets.
    """

    def __init__(
        self, root: Path, names: Sequence[str], programs: Path, environment: Mapping[str, str]
    ) -> None:
        self.root, self._programs, self._environment = root, programs, dict(environment)
        net = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}"
        self.hosts: dict[str, Host] = {}
        for number, name in enumerate(names, 1):
            address = f"{net}.{number}"
            self.hosts[name] = Host(name, address, root / address)
            (self.hosts[name].folder / "home").mkdir(parents=True)
        self._names = re.compile(rf"\b({'|'.join(names)})\b")
        self._tools = root / "bin"
        self._tools.mkdir()
        jars = os.pathsep.join(map(str, zookeeper_jars()))
        self._tool("scp", _SCP.format(root=root))
        self._tool("zkServer.sh", _ZK_SERVER.format(java=java_command(), jars=jars))
        self._units: dict[str, str] = {}
        self._restarts: Counter[tuple[str, str]] = Counter()

    def _tool(self, name: str, text: str) -> None:
        path = self._tools / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.left():
            try:
                process.kill()
            except psutil.Error:
                continue
        for host in self.hosts.values():
            for child in host.services.values():
                child.wait(patience(30))

    def addresses(self, text: str) -> str:
        """The text with addresses for host names, also in certificates."""
        return self._names.sub(lambda found: self.hosts[found[1]].address, text).replace(
            "DNS:", "IP:"
        )

    def on(self, host: Host, text: str) -> str:
        """The text for ``host``: addresses, programs, and its folders."""
        text = self.addresses(text).replace("/opt/storm/bin/", f"{self._programs}/")
        text = text.replace("/opt/zookeeper/bin/", f"{self._tools}/")
        return re.sub(rf"(?<![\w.:/])/(?={'|'.join(_FOLDERS)})", f"{host.folder}/", text)

    def write(self, name: str, path: str, text: str, *, handed_out: bool = False) -> None:
        """A file of a host; paths in what is ``handed_out`` later are those of whom it is handed
        to.
        """
        host = self.hosts[name]
        place = host.path(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            self.addresses(text) if handed_out else self.on(host, text), encoding="utf-8"
        )

    def unit(self, name: str, text: str) -> None:
        """A unit of systemd, known to all hosts."""
        self._units[name] = text

    def run(self, name: str, command: str, timeout: float = 300.0) -> str:
        """Run a command on a host and return its output; ``AssertionError`` with all of it when it
        fails.
        """
        host = self.hosts[name]
        if command.startswith("systemctl "):
            action, unit = command.split()[1], command.split()[-1]
            self.start(name, unit) if action == "enable" else self.stop(name, unit)
            return ""
        # scp is told the other host's folder, by the tool.
        command = self.addresses(command) if command.startswith("bash ") else self.on(host, command)
        done = subprocess.run(
            ["bash", "-c", command], cwd=host.folder / "home", env=self._environ({}), timeout=timeout,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{name}$ {command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        return done.stdout

    def _environ(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(self._tools), str(self._programs), os.environ["PATH"]])
        return {**os.environ, **more, **self._environment, "PATH": path}

    def _service(self, host: Host, unit: str) -> configparser.SectionProxy:
        template, at, instance = unit.partition("@")
        text = self._units[f"{template}{at}.service"].replace("%i", instance)
        parser = configparser.ConfigParser(interpolation=None)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(self.on(host, text))
        return parser["Service"]

    def start(self, name: str, unit: str) -> None:
        """``systemctl start``, in a session of its own; what it prints goes to
        ``HOST/UNIT.log``.
        """
        host = self.hosts[name]
        service = self._service(host, unit)
        more: dict[str, str] = {}
        if file := service.get("EnvironmentFile"):
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            more = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
        folder = Path(service.get("WorkingDirectory", str(host.folder)))
        with (host.folder / f"{unit}.log").open("ab") as log:
            host.services[unit] = subprocess.Popen(
                service["ExecStart"].split(), cwd=folder, env=self._environ(more), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def stop(self, name: str, unit: str, timeout: float = 90.0) -> None:
        """``systemctl stop``: TERM to the main process, or to its whole session, then KILL as
        systemd does.
        """
        host = self.hosts[name]
        main = host.services.pop(unit)
        assert main.poll() is None, f"{unit} of {name} has ended by itself: {self.log(name, unit)}"
        send = os.kill if self._service(host, unit).get("KillMode") == "process" else os.killpg
        send(main.pid, signal.SIGTERM)
        try:
            main.wait(timeout)
        except subprocess.TimeoutExpired:
            send(main.pid, signal.SIGKILL)
            main.wait(patience(30))
            raise AssertionError(
                f"{unit} of {name} does not end within {timeout:g} s of TERM"
            ) from None

    def kill(self, name: str, unit: str) -> None:
        """``kill -9`` of a main process, which is then started again."""
        main = self.hosts[name].services[unit]
        main.kill()
        main.wait(patience(30))
        self.revive()

    def revive(self, most: int = 5) -> None:
        """``Restart=always``; :class:`RuntimeError` with its log for a service that ends again and
        again.
        """
        for host in self.hosts.values():
            for unit, main in list(host.services.items()):
                if main.poll() is None or self._service(host, unit)["Restart"] != "always":
                    continue
                self._restarts[host.name, unit] += 1
                if self._restarts[host.name, unit] > most:
                    raise RuntimeError(
                        f"{unit} of {host.name} does not stay: {self.log(host.name, unit)}"
                    )
                self.start(host.name, unit)

    def log(self, name: str, unit: str) -> str:
        """The end of what a service has printed."""
        return (self.hosts[name].folder / f"{unit}.log").read_text("utf-8", "replace")[-3000:]

    def left(self) -> list[psutil.Process]:
        """Processes whose command line or environment names a folder of a host, zombies left
        out.
        """
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                named = [*process.cmdline(), process.environ().get("STORM_DAGSTER_HOME", "")]
                if any(f"{host.folder}/" in part for part in named for host in self.hosts.values()):
                    found.append(process)
            except psutil.Error:
                continue
        return found


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
