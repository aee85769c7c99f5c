"""``daemon ROLE``: one process for each role.

The roles are ``zookeeper``, ``spark``, ``nimbus``, ``supervisor``, ``worker``, ``web`` and
``code``. In the release before each was a verb (``FORMER_VERBS`` of :mod:`.app`).
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from storm_dagster.cli.daemon_folders import check_room, spark_folder
from storm_dagster.cli.daemon_signals import handle_signals, stop_event
from storm_dagster.cli.first_jobs import run_first_jobs
from storm_dagster.cli.log_setup import configure_daemon_logging
from storm_dagster.cli.options import Invocation, verb, verb_group
from storm_dagster.cli.output import notify
from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.host.files import make_home_private, write_atomically
from storm_dagster.host.machine_size import whole_cpus
from storm_dagster.host.memory import keep_one_heap
from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable
from storm_dagster.security.authority import LOOPBACK_NAMES, CertificateFolder
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.settings import Security, zookeeper_payload
from storm_dagster.security.spark_remote import SPARK_TOKEN, spark_token, standalone_secret

log: logging.Logger = logging.getLogger(__name__)
_EXISTING_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_LISTEN = {"host", "port", "ui_port"}
"""Options of the address of a Spark master or worker."""
_SPARK_OPTIONS = {
    "connect": {"warm_up"},
    "master": _LISTEN,
    "worker": {*_LISTEN, "cores", "memory", "id"},
}
"""Role of ``daemon spark`` -> the options that it takes."""
_host_option = click.option("--host", help="Address to bind. [default: storm.local.hostname]")


def _prepare(invocation: Invocation) -> tuple[ClusterConf, Path]:
    """Prepare this process for a daemon; its conf and its private HOME.

    The conf is that of the files and of ``-c``, never of another cluster's ``cluster.json``.
    """
    keep_one_heap()
    conf = load_cluster_conf(invocation.conf_dir or invocation.home, invocation.overrides)
    if conf["storm.cluster.mode"] != "distributed":
        raise InvalidRequest(
            "storm.cluster.mode is local: daemons run only in distributed mode; remove the key"
        )
    home = invocation.home
    if conf["storm.local.dir"]:
        home = Path(conf["storm.local.dir"]).expanduser().absolute()
    # Files of daemons and their children are for this user alone: specs, logs and blobs may hold
    # secrets.
    os.umask(0o077)
    make_home_private(home, read_only=True)
    os.environ["STORM_DAGSTER_HOME"] = str(home)
    if Security.of(conf).secret is not None:
        # Workers of this host authenticate at the cluster's Spark by this token, without the
        # secret.
        spark_token(conf, home)
    return conf, home


def _log_warnings(conf: ClusterConf) -> None:
    """Log the warnings about the conf.

    Call it when the daemon's log file is open.
    """
    for warning in conf.warnings:
        log.warning("%s", warning)


def _serve(
    invocation: Invocation,
    role: str,
    daemon_id: str | None,
    run: Callable[[ClusterConf, Path, str, threading.Event], int],
) -> int:
    """Prepare a daemon, and call ``run(conf, home, id, stop)``; returns its exit code.

    Without ``daemon_id`` it is the id of this host's daemon.
    """
    # First: a process that is the first of its container ignores a signal without a handler.
    stop = stop_event()
    conf, home = _prepare(invocation)
    name = daemon_id or _default_id(conf, home, role)
    configure_daemon_logging(home, role, name, conf)
    _log_warnings(conf)
    return run(conf, home, name, stop)


def _default_id(conf: ClusterConf, home: Path, role: str) -> str:
    """Id that this host's daemon got at its first start, or a new one, which is stored in HOME.

    Assignments and blobs refer to it.
    """
    path = home / f"{role}_id"
    stored_id = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    if stored_id:
        return stored_id
    new_id = f"{conf['storm.local.hostname']}-{os.urandom(4).hex()}"
    try:
        write_atomically(path, new_id + "\n")
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be written ({error.strerror}), and this {role} has no id yet: free "
            "some space, make the disk writable, or give it an --id"
        ) from error
    return new_id


def _become(
    command: list[str],
    home: Path,
    role: str,
    ports: dict[str, int],
    env: dict[str, str] | None = None,
    id: str = "0",
) -> NoReturn:
    """Replace this process by ``command``, with the same pid and run file.

    ``env`` is its whole environment, by default that of this process.
    """
    RunFile.write(home, role, id, ports, required=False)
    sys.stdout.flush()
    sys.stderr.flush()
    # A JVM keeps an inherited "ignore", such as Dagster leaves in a process that a script starts
    # with `&`. Only SIGKILL would then end it.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.execvpe(command[0], command, env or dict(os.environ))


@verb("zookeeper")
@click.argument("action", type=click.Choice(["secure"]), required=False)
@click.option("--port", type=click.IntRange(1, 65535), help="[default: storm.zookeeper.port]")
@_host_option
@click.option("--data-dir", metavar="DIR", help="[default: HOME/zookeeper]")
@click.option(
    "--tls",
    is_flag=True,
    help="Serve only clients with a certificate of the authority in HOME, which is made.",
)
def zookeeper(
    invocation: Invocation,
    action: str | None,
    port: int | None,
    host: str | None,
    data_dir: str | None,
    tls: bool,
) -> None:
    """Run the embedded ZooKeeper server (from pyspark's jars).

    With --tls the certificates are in HOME/zookeeper.tls: the server's, which names this machine
    and --host, and client.pem for storm.zookeeper.ssl.keystore.path of daemons and clients. They
    are renewed at each start.

    With "secure" this closes the nodes of a stopped cluster instead. After that only the cluster's
    user in ZooKeeper (storm.zookeeper.auth.payload, or one derived from the secret) reads and
    writes them. It may be repeated, and is needed once after a secret was set or changed.
    """
    if action == "secure":
        _secure_nodes(invocation)
        return
    from storm_dagster.zk.embedded import ServerFiles, zookeeper_command

    conf, home = _prepare(invocation)
    _log_warnings(conf)
    bound: int = port or conf["storm.zookeeper.port"]
    address = check_exposure(conf, "the embedded ZooKeeper", "zookeeper auth", host)
    files = None
    if tls:
        certificates = CertificateFolder.of(home)
        certificates.prepare(dict.fromkeys((*LOOPBACK_NAMES, address)))
        files = ServerFiles.of(certificates)
    folder = Path(data_dir) if data_dir else home / "zookeeper"
    check_room(folder)
    command = zookeeper_command(folder, bound, host=address, tls=files)
    _become(command, home, "zookeeper", {"client": bound})


def _secure_nodes(invocation: Invocation) -> None:
    """Close the cluster's nodes to others than its user, and print their number.

    :class:`InvalidRequest` if the cluster has no user in ZooKeeper.
    """
    from storm_dagster.cli.output import print_line
    from storm_dagster.zk.root import secure_root
    from storm_dagster.zk.storm_cluster_state import open_session

    conf = invocation.conf
    if zookeeper_payload(conf) is None:
        raise InvalidRequest(
            "the cluster has no user in ZooKeeper: set storm.secret.file (a user is derived from "
            "it) or "
            "storm.zookeeper.auth.payload"
        )

    def print_progress(nodes: int) -> None:
        if nodes >= 1000:
            click.echo(f"{nodes} nodes", err=True)

    with closing(open_session(conf.values)) as session:
        changed = secure_root(session, print_progress)
    place = f"{session.root or '/'} in ZooKeeper at {session.hosts}"
    text = f"{place} is closed to others: {changed} nodes were changed"
    print_line(invocation.json, {"root": session.root, "changed": changed}, text)


@verb("spark")
@click.argument(
    "role",
    type=click.Choice(["connect", "master", "worker"]),
    required=False,
    default="connect",
)
@click.option(
    "--warm-up",
    metavar="REMOTE",
    help="Run the first jobs on the server at REMOTE, then return.",
)
@_host_option
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of a master or worker; 0: any free one. [default: 7077, worker: 0]",
)
@click.option(
    "--ui-port",
    type=click.IntRange(1, 65535),
    help="Serve Spark's web UI on this port of loopback. [default: closed]",
)
@click.option(
    "--cores",
    type=click.IntRange(1),
    help="Cores that a worker offers. [default: all that its process may use]",
)
@click.option("--memory", help="Memory that a worker offers to executors. [default: 1g]")
@click.option("--id", help="Name of a worker's folder. [default: 0]")
def spark(
    invocation: Invocation, role: Literal["connect", "master", "worker"], **options: Any
) -> None:
    """Run the embedded Spark Connect server, or a part of a standalone cluster.

    Spark comes from pyspark's jars. "master" and "worker" make a standalone cluster, on which the
    Connect server runs its jobs if spark.connect.master names it. All three need the same secret:
    storm.secret.file, or one HOME.
    """
    from storm_dagster.spark.server import (
        settings_of,
        spark_connect_command,
        spark_environment,
        sweep_local_dir,
    )

    for name, value in sorted(options.items()):
        if value is not None and name not in _SPARK_OPTIONS[role]:
            raise InvalidRequest(
                f"--{name.replace('_', '-')} is not an option of `daemon spark {role}`: omit it"
            )
    conf, home = _prepare(invocation)
    _log_warnings(conf)
    if role != "connect":
        _become_part(conf, home, role, options)
    if options["warm_up"] is not None:
        run_first_jobs(conf, options["warm_up"])
        return
    port = conf["spark.connect.port"] or _free_port()
    master = conf["spark.connect.master"]
    secret: dict[str, str] = {}
    if master.startswith("spark://"):
        secret["spark.authenticate.secret"] = standalone_secret(conf, home)
    folder = spark_folder(home)
    # Files of a server that was killed; those of one that runs are in use.
    if not any(record.role == "spark" and record.alive() for record in RunFile.read_all(home)):
        sweep_local_dir(folder)
    command = spark_connect_command(
        port,
        folder,
        memory=conf["spark.driver.memory"],
        host=check_exposure(conf, "the embedded Spark server", "secret"),
        conf={**secret, **settings_of(conf.values)},
        master=master,
    )
    environment = {**spark_environment(folder), SPARK_TOKEN: spark_token(conf, home)}
    _become(command, home, "spark", {"connect": port}, environment)


def _become_part(
    conf: ClusterConf, home: Path, role: Literal["master", "worker"], options: dict[str, Any]
) -> NoReturn:
    """Replace this process by a master or worker of a Spark cluster.

    :class:`InvalidRequest` if a worker has no master, :class:`Conflict` if the same part runs.
    """
    from storm_dagster.spark.server import (
        standalone_command,
        standalone_environment,
        sweep_local_dir,
    )

    master = conf["spark.connect.master"]
    id = options["id"] or "0"
    if role == "worker" and not master.startswith("spark://"):
        raise InvalidRequest(
            f"spark.connect.master is {master!r}: set it to the master, such as spark://host:7077"
        )
    folder = home / "spark" / (role if role == "master" else f"{role}-{id}")
    for record in RunFile.read_all(home):
        is_same_part = record.role == f"spark-{role}" and record.id == id
        if is_same_part and record.pid != os.getpid() and record.alive():
            raise Conflict(
                f"a Spark {role} already runs in {folder}: end it, or give a worker another --id"
            )
    sweep_local_dir(folder)
    port = options["port"]
    if port is None:
        port = 7077 if role == "master" else 0
    command = standalone_command(
        role,
        folder,
        standalone_secret(conf, home),
        host=check_exposure(conf, f"the Spark {role}", "secret", options["host"]),
        port=port,
        ui_port=options["ui_port"],
        worker=(master, options["cores"] or whole_cpus(), options["memory"] or "1g"),
    )
    _become(command, home, f"spark-{role}", {role: port}, standalone_environment(folder), id)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@verb("nimbus")
@click.option(
    "--id", "name", help="Name of its local folder. [default: generated at the first start]"
)
def nimbus(invocation: Invocation, name: str | None) -> int:
    """Run a nimbus."""
    from storm_dagster.nimbus.daemon import run

    return _serve(invocation, "nimbus", name, run)


@verb("supervisor")
@click.option("--id", "name", help="Id in the cluster. [default: generated at the first start]")
def supervisor(invocation: Invocation, name: str | None) -> int:
    """Run the supervisor of this host.

    SIGTERM does to its workers as supervisor.on.term says. While it drains, a second SIGTERM ends
    the workers at once.
    """
    from storm_dagster.supervisor.daemon import run

    def serve(conf: ClusterConf, home: Path, daemon_id: str, stop: threading.Event) -> int:
        hurry = threading.Event()
        if conf["supervisor.on.term"] == "drain":
            handle_signals(stop, hurry)
        return run(conf, home, daemon_id, stop, hurry=hurry)

    return _serve(invocation, "supervisor", name, serve)


@verb("worker")
@click.argument("spec", type=_EXISTING_FILE)
def worker(invocation: Invocation, spec: Path) -> None:
    """Run one worker from its SPEC.json. Supervisors call this."""
    os.execv(sys.executable, [sys.executable, "-m", "storm_dagster.worker", str(spec)])


@verb("web")
@click.option(
    "--workspace",
    "workspaces",
    metavar="FILE",
    multiple=True,
    required=True,
    type=_EXISTING_FILE,
    help="Dagster's workspace.yaml. May be repeated.",
)
@_host_option
@click.option("--port", type=click.IntRange(1, 65535), default=3000, show_default=True)
def web(invocation: Invocation, workspaces: tuple[Path, ...], host: str | None, port: int) -> int:
    """Serve Dagster's UI and GraphQL to this user or to administrators.

    With storm.secret administrators may use them. DAGSTER_HOME names the instance. Pages of other
    sites are refused. Unlike dagster-webserver it may listen beyond loopback: a browser prompts for
    a password, which is a token of `storm-dagster token create --scope admin`.
    """
    conf, home = _prepare(invocation)
    if not os.environ.get("DAGSTER_HOME"):
        raise InvalidRequest(
            "DAGSTER_HOME is not set: name the folder of the dagster.yaml that is shown"
        )
    configure_daemon_logging(home, "dagster-webserver", "0", conf)
    _log_warnings(conf)
    from storm_dagster.web.service import serve

    tokens = None
    if Security.of(conf).secret is not None:
        from storm_dagster.zk.access_tokens import OpenedTokenList
        from storm_dagster.zk.storm_cluster_state import open_cluster_state

        tokens = OpenedTokenList(lambda: open_cluster_state(conf))
        tokens.start()
    try:
        token_source = None if tokens is None else tokens.tokens
        serve(conf, workspaces, host, port, stop_event(), token_source)
    finally:
        if tokens is not None:
            tokens.close()
    return 0


@verb("code")
@click.option(
    "--module",
    metavar="MODULE",
    default="storm_dagster.defs",
    show_default=True,
    help="Module of the code location.",
)
@click.option(
    "--location",
    metavar="NAME",
    default="storm",
    show_default=True,
    help="Name of the code location, as workspace.yaml has it.",
)
@click.option("--socket", metavar="FILE", help="Serve on this unix socket.")
@click.option("--port", type=click.IntRange(1, 65535), help="Serve on this port of loopback.")
@click.option(
    "--lazy-load-user-code",
    "lazy",
    is_flag=True,
    help="Serve the error if the module cannot be loaded, instead of ending.",
)
def code(
    invocation: Invocation,
    module: str,
    location: str,
    socket: str | None,
    port: int | None,
    lazy: bool,
) -> None:
    """Run Dagster's code server, with runs as forks of a warm process.

    The warm process has loaded the libraries. The server is `dagster api grpc`, for a code location
    that workspace.yaml names as a grpc_server. Each process that can connect to the socket or port
    can execute code as this user: a socket belongs into a folder of this user, a port is open to
    every user of this machine. Its cluster is that of --home.
    """
    if invocation.conf_dir is not None or invocation.overrides:
        raise InvalidRequest(
            "--conf-dir and -c do not reach the definitions of the code location: name the "
            "cluster by --home, "
            "or by build_storm_defs(conf_dir=...) in the module"
        )
    if (socket is None) == (port is None):
        raise InvalidRequest(
            "Dagster cannot reach the code server: name --socket FILE or --port, as "
            "workspace.yaml does"
        )
    os.environ["STORM_DAGSTER_HOME"] = str(invocation.home)
    # Dagster's code server logs on standard error itself.
    logging.getLogger().handlers.clear()
    from storm_dagster.code_server.server import serve

    arguments = ["--socket", socket] if socket else ["--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--module-name", module, "--location-name", location]
    arguments.append("--use-python-environment-entry-point")
    if lazy:
        arguments.append("--lazy-load-user-code")
    serve(arguments, socket, location)


@verb("warm-runs", hidden=True)
@click.option(
    "--module",
    "modules",
    metavar="MODULE",
    multiple=True,
    default=["storm_dagster.defs"],
    show_default=True,
    help="Module of a code location, as its workspace names it. May be repeated.",
)
def warm_runs(invocation: Invocation, modules: tuple[str, ...]) -> None:
    """End at once: the code server starts the runs, see `storm-dagster daemon code`."""
    notify(
        "`storm-dagster daemon warm-runs` is no longer needed: start the code server with "
        "`storm-dagster daemon "
        "code`, which forks the runs, and remove this daemon"
    )


daemon = verb_group(
    "daemon",
    "Run one daemon of a cluster in this process.",
    zookeeper,
    spark,
    nimbus,
    supervisor,
    worker,
    web,
    code,
    warm_runs,
)

COMMANDS: Mapping[str, click.Command] = {
    "daemon": daemon,
    # Each role was a verb in the release before.
    "zookeeper": zookeeper,
    "spark": spark,
    "nimbus": nimbus,
    "supervisor": supervisor,
    "worker": worker,
    "web": web,
    "warm-runs": warm_runs,
}
