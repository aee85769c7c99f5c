"""``doctor``: checks of this machine and its cluster, and the invariants.

Each result has its remedy.
"""

import functools
import importlib.metadata
import importlib.util
import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from storm_dagster.cli.check_runner import run_checks
from storm_dagster.cli.cluster_check import check_cluster, names_no_cluster
from storm_dagster.cli.health import HealthResult, check_dagster
from storm_dagster.cli.options import Invocation, verb
from storm_dagster.cli.output import Steps, plain, print_json, print_table
from storm_dagster.core.host_problems import disk_severity
from storm_dagster.host.capacity import Capacity
from storm_dagster.host.disk import disk_room
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.host.processes import RunFile
from storm_dagster.host.requirements import install_command, requirements_of
from storm_dagster.model.amounts import utc_text
from storm_dagster.model.conf import mask_text
from storm_dagster.model.errors import Corrupt, StormDagsterError, Unavailable
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.security.settings import Security, zookeeper_tls
from storm_dagster.security.spark_remote import derived_spark_token

if TYPE_CHECKING:
    from storm_dagster.core.invariants.snapshot import Violation
    from storm_dagster.operations.read.inspection import InspectionResult

_SPARK_SECS = 20.0
"""Time in which Spark must return its version."""
_CHECK_SECS = 5.0
"""Time of a check."""
_DEADLINES_SECS = {"Spark": _SPARK_SECS + 1.0, "Dagster": 10.0, "cluster": 15.0, "ZooKeeper": 15.0}
"""Time of checks whose service may take longer."""


def _system(invocation: Invocation) -> Iterator[HealthResult]:
    if sys.platform == "linux":
        yield "ok", platform.platform(), ""
    else:
        remedy = (
            "run them on Linux hosts or in containers; definitions, sensors, client and test "
            "harness"
            " work here"
        )
        yield "warning", f"{platform.platform()}: supervisors and workers need Linux", remedy


def _conf(invocation: Invocation) -> Iterator[HealthResult]:
    set_keys = [key for key, origin in invocation.conf.origins.items() if origin != "default"]
    yield "ok", f"{len(set_keys)} keys set beyond the defaults", ""


def _java(invocation: Invocation) -> Iterator[HealthResult]:
    from storm_dagster.host.java import java_command, java_version

    try:
        java = java_command()
    except Unavailable as error:
        # Only the embedded ZooKeeper and Spark run on it.
        elsewhere = invocation.conf_dir is not None and bool(invocation.conf.get("spark.remote"))
        remedy = (
            "Debian, Ubuntu: apt-get install openjdk-17-jre-headless; Fedora: dnf install "
            "java-17-openjdk-headless; "
            "macOS: brew install openjdk@17"
        )
        yield "warning" if elsewhere else "broken", error.message, remedy
        return
    yield "ok", f"{java}, version {java_version(java)}", ""


# Packages whose versions are shown, and without which a cluster cannot run.
_PACKAGES = (
    "dagster",
    "dagster-webserver",
    "dagster-pyspark",
    "pyspark",
    "kazoo",
    "pyzmq",
    "pyarrow",
    "grpcio",
)


def _packages(invocation: Invocation) -> Iterator[HealthResult]:
    versions: dict[str, str] = {}
    missing: list[str] = []
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        yield (
            "broken",
            f"not installed: {', '.join(missing)}",
            install_command(requirements_of(missing)),
        )
    dagster = versions.get("dagster")
    webserver = versions.get("dagster-webserver")
    if dagster != webserver:
        text = f"dagster {dagster} with dagster-webserver {webserver}"
        yield "broken", text, "install the same version of both"
    spec = importlib.util.find_spec("pyspark")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    if roots and not list(Path(roots[0], "jars").glob("zookeeper-*.jar")):
        yield "broken", "pyspark has no jars (pyspark-client?)", "pip install 'pyspark[connect]'"
    if not missing:
        packages = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield "ok", f"Python {sys.version.split()[0]}, {packages}", ""


def _ports(invocation: Invocation) -> Iterator[HealthResult]:
    from storm_dagster.cli.dev.ports import is_free

    if ClusterFile.read(invocation.home) is not None:
        yield "ok", "a cluster runs in this HOME and holds its ports", ""
        return
    conf = invocation.conf
    cluster_ports = _cluster_ports(invocation)
    keys = ("storm.zookeeper.port", "nimbus.thrift.port", "nimbus.http.port", "spark.connect.port")
    uses = [(conf[key], key) for key in keys]
    uses.append((3000, "Dagster's webserver"))
    uses += [(port, "slot") for port in conf["supervisor.slots.ports"]]
    taken_ports: list[str] = []
    for port, use in uses:
        if port and port not in cluster_ports and not is_free(port):
            taken_ports.append(f"{port} ({use})")
    if taken_ports:
        remedy = "end what listens there, or use `storm-dagster dev --ports auto`"
        yield "warning", f"taken: {', '.join(taken_ports)}", remedy
    elif cluster_ports:
        yield "ok", "no port is taken by others", ""
    else:
        yield "ok", "the default ports are free", ""


def _cluster_ports(invocation: Invocation) -> set[int]:
    """Ports that the cluster uses, by its local run files and its leader."""
    conf = invocation.conf
    homes = {invocation.home}
    if conf["storm.local.dir"]:
        homes.add(Path(conf["storm.local.dir"]))
    ports: set[int] = set()
    for home in homes:
        for record in RunFile.read_all(home):
            if record.alive():
                ports.update(record.ports.values())
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            cluster = nimbus.get("/v1/cluster")
    except StormDagsterError:
        return ports
    for row in cluster.get("nimbuses", ()):
        for address in (row.get("port"), row.get("http")):
            port = str(address).rpartition(":")[2]
            if port.isdecimal():
                ports.add(int(port))
    for row in cluster.get("supervisors", ()):
        ports.update(row["ports"])
    # Ports of the cluster's conf: other checks test whether their services respond.
    urls = [
        *conf["storm.zookeeper.servers"],
        conf.get("spark.remote"),
        conf.get("dagster.graphql.url"),
    ]
    for url in urls:
        if url:
            port = urlsplit(url if "://" in url else f"//{url}").port
            if port:
                ports.add(port)
    return ports


def _zookeeper(invocation: Invocation) -> Iterator[HealthResult]:
    conf = invocation.conf
    running = ClusterFile.read(invocation.home) is not None
    if not running and conf.origins["storm.zookeeper.servers"] == "default":
        yield "ok", "embedded, started by dev", ""
        return
    from storm_dagster.zk.embedded import server_address, server_answers

    tls = zookeeper_tls(conf)
    trusted = TrustedServers.of(conf)
    for server in conf["storm.zookeeper.servers"]:
        host, port = server_address(server, conf)
        began = time.monotonic()
        try:
            answers = server_answers(host, port, tls=tls, trusted=trusted)
        except UntrustedServer as error:
            problem, _, remedy = error.message.partition(": ")
            yield "broken", problem, remedy
            continue
        if answers:
            yield "ok", f"{host}:{port} answers in {1000 * (time.monotonic() - began):.0f} ms", ""
        else:
            over = " over TLS" if conf["storm.zookeeper.ssl.enable"] else ""
            remedy = (
                "start it (`storm-dagster dev` or `storm-dagster daemon zookeeper`), or correct"
                " storm.zookeeper.servers"
            )
            yield "broken", f"{host}:{port} does not answer{over}", remedy


def _spark(invocation: Invocation) -> Iterator[HealthResult]:
    conf = invocation.conf
    remote = conf.get("spark.remote")
    if remote is None:
        yield "ok", conf.get("spark.master") or "embedded, started by dev", ""
        return
    cluster = ClusterFile.read(invocation.home) if invocation.conf_dir is None else None
    if cluster is not None and cluster.spark is not None and cluster.spark.starting:
        yield "ok", f"{mask_text(remote)} is being started by dev; placements wait for it", ""
        return
    from storm_dagster.spark.session import ask_version

    token = derived_spark_token(conf)
    trusted = TrustedServers.of(conf)
    version = ask_version(remote, invocation.home, token, _SPARK_SECS, trusted)
    yield "ok", f"{mask_text(remote)} accepts this client, Spark {version}", ""


def _dagster(invocation: Invocation) -> Iterator[HealthResult]:
    results = list(check_dagster(invocation.conf))
    if results:
        yield from results
    else:
        yield "ok", "none is configured (dagster.graphql.url); `dev` starts one", ""


def _clock(invocation: Invocation) -> Iterator[HealthResult]:
    # The clocks of the cluster's hosts are compared by the check of the cluster.
    now = time.time()
    if not 1_700_000_000 < now < 4_000_000_000:
        yield (
            "broken",
            f"the clock shows {time.ctime(now)}",
            "set the time: timedatectl set-ntp true",
        )
    else:
        yield "ok", utc_text(now), ""


def _disk(invocation: Invocation) -> Iterator[HealthResult]:
    # Of a HOME that does not exist yet, the folder in which it will be created.
    folder = invocation.home
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK):
        yield "broken", f"{folder} is not writable", "give another --home, or its owner's rights"
        return
    free_mb = disk_room(folder).free_mb
    severity = disk_severity(free_mb)
    free = (free_mb or 0) / 1024
    if severity == "broken":
        yield (
            "broken",
            f"{free:.2f} GiB free in {folder}",
            "free some space, or give another --home",
        )
    elif severity == "warning":
        yield (
            "warning",
            f"{free:.1f} GiB free in {folder}",
            "logs, blobs and Dagster's history need a few GiB",
        )
    else:
        yield "ok", f"{free:.0f} GiB free in {folder}", ""


def _sizes(invocation: Invocation) -> Iterator[HealthResult]:
    """Report the CPU and memory of a supervisor that is started here, and where they come from."""
    capacity = Capacity.of(invocation.conf.values)
    for problem in capacity.problems:
        text, _, remedy = problem.rpartition("; ")
        yield "warning", text, remedy
    yield "ok", f"a supervisor here offers {capacity.text}", ""


# Name of a check -> the function that yields its results, in the order of the output.
_CHECKS: dict[str, Callable[[Invocation], Iterator[HealthResult]]] = {
    "system": _system,
    "Java": _java,
    "packages": _packages,
    "conf": _conf,
    "sizes": _sizes,
    "ports": _ports,
    "ZooKeeper": _zookeeper,
    "Spark": _spark,
    "cluster": check_cluster,
    "Dagster": _dagster,
    "clock": _clock,
    "disk": _disk,
}
_BY_CONF = {"sizes", "ports", "ZooKeeper", "Spark", "cluster", "Dagster"}
"""Checks that are omitted if the conf cannot be read; the check of the conf reports that."""


def _report_invariants(invocation: Invocation, stable_secs: float) -> int:
    """Print the violations of invariants.

    Returns the exit code, which is 6 if there is a violation that lasts for ``stable_secs``.
    Processes are inspected if HOME belongs to this machine's cluster. :class:`Unavailable` without
    a cluster.
    """
    local = ClusterFile.read(invocation.home) is not None and invocation.conf_dir is None
    if names_no_cluster(invocation):
        raise Unavailable(
            f"no cluster runs in {invocation.home}: start one with `storm-dagster dev`, or name "
            "another with --home or --conf-dir"
        )
    inspection = _inspect(invocation, invocation.home if local else None, stable_secs)
    if invocation.json:
        print_json(_inspection_document(inspection, local))
    else:
        rows = _inspection_rows(inspection)
        print_table("", ["invariant", "state", "found", "how to fix"], rows)
    return 0 if inspection.sound else Corrupt.exit_code


def _inspect(invocation: Invocation, home: Path | None, stable_secs: float) -> "InspectionResult":
    """Inspect the cluster of the conf, and the processes of ``home`` if it is given."""
    from storm_dagster.client.blobs import NimbusBlobClient
    from storm_dagster.operations.context import OperationsContext
    from storm_dagster.operations.read.inspection import inspect_cluster
    from storm_dagster.zk.storm_cluster_state import StormClusterState

    with (
        StormClusterState.open(invocation.conf.values) as cluster,
        NimbusBlobClient(cluster.leader_http, security=Security.of(invocation.conf)) as blobs,
        Steps("looking", quiet=invocation.json) as steps,
    ):
        log = logging.getLogger("storm_dagster.doctor")
        ctx = OperationsContext(
            cluster=cluster, blobs=blobs, conf=invocation.conf, log=log, planner=_no_planner
        )
        steps.begin("invariants")
        inspection = inspect_cluster(ctx, home=home, stable_secs=stable_secs)
        steps.done("invariants")
    return inspection


def _inspection_document(inspection: "InspectionResult", local: bool) -> dict[str, Any]:
    """The inspection as ``--json`` prints it; ``local``: processes were inspected."""
    from storm_dagster.core.invariants.rules import RULES

    return {
        "ok": inspection.sound,
        "violations": [violation.to_document() for violation in inspection.violations],
        "warnings": [violation.to_document() for violation in inspection.warnings],
        "waiting_for_the_cleaner": list(inspection.garbage),
        "rules": {rule.name: rule.invariant for rule in RULES},
        "topologies": len(inspection.view.topologies),
        "processes": "this machine" if local else "not looked at",
        "looks": inspection.snapshots,
        "seconds": inspection.seconds,
    }


def _inspection_rows(inspection: "InspectionResult") -> list[tuple[str, str, str, str]]:
    """The inspection as rows of a table."""
    from storm_dagster.core.invariants.rules import RULES

    rows = [_invariant_row("broken", violation) for violation in inspection.violations]
    rows += [_invariant_row("warning", violation) for violation in inspection.warnings]
    if not inspection.violations:
        text = (
            f"{len(RULES)} rules hold for {len(inspection.view.topologies)} topologies,"
            f" {inspection.snapshots} looks"
        )
        rows.append(("I1-I8", "ok", text, ""))
    if inspection.garbage:
        text = f"{len(inspection.garbage)} leftovers wait for the cleaner"
        rows.append(("I3", "ok", text, ""))
    return rows


def _invariant_row(state: str, violation: "Violation") -> tuple[str, str, str, str]:
    return violation.invariant, state, violation.sentence, violation.remedy


def _no_planner(batch: Any) -> Any:
    raise Unavailable("an inspection does not place tasks: use `storm-dagster plan`")


@verb("doctor")
@click.option(
    "--invariants",
    is_flag=True,
    help="Check invariants I1 to I8 on the live cluster. Exits with 6 if one is violated.",
)
@click.option(
    "--settle",
    "stable_secs",
    type=click.FloatRange(0, 600),
    default=10.0,
    show_default=True,
    help="With --invariants: seconds for which a violation must last to count.",
)
@click.option(
    "--security",
    is_flag=True,
    help="List the interfaces that the cluster exposes to others, and how to close them.",
)
def doctor(invocation: Invocation, invariants: bool, stable_secs: float, security: bool) -> int:
    """Check this host and its cluster. Exits with 4 on a problem.

    The checks are of system, Java, packages, conf, ports, ZooKeeper, Spark, cluster, Dagster, clock
    and disk.
    """
    if invariants:
        return _report_invariants(invocation, stable_secs)
    checks = _CHECKS
    if security:
        from storm_dagster.operations.read.exposures import ClusterPlace, exposures

        place = ClusterPlace(invocation.home, invocation.conf_dir, invocation.conf)
        checks = {
            name: lambda _, check=check: check(place) for name, check in exposures(place).items()
        }
    # At first, and alone: the others read the conf, and are omitted if it cannot be read.
    first = checks.get("conf")
    results: list[tuple[str, HealthResult]] = []
    if first is not None:
        try:
            results += [("conf", result) for result in first(invocation)]
        except StormDagsterError as error:
            results.append(("conf", ("broken", error.message, "fix what it names")))
            checks = {name: check for name, check in checks.items() if name not in _BY_CONF}
    others = {
        name: functools.partial(check, invocation)
        for name, check in checks.items()
        if name != "conf"
    }
    order = list(checks)
    printer = _Printer(order, quiet=invocation.json)
    for check, result in results:
        printer.add(check, result)
    for entry in run_checks(others, _DEADLINES_SECS, _CHECK_SECS):
        if entry is None:
            printer.flush()
        else:
            printer.add(*entry)
    printer.flush()
    findings = printer.findings()
    broken = [finding for finding in findings if finding["state"] == "broken"]
    if invocation.json:
        print_json({"ok": not broken, "findings": findings})
    return Unavailable.exit_code if broken else 0


class _Printer:
    """Output of the checks: results are printed as they come.

    Those of the same second are in the order of the checks.
    """

    def __init__(self, order: list[str], *, quiet: bool) -> None:
        self._order = order
        self._quiet = quiet
        self._printed: list[tuple[str, HealthResult]] = []
        self._waiting: list[tuple[str, HealthResult]] = []
        self._flushed_at = time.monotonic()

    def add(self, check: str, result: HealthResult) -> None:
        """Take a result, and print those that have waited for a second."""
        self._waiting.append((check, result))
        if time.monotonic() - self._flushed_at >= 1.0:
            self.flush()

    def flush(self) -> None:
        """Print the results that wait."""
        self._flushed_at = time.monotonic()
        rows = self._in_order(self._waiting)
        self._waiting = []
        self._printed += rows
        if self._quiet:
            return
        for check, (state, text, remedy) in rows:
            click.echo(plain(f"{check:<10} {state:<8} {text}"))
            if remedy:
                click.echo(plain(f"{'':<20}fix: {remedy}"))

    def findings(self) -> list[dict[str, Any]]:
        """Entries of ``findings`` of the JSON document, in the order of the checks."""
        return [
            {"check": check, "state": state, "found": text, "mend": remedy or None}
            for check, (state, text, remedy) in self._in_order(self._printed)
        ]

    def _in_order(self, rows: list[tuple[str, HealthResult]]) -> list[tuple[str, HealthResult]]:
        return sorted(rows, key=lambda row: self._order.index(row[0]))


COMMANDS: Mapping[str, click.Command] = {"doctor": doctor}
