"""``dev``, ``stop`` and ``status``: a whole local cluster."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any

import click

from storm_dagster.cli.health import (
    ProcessState,
    advice,
    check_dagster,
    healing_sensor,
    state_of,
    uptime,
)
from storm_dagster.cli.options import Invocation, change_options, verb
from storm_dagster.cli.output import (
    Steps,
    notify,
    plain,
    print_answer,
    print_json,
    print_operations,
    print_table,
    row_for_table,
    say,
)
from storm_dagster.client.waiting import list_operations
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.host.processes import RunFile
from storm_dagster.host.waiting import poll
from storm_dagster.model.errors import InvalidRequest, StormDagsterError, Unavailable


def _show_ready(invocation: Invocation, cluster: ClusterFile, *, detached: bool) -> None:
    if invocation.json:
        print_json({"home": str(invocation.home), **cluster.model_dump(mode="json")})
        return
    assert cluster.dagster is not None
    spark = cluster.spark
    rows = [
        ("Dagster UI", cluster.dagster.url),
        *(("nimbus", f"{nimbus.http}  thrift {nimbus.thrift}") for nimbus in cluster.nimbuses),
        *(
            ("supervisor", f"{s.id} on {s.host}, slots {', '.join(map(str, s.ports))}")
            for s in cluster.supervisors
        ),
        ("ZooKeeper", f"{cluster.zookeeper}{cluster.zookeeper_root}"),
        ("Spark", f"{spark.remote}{', starting' * spark.starting}" if spark else "spark.master"),
        ("HOME", str(invocation.home)),
    ]
    print_table("ready", ["", ""], rows)
    option = (
        f" --home {invocation.home}"
        if str(invocation.home) != os.path.abspath(".storm-dagster")
        else ""
    )
    click.echo(f"stop it with: storm-dagster stop{option}" if detached else "Ctrl-C ends it")
    sys.stdout.flush()


_SIZE = ("supervisors", "slots", "nimbuses", "zookeepers", "spark_workers", "ports")


@verb("dev")
@change_options
@click.option(
    "--supervisors",
    type=click.IntRange(1, 50),
    default=2,
    show_default=True,
    help="Supervisors.",
)
@click.option(
    "--slots",
    type=click.IntRange(1, 200),
    default=4,
    show_default=True,
    help="Slots of each supervisor.",
)
@click.option(
    "--nimbuses", type=click.IntRange(1, 9), default=1, show_default=True, help="Nimbuses."
)
@click.option(
    "--zookeepers",
    type=click.Choice(["1", "3", "5"]),
    default="1",
    show_default=True,
    help="ZooKeeper servers. Three survive the loss of one.",
)
@click.option(
    "--spark-workers",
    type=click.IntRange(0, 50),
    default=0,
    show_default=True,
    help="Spark workers of one core, and a master; 0: Spark runs in one process.",
)
@click.option(
    "--ports",
    type=click.Choice(["auto", "default"]),
    default="default",
    show_default=True,
    help="'auto' takes free ports, so several clusters can run side by side.",
)
@click.option(
    "--warm-runs/--no-warm-runs",
    default=True,
    help="Start Dagster's runs in forks of a loaded process. [default: warm-runs]",
)
@click.option("--detach", is_flag=True, help="Return when ready. `stop` stops the cluster.")
@click.option(
    "--timeout", type=float, default=240.0, show_default=True, help="Longest wait, seconds."
)
def dev(invocation: Invocation, detach: bool, zookeepers: str, **given: Any) -> None:
    """Start a whole local cluster: ZooKeeper, Spark, nimbus, supervisors and Dagster."""
    from storm_dagster.cli.dev.cluster import refuse_live_home
    from storm_dagster.cli.dev.detach import REPORT_FD, run_child, run_foreground, start_detached
    from storm_dagster.cli.dev.plan import ClusterPlan, DevOptions
    from storm_dagster.cli.dev.ports import choose_ports
    from storm_dagster.host.java import java_command

    # Without Java nothing else is worth trying.
    java = java_command()
    home = invocation.home
    conf = load_cluster_conf(invocation.conf_dir or home, invocation.overrides)
    if conf["storm.cluster.mode"] != "distributed":
        raise InvalidRequest(
            "storm.cluster.mode is local: daemons run only in distributed mode; remove the key"
        )
    is_child = REPORT_FD in os.environ
    for warning in () if is_child else conf.warnings:
        notify(f"warning: {warning}")
    refuse_live_home(home)
    options = DevOptions(zookeepers=int(zookeepers), **given)
    if options.spark_workers and (conf.get("spark.remote") or conf.get("spark.master")):
        raise InvalidRequest(
            "--spark-workers is for dev's own Spark: omit it, or spark.remote and spark.master"
        )
    if invocation.dry_run:
        supervisors, slots, nimbuses, _ = options.size
        shown = {name: getattr(options, name) for name in _SIZE}
        document = {"dry_run": True, "home": str(home), "java": java, **shown}
        text = f"would start {nimbuses} nimbus(es), {supervisors} supervisor(s) of {slots} slots in {home}"
        say(invocation.json, document, text)
        return
    home.mkdir(parents=True, exist_ok=True)
    if detach and not is_child:
        _show_ready(invocation, start_detached(home), detached=True)
        return
    chosen = choose_ports(options, conf, home)
    plan = ClusterPlan(
        home, options, conf, chosen, conf_dir=invocation.conf_dir, overrides=invocation.overrides
    )
    if is_child:
        run_child(plan)
    else:
        run_foreground(plan, lambda cluster: _show_ready(invocation, cluster, detached=False))


@verb("stop")
@change_options
def stop(invocation: Invocation) -> None:
    """Stop every process of the local cluster, workers first."""
    from storm_dagster.cli.dev.ending import end_cluster, family

    home = invocation.home
    started = time.monotonic()
    records = [record for record in RunFile.read_all(home) if record.alive()]
    running = [{"role": record.role, "id": record.id, "pid": record.pid} for record in records]
    if invocation.dry_run:
        document = {"dry_run": True, "home": str(home), "processes": running}
        print_answer(invocation.json, document, "role id pid", running, title="would end")
        return
    before = family(home, RunFile.read_all(home))
    with Steps(f"ending the cluster in {home}", quiet=invocation.json) as steps:
        for record in records:
            if record.role == "dev":
                # It ends its cluster by itself. Its own waits: workers, daemons, then ZooKeeper and
                # Spark.
                steps.begin("dev")
                if record.signal(signal.SIGTERM):
                    record.signal(signal.SIGCONT)
                if invocation.wait:
                    poll(lambda record=record: not record.alive(), timeout=60.0, pause=0.05)
                steps.done("dev")
        left = end_cluster(home) if invocation.wait else []
        if invocation.wait:
            (home / "cluster.json").unlink(missing_ok=True)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise Unavailable(
            f"processes {pids} of the cluster in {home} could not be ended: kill them by hand"
        )
    seconds = round(time.monotonic() - started, 3)
    text = (
        f"ended {len(before)} processes, {seconds:.1f} s"
        if before
        else f"no cluster runs in {home}"
    )
    say(invocation.json, {"home": str(home), "ended": len(before), "seconds": seconds}, text)


@verb("status")
def status(invocation: Invocation) -> None:
    """Show the processes, leader, nimbuses, supervisors and topologies of a cluster."""
    home = invocation.home
    cluster = ClusterFile.read(home) if invocation.conf_dir is None else None
    states: list[tuple[RunFile, ProcessState]] = [
        (each, state_of(each)) for each in RunFile.read_all(home)
    ]
    rows = [
        {
            "role": record.role,
            "id": "0" if record.role == "dev" else record.id,
            "pid": record.pid,
            "alive": state != "dead",
            "state": state,
            "ports": record.ports,
            "uptime_secs": round(uptime(record)) if state != "dead" else None,
        }
        for record, state in states
    ]
    document: dict[str, Any] = {
        "home": str(home),
        "running": any(row["alive"] for row in rows),
        "processes": rows,
        "endpoints": cluster.model_dump(mode="json") if cluster else None,
        "nimbuses": [],
        "supervisors": [],
        "topologies": [],
        "operations": [],
        "advice": advice(states, home),
    } | dict.fromkeys(("leader", "healer", "alarm", "dagster"))
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            document["leader"] = nimbus.leader()
            seen = nimbus.get("/v1/cluster")
            document |= {
                name: seen[name]
                for name in ("nimbuses", "supervisors", "healer", "alarm")
                if name in seen
            }
            document["operations"] = list_operations(nimbus)
            document["topologies"] = nimbus.get("/v1/topologies")["topologies"]
    except StormDagsterError as error:
        document["problem"] = error.message
    for state, found, remedy in islice(check_dagster(invocation.conf, timeout=3.0), 1):
        document["dagster"] = {"state": state, "found": found, "mend": remedy or None}
    if invocation.json:
        print_json(document)
        return
    if not rows and document["leader"] is None and invocation.conf_dir is None:
        click.echo(f"no cluster runs in {home}: start one with `storm-dagster dev`")
        return
    if rows or invocation.conf_dir is None:
        print_table(f"processes of {home}", "role id pid state uptime ports", rows)
    for line in document["advice"]:
        click.echo(plain(line), err=True)
    if "problem" in document:
        click.echo(document["problem"], err=True)
        return
    click.echo(f"leader: {document['leader']}")
    if document["alarm"]:
        click.echo(plain(f"ALARM, healing pauses: {document['alarm']}"))
    if cluster and cluster.dagster:
        click.echo(f"Dagster UI: {cluster.dagster.url}")
    dagster = document["dagster"]
    if dagster and dagster["state"] != "ok":
        click.echo(plain(f"Dagster: {dagster['found']}: {dagster['mend']}"))
    if not document["healer"]:
        click.echo(healing_sensor(home, armed=False)[1])
    _print_members(document)
    print_table("topologies", "name status workers tasks uptime", document["topologies"])
    print_operations(document["operations"])


def _print_members(document: dict[str, Any]) -> None:
    """The tables of nimbuses and supervisors; of a kind without a member, a line."""
    tables = (
        ("nimbuses", "host:port http role uptime version"),
        ("supervisors", "id host ports used uptime"),
    )
    for kind, columns in tables:
        rows = [row_for_table(row) for row in document[kind]]
        if rows:
            print_table(kind, columns, rows)
        else:
            click.echo(f"{kind}: none registered")


COMMANDS: Mapping[str, click.Command] = {"dev": dev, "stop": stop, "status": status}
