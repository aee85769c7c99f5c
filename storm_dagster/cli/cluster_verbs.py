"""``dev``, ``stop`` and ``status``: a whole local cluster."""

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from storm_dagster.cli.healing_verbs import pause_lines
from storm_dagster.cli.health import (
    ProcessState,
    advice,
    check_dagster,
    healing_sensor,
    state_of,
    uptime,
    withdrawn_lines,
)
from storm_dagster.cli.options import Invocation, change_options, verb
from storm_dagster.cli.output import (
    Steps,
    notify,
    plain,
    print_answer,
    print_json,
    print_line,
    print_operations,
    print_table,
    row_for_table,
)
from storm_dagster.client.waiting import list_operations
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.host.files import make_folder
from storm_dagster.host.processes import RunFile
from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import InvalidRequest, StormDagsterError, Unavailable

if TYPE_CHECKING:
    from storm_dagster.cli.dev.options import DevOptions


def _show_ready(
    invocation: Invocation, cluster: ClusterFile, *, detached: bool, lines: bool
) -> None:
    """Print the addresses of a cluster that is ready, and how to end it.

    With ``lines`` also those that add the cluster to a Dagster that exists.
    """
    if invocation.json:
        print_json({"home": str(invocation.home), **cluster.model_dump(mode="json")})
        return
    dagster = cluster.dagster
    assert dagster is not None
    rows = [("Dagster UI", dagster.url if dagster.own else f"{dagster.url}, not started by dev")]
    rows += [("nimbus", f"{nimbus.http}  thrift {nimbus.thrift}") for nimbus in cluster.nimbuses]
    for supervisor in cluster.supervisors:
        ports = ", ".join(map(str, supervisor.ports))
        rows.append(("supervisor", f"{supervisor.id} on {supervisor.host}, slots {ports}"))
    rows.append(("ZooKeeper", f"{cluster.zookeeper}{cluster.zookeeper_root}"))
    if cluster.spark is None:
        rows.append(("Spark", "spark.master"))
    elif cluster.spark.starting:
        rows.append(("Spark", f"{cluster.spark.remote}, starting"))
    else:
        rows.append(("Spark", cluster.spark.remote))
    rows.append(("HOME", str(invocation.home)))
    print_table("ready", ["", ""], rows)
    if lines:
        click.echo(
            f"submissions need the Dagster at {dagster.url}, with this cluster as a code location;"
            " they wait for it:"
        )
        click.echo(_lines_for_dagster(invocation))
    if detached:
        is_default_home = str(invocation.home) == os.path.abspath(".storm-dagster")
        option = "" if is_default_home else f" --home {invocation.home}"
        click.echo(f"stop it with: storm-dagster stop{option}")
    else:
        click.echo("Ctrl-C ends it")
    sys.stdout.flush()


def _lines_for_dagster(invocation: Invocation) -> str:
    """Lines that add the cluster to a Dagster that exists."""
    from storm_dagster.cli.dev.existing_dagster import definition_lines

    return definition_lines(invocation.home, invocation.conf)


# Options of the cluster's size, which a dry run prints.
_SIZE = ("supervisors", "slots", "nimbuses", "zookeepers", "spark_workers", "ports")


def _prepare_machine(invocation: Invocation) -> None:
    """Make the class data of ZooKeeper and Spark, if it does not exist."""
    from storm_dagster.cli.dev.class_data import is_class_data_missing, make_class_data

    if invocation.dry_run:
        is_missing = is_class_data_missing()
        text = "would make the Java class data" if is_missing else "the Java class data exists"
        print_line(invocation.json, {"dry_run": True, "missing": is_missing}, text)
        return

    def end(number: int, frame: Any) -> None:
        # As an exception, so that the server that runs for this purpose is ended, too.
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    with Steps("preparing later starts", quiet=invocation.json) as steps:
        made = make_class_data(steps.on_step)
    text = f"made the {', the '.join(made)}" if made else "the Java class data exists"
    print_line(invocation.json, {"made": made}, text)


def _print_plan(invocation: Invocation, options: "DevOptions", java: str) -> None:
    """Print what ``dev`` would start, for a dry run."""
    supervisors, slots, nimbuses, _ = options.size
    size = {name: getattr(options, name) for name in _SIZE}
    document = {
        "dry_run": True,
        "home": str(invocation.home),
        "java": java,
        **size,
        "own_dagster": options.own_dagster,
    }
    text = (
        f"would start {nimbuses} nimbus(es), {supervisors} supervisor(s) of {slots} slots"
        f" in {invocation.home}"
    )
    if not options.own_dagster:
        text += ", and no Dagster"
    print_line(invocation.json, document, text)


def _check_workspaces(workspaces: tuple[Path, ...], own_dagster: bool) -> None:
    """Check the user's workspace files, which only dev's own Dagster serves."""
    from storm_dagster.cli.dev.existing_dagster import check_workspace

    if workspaces and not own_dagster:
        raise InvalidRequest(
            "--workspace adds code locations to dev's own Dagster, and none is started: add them "
            "to the workspace of the Dagster that exists"
        )
    for path in workspaces:
        check_workspace(path)


def _use_existing_dagster(
    invocation: Invocation,
    conf: ClusterConf,
    no_dagster: bool,
    dagster_url: str | None,
    *,
    check: bool,
) -> ClusterConf:
    """The conf with the address of a Dagster that ``dev`` does not start.

    The invocation gets it, too, unless a file of the conf has it. With ``dagster_url`` and
    ``check`` that Dagster must answer and have the cluster's code location: else the errors of
    :func:`check_location`.
    """
    from storm_dagster.cli.dev.existing_dagster import (
        DEFAULT_URL,
        URL_KEY,
        check_location,
        graphql_url,
    )
    from storm_dagster.nimbus.dagster.transport import DagsterAccess

    if no_dagster and dagster_url is not None:
        raise InvalidRequest(
            "--no-dagster and --dagster-url exclude each other: --dagster-url names a Dagster that "
            "runs, --no-dagster one that may start later"
        )
    url = DEFAULT_URL
    if dagster_url is not None:
        url = graphql_url(dagster_url)
    elif conf[URL_KEY]:
        # Of a file, or of -c: the daemons read it there. A wrong one ends the start here.
        DagsterAccess.of(conf)
        return conf
    invocation.overrides = {**invocation.overrides, URL_KEY: url}
    conf = conf.with_values({URL_KEY: url}, "dev")
    if dagster_url is not None and check:
        check_location(conf, invocation.home)
    return conf


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
@click.option(
    "--no-dagster",
    is_flag=True,
    help="Start no Dagster: that of dagster.graphql.url (default: http://127.0.0.1:3000) launches"
    " the runs. Prints the lines for its definitions; a submission waits until it answers.",
)
@click.option(
    "--dagster-url",
    metavar="URL",
    help="The same with the Dagster at URL, which must run and have this cluster's code location.",
)
@click.option(
    "--workspace",
    "workspaces",
    metavar="FILE",
    multiple=True,
    type=click.Path(path_type=Path),
    help="workspace.yaml of yours, whose code locations dev's own Dagster serves, too. May be"
    " repeated.",
)
@click.option("--detach", is_flag=True, help="Return when ready. `stop` stops the cluster.")
@click.option(
    "--prepare",
    is_flag=True,
    help="Only make the Java class data that makes later starts faster, then return.",
)
@click.option(
    "--timeout", type=float, default=240.0, show_default=True, help="Longest wait, seconds."
)
def dev(
    invocation: Invocation,
    detach: bool,
    prepare: bool,
    zookeepers: str,
    no_dagster: bool,
    dagster_url: str | None,
    workspaces: tuple[Path, ...],
    **options: Any,
) -> None:
    """Start a whole local cluster: ZooKeeper, Spark, nimbus, supervisors and Dagster.

    --no-dagster and --dagster-url leave Dagster out: a Dagster that exists serves the cluster.
    """
    if prepare:
        _prepare_machine(invocation)
        return
    from storm_dagster.cli.dev.detach import REPORT_FD, run_child, run_foreground, start_detached
    from storm_dagster.cli.dev.ending import refuse_live_home
    from storm_dagster.cli.dev.options import DevOptions
    from storm_dagster.cli.dev.plan import ClusterPlan
    from storm_dagster.cli.dev.ports import choose_ports
    from storm_dagster.host.java import java_command

    # First: without Java no other check is of use.
    java = java_command()
    home = invocation.home
    is_child = REPORT_FD in os.environ
    own_dagster = not no_dagster and dagster_url is None
    conf = _load_conf_of_daemons(invocation)
    _check_workspaces(workspaces, own_dagster)
    if not own_dagster:
        # A detached dev does not repeat the check of the command that started it.
        conf = _use_existing_dagster(invocation, conf, no_dagster, dagster_url, check=not is_child)
    if not is_child:
        for warning in conf.warnings:
            notify(f"warning: {warning}")
    refuse_live_home(home)
    dev_options = DevOptions(
        zookeepers=int(zookeepers),
        own_dagster=own_dagster,
        workspaces=tuple(path.absolute() for path in workspaces),
        **options,
    )
    _check_spark_workers(dev_options, conf)
    if invocation.dry_run:
        _print_plan(invocation, dev_options, java)
        return
    make_folder(home, "--home")
    if detach and not is_child:
        _show_ready(invocation, start_detached(home), detached=True, lines=no_dagster)
        return
    ports = choose_ports(dev_options, conf, home)
    plan = ClusterPlan(
        home, dev_options, conf, ports, conf_dir=invocation.conf_dir, overrides=invocation.overrides
    )
    if is_child:
        run_child(plan)
    else:
        run_foreground(
            plan,
            lambda cluster: _show_ready(invocation, cluster, detached=False, lines=no_dagster),
        )


def _load_conf_of_daemons(invocation: Invocation) -> ClusterConf:
    """Conf of the cluster, which must be in distributed mode."""
    conf = load_cluster_conf(invocation.conf_dir or invocation.home, invocation.overrides)
    if conf["storm.cluster.mode"] != "distributed":
        raise InvalidRequest(
            "storm.cluster.mode is local: daemons run only in distributed mode; remove the key"
        )
    return conf


def _check_spark_workers(dev_options: "DevOptions", conf: ClusterConf) -> None:
    """Raise an error if workers of dev's own Spark are asked for, and the conf names another."""
    if dev_options.spark_workers and (conf.get("spark.remote") or conf.get("spark.master")):
        raise InvalidRequest(
            "--spark-workers is for dev's own Spark: omit it, or spark.remote and spark.master"
        )


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
    # For the number of ended processes only.
    before = family(home, RunFile.read_all(home))
    with Steps(f"ending the cluster in {home}", quiet=invocation.json) as steps:
        for record in records:
            if record.role == "dev":
                steps.begin("dev")
                _end_dev(record, wait=invocation.wait)
                steps.done("dev")
        survivors = end_cluster(home) if invocation.wait else []
        if invocation.wait:
            (home / "cluster.json").unlink(missing_ok=True)
    if survivors:
        pids = ", ".join(str(process.pid) for process in survivors)
        raise Unavailable(
            f"processes {pids} of the cluster in {home} could not be ended: kill them by hand"
        )
    seconds = round(time.monotonic() - started, 3)
    if before:
        text = f"ended {len(before)} processes, {seconds:.1f} s"
    else:
        text = f"no cluster runs in {home}"
    print_line(invocation.json, {"home": str(home), "ended": len(before), "seconds": seconds}, text)


def _end_dev(record: RunFile, *, wait: bool) -> None:
    """Signal ``dev``, which ends its cluster: workers, then daemons, then ZooKeeper and Spark."""
    if record.signal(signal.SIGTERM):
        # A stopped process gets the signal only when it continues.
        record.signal(signal.SIGCONT)
    if wait:
        poll(lambda: not record.alive(), timeout=60.0, pause=0.05)


@verb("status")
def status(invocation: Invocation) -> int:
    """Show the processes, leader, nimbuses, supervisors and topologies of a cluster.

    CPU (100 % is a core) and memory of a supervisor are followed by where they come from. Exits
    with 4 if no nimbus leads.
    """
    cluster = ClusterFile.read(invocation.home) if invocation.conf_dir is None else None
    document = _status_document(invocation, cluster)
    if invocation.json:
        print_json(document)
    else:
        _print_status(invocation, cluster, document)
    return Unavailable.exit_code if document["leader"] is None else 0


def _process_row(record: RunFile, state: ProcessState) -> dict[str, Any]:
    """A process of HOME in the document of ``status``."""
    is_alive = state != "dead"
    return {
        "role": record.role,
        "id": "0" if record.role == "dev" else record.id,
        "pid": record.pid,
        "alive": is_alive,
        "state": state,
        "ports": record.ports,
        "uptime_secs": round(uptime(record)) if is_alive else None,
    }


def _status_document(invocation: Invocation, cluster: ClusterFile | None) -> dict[str, Any]:
    """The document of ``status``; ``cluster`` is that of HOME, if one runs there.

    Its lists are empty, and ``problem`` says why, if the leader cannot be asked.
    """
    home = invocation.home
    states: list[tuple[RunFile, ProcessState]] = [
        (record, state_of(record)) for record in RunFile.read_all(home)
    ]
    rows = [_process_row(record, state) for record, state in states]
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
        "leader": None,
        "healer": None,
        "healing": None,
        "alarm": None,
        "dagster": None,
    }
    try:
        with invocation.nimbus(patience=0.0) as nimbus:
            document["leader"] = nimbus.leader()
            cluster_document = nimbus.get("/v1/cluster")
            for name in ("nimbuses", "supervisors", "healer", "healing", "alarm"):
                if name in cluster_document:
                    document[name] = cluster_document[name]
            document["operations"] = list_operations(nimbus)
            document["topologies"] = nimbus.get("/v1/topologies")["topologies"]
    except StormDagsterError as error:
        document["problem"] = error.message
    worst_result = next(check_dagster(invocation.conf, timeout=3.0), None)
    if worst_result is not None:
        state, text, remedy = worst_result
        document["dagster"] = {"state": state, "found": text, "mend": remedy or None}
    return document


def _print_status(
    invocation: Invocation, cluster: ClusterFile | None, document: dict[str, Any]
) -> None:
    """Print the document of ``status`` for people."""
    home = invocation.home
    rows = document["processes"]
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
        click.echo(plain(f"ALARM, healing is frozen: {document['alarm']}"))
    for line in pause_lines(document):
        click.echo(plain(line))
    if cluster and cluster.dagster:
        click.echo(f"Dagster UI: {cluster.dagster.url}")
    dagster = document["dagster"]
    if dagster and dagster["state"] != "ok":
        click.echo(plain(f"Dagster: {dagster['found']}: {dagster['mend']}"))
    if not document["healer"]:
        _, text = healing_sensor(home, armed=False)
        click.echo(text)
    _print_members(document)
    print_table("topologies", "name status workers tasks uptime", document["topologies"])
    print_operations(document["operations"])


def _print_members(document: dict[str, Any]) -> None:
    """Print the tables of nimbuses and supervisors.

    A line for a kind without members.
    """
    tables = (
        ("nimbuses", "host:port http role uptime version"),
        ("supervisors", "id host ports used uptime cpu memory"),
    )
    for kind, columns in tables:
        rows = [row_for_table(row) for row in document[kind]]
        if rows:
            print_table(kind, columns, rows)
        else:
            click.echo(f"{kind}: none registered")
    for line in withdrawn_lines(document["supervisors"]):
        click.echo(plain(line))


COMMANDS: Mapping[str, click.Command] = {"dev": dev, "stop": stop, "status": status}
