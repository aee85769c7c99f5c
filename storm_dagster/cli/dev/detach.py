"""``dev`` in the foreground and detached; both report the same way."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from storm_dagster.cli.dev.cluster import DevCluster
from storm_dagster.cli.dev.daemon import spawn
from storm_dagster.cli.dev.plan import ClusterPlan
from storm_dagster.cli.log_setup import configure_daemon_logging
from storm_dagster.cli.output import Steps
from storm_dagster.client.command import CLUSTER_MARK
from storm_dagster.client.waiting import Progress
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.model.errors import StormDagsterError, Unavailable, error_from_document

log: logging.Logger = logging.getLogger(__name__)
REPORT_FD = "STORM_DAGSTER_REPORT_FD"
"""Environment variable: the pipe on which a detached ``dev`` reports to the command that started
it.
"""


def _run(plan: ClusterPlan, progress: Progress, ready: Callable[[ClusterFile], None]) -> None:
    """Run the cluster until SIGINT, SIGTERM or SIGHUP.

    ``ready`` is called with its addresses once all daemons serve. A second signal hurries the end.
    Children have the default handlers, other than with an inherited "ignore" (``dev &`` in a
    script).
    """
    stop = threading.Event()
    cluster = DevCluster(plan, progress, stop)

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            cluster.hurry.set()
        stop.set()

    signal.signal(signal.SIGINT, handle)
    signal.signal(signal.SIGTERM, handle)
    # Under nohup it must survive the terminal.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handle)
    cluster.run(ready)


def run_foreground(plan: ClusterPlan, ready: Callable[[ClusterFile], None]) -> None:
    """Run the cluster in this process until Ctrl-C, SIGTERM or ``stop``.

    ``ready`` gets its addresses once all daemons serve.
    """
    configure_daemon_logging(plan.home, "dev", "0", plan.conf, stderr_level=logging.WARNING)
    with Steps(f"starting a cluster in {plan.home}") as steps:
        _run(plan, steps.on_step, ready)


def run_child(plan: ClusterPlan) -> None:
    """Run the cluster as the detached process.

    It reports on the inherited pipe, a line of JSON for each step, until it is ready or has failed.
    """
    os.environ["STORM_DAGSTER_LOG_FILES_ONLY"] = "1"
    configure_daemon_logging(plan.home, "dev", "0", plan.conf)
    with os.fdopen(int(os.environ.pop(REPORT_FD)), "w", encoding="utf-8") as pipe:
        os.set_inheritable(pipe.fileno(), False)
        lock = threading.Lock()

        def send(document: dict[str, Any]) -> None:
            # If the waiting command was ended, the cluster continues.
            with lock, suppress(OSError, ValueError):
                pipe.write(json.dumps(document) + "\n")
                pipe.flush()

        def ready(cluster: ClusterFile) -> None:
            send({"ready": cluster.model_dump(mode="json")})
            # Later steps find it closed, which ``send`` ignores.
            pipe.close()

        try:
            _run(plan, lambda *step: send({"step": step}), ready)
        except StormDagsterError as error:
            log.error("%s", error.message)
            send(error.to_document())
        except Exception as error:
            log.exception("dev failed")
            send({"error": {"type": "StormDagsterError", "message": repr(error)}})


def _await_ready(reading: int, child: subprocess.Popen[bytes], home: Path) -> ClusterFile | None:
    """Show the steps that the child reports, until its cluster is ready.

    ``None`` if the child has ended before. Raises the error that it reports.
    """
    with (
        os.fdopen(reading, encoding="utf-8") as pipe,
        Steps(f"starting a cluster in {home}") as steps,
    ):
        for line in pipe:
            document = json.loads(line)
            if "step" in document:
                steps.on_step(*document["step"])
            elif "ready" in document:
                return ClusterFile.model_validate_json(json.dumps(document["ready"]))
            elif "error" in document:
                child.wait(60)
                raise error_from_document(document)
    return None


def start_detached(home: Path) -> ClusterFile:
    """Start this command in a new session; wait until it is ready.

    There it calls :func:`run_child`. Raises the error with which the start failed. Ctrl-C during
    the wait ends the cluster.
    """
    (home / "logs").mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    output = home / "logs" / "dev-0.out"
    env = dict(os.environ)
    env[REPORT_FD] = str(writing)
    env["STORM_DAGSTER_HOME"] = str(home)
    # A cluster that another cluster's start job starts is not a part of that cluster.
    env.pop(CLUSTER_MARK, None)
    child = spawn(
        [sys.executable, "-m", "storm_dagster", *sys.argv[1:]], output, env, pass_fds=[writing]
    )
    os.close(writing)
    try:
        cluster = _await_ready(reading, child, home)
    except KeyboardInterrupt:
        child.terminate()
        child.wait(60)
        raise
    if cluster is not None:
        return cluster
    code = child.wait(60)
    raise Unavailable(
        f"the cluster ended before it was ready (code {code}); the end of {output}:\n"
        f"{output.read_bytes()[-1500:].decode('utf-8', 'replace').strip()}"
    )
