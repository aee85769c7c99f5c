"""Process of one run, and the tag that identifies it.

``multiprocessing``'s fork server forks it. The process writes the tag before the run begins. A
later code server compares it with the live processes, see
:mod:`storm_dagster.code_server.lost_runs`.
"""

import logging
import os
import socket
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, ValidationError

from storm_dagster.host.clock import boot_id
from storm_dagster.host.processes import ExactProcess, start_ticks

log: logging.Logger = logging.getLogger(__name__)

PROCESS_TAG = ".dagster/storm_run_process"
"""Hidden run tag: a :class:`RunProcessRecord` as JSON."""


class RunProcessRecord(BaseModel, ExactProcess, frozen=True, extra="ignore"):
    """Exact process of a run: its machine, boot, pid namespace, pid and start."""

    run_id: str
    """Id of the run; Dagster copies tags to a retry, which has another process."""
    machine: str
    """:func:`machine_id` of the process."""
    boot_id: str
    pid_namespace: str
    """:func:`pid_namespace` of the process: its pid is valid only there."""
    pid: int
    start_ticks: int
    """Start of the process in clock ticks since the boot; 0 if it is unknown."""

    @staticmethod
    def of_this_process(run_id: str) -> "RunProcessRecord":
        """The record of the calling process."""
        pid = os.getpid()
        return RunProcessRecord(
            run_id=run_id,
            machine=machine_id(),
            boot_id=boot_id(),
            pid_namespace=pid_namespace(),
            pid=pid,
            start_ticks=start_ticks(pid) or 0,
        )

    @staticmethod
    def of_run(run: dg.DagsterRun) -> "RunProcessRecord | None":
        """The record in the run's tag; ``None`` without one, or for another run's record."""
        try:
            record = RunProcessRecord.model_validate_json(run.tags.get(PROCESS_TAG, ""))
        except ValidationError:
            return None
        return record if record.run_id == run.run_id else None

    def is_gone(self) -> bool:
        """True if the process was on this machine, and is certainly dead.

        A container that is restarted under its host name has a new pid namespace; the processes of
        the former one have ended with it.
        """
        if self.machine != machine_id():
            return False
        return self.pid_namespace != pid_namespace() or not self.alive()


def machine_id() -> str:
    """Host name and id of this machine or container; a restart does not change them."""
    try:
        installation = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        installation = ""
    return f"{socket.gethostname()} {installation}".strip()


def pid_namespace() -> str:
    """Namespace of this process's pids; empty on systems without namespaces."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


class RunProcess(ForkServerProcess):
    """A process of the fork server with the settings of a spawned one.

    Its target is Dagster's function that executes a run; the first argument of that function names
    the run.
    """

    # `multiprocessing` makes this the default method in the process, as in Dagster's own code
    # server: a `Pool` of users' code works in the same way.
    _start_method = "spawn"

    def run(self) -> None:
        """Tag the run with this process, and execute it.

        An error of the tag is only logged.
        """
        # `multiprocessing` would put files and sockets of this process into the temporary folder of
        # its parent. That belongs to the code server, which empties it at its next start.
        configuration: Any = getattr(self, "_config", None)
        if isinstance(configuration, dict):
            configuration.pop("tempdir", None)
        arguments: Any = getattr(self, "_args", ())
        try:
            _tag_run(arguments[0])
        except Exception:
            log.exception("the process of a run is not recorded: its loss would not be noticed")
        super().run()


class RunContext(ForkServerContext):
    """Context of ``multiprocessing`` whose processes are runs."""

    Process = RunProcess


def _tag_run(serialized_arguments: str) -> None:
    """Tag the run with the record of this process.

    ``serialized_arguments`` are those of Dagster's function that executes a run.
    """
    arguments: Any = dg.deserialize_value(serialized_arguments)
    record = RunProcessRecord.of_this_process(arguments.run_id)
    with dg.DagsterInstance.from_ref(arguments.instance_ref) as instance:
        instance.add_run_tags(arguments.run_id, {PROCESS_TAG: record.model_dump_json()})
