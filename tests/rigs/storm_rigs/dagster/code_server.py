"""A real Dagster, and its code server as ``daemon code`` starts it, with a code location in a
folder.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dagster as dg
import psutil
from dagster._core.test_utils import create_run_for_test
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import GrpcServerTarget

from storm_dagster.testing.waiting import eventually

MODULE = "code_of_users"
DEFINITIONS = """
import json, logging, multiprocessing, os, signal, sys, time
from pathlib import Path
import dagster as dg
import numpy.random

FOLDER = Path(__file__).parent
NAMES = json.loads((FOLDER / "names.json").read_text())
logging.basicConfig(filename=FOLDER / "location.log", level=logging.INFO, format="%(message)s")

# The number that a child process draws, with the seed of this process.
def number_of_fork():
    numpy.random.seed(7)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, str(numpy.random.random()).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return float(os.read(reader, 100))

class How(dg.Config):
    how: str = "well"

@dg.op
def work(context, config: How):
    print("work says", "HELLO", flush=True)
    logging.getLogger("location").info("told by %s", context.run_id)
    told = {"number": numpy.random.random(), "names": NAMES, "pid": os.getpid(), "parent": os.getppid(),
            "threads": os.environ.get("OPENBLAS_NUM_THREADS"), "home": os.environ.get("STORM_DAGSTER_HOME"),
            "start_method": multiprocessing.get_start_method(), "forked": number_of_fork()}
    written = FOLDER / f"{context.run_id}.part"
    written.write_text(json.dumps(told))
    written.rename(FOLDER / f"{context.run_id}.json")
    if config.how == "badly":
        raise ValueError("wrong")
    if config.how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while config.how == "long":
        time.sleep(0.05)

@dg.job(executor_def=dg.in_process_executor)
def job():
    work()

defs = dg.Definitions(jobs=[job])
"""
SETTINGS = """
run_launcher:
  module: storm_dagster.launcher
  class: WarmRunLauncher
  config: {home: /srv/storm}
run_coordinator:
  module: dagster._core.run_coordinator
  class: DefaultRunCoordinator
telemetry: {enabled: false}
"""
"""As an earlier release had it."""
DAEMON: tuple[str, ...] = (
    "-m",
    "storm_dagster",
    "daemon",
    "code",
    "--module",
    MODULE,
    "--location",
    "location",
)
"""Arguments of the interpreter."""


def _lives(process: psutil.Process) -> bool:
    """True while the process can still do something; one that nobody has waited for cannot."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class CodeServer:
    """One Dagster with one code server, and the actions of a test."""

    def __init__(self, folder: Path, program: Sequence[str] = DAEMON) -> None:
        self.home: Path = folder / "home"
        self.code: Path = folder / "code"
        self.output: Path = folder / "output"
        self._socket = folder / "code.sock"
        for name in ("home", "code", "dagster"):
            (folder / name).mkdir()
        (self.code / f"{MODULE}.py").write_text(DEFINITIONS, encoding="utf-8")
        (self.code / "names.json").write_text('["Ann"]', encoding="utf-8")
        (folder / "dagster" / "dagster.yaml").write_text(SETTINGS, encoding="utf-8")
        # Its tables, which two processes would create at once.
        self.instance: dg.DagsterInstance = dg.DagsterInstance.from_config(str(folder / "dagster"))
        self._dagster_home = folder / "dagster"
        self._program = program
        self._workspace: WorkspaceProcessContext | None = None
        self._process: subprocess.Popen[bytes] = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        """Start it (again)."""
        where = ["--socket", str(self._socket), "--home", str(self.home)]
        with self.output.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, *where],
                cwd=self.code,
                env={
                    **os.environ,
                    "DAGSTER_HOME": str(self._dagster_home),
                    "DAGSTER_DISABLE_TELEMETRY": "yes",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                umask=0o022,
            )
        return self._process

    def kill(self, spare: psutil.Process) -> None:
        """Kill it and all that it has started, but ``spare`` and the process that forked it."""
        spared = {spare.pid, spare.ppid()}
        family = [
            process
            for process in psutil.Process(self._process.pid).children(recursive=True)
            if process.pid not in spared
        ]
        self._process.kill()
        self._process.wait(30)
        for process in family:
            process.kill()
        # The spared process may leave its dead children for a while, so none of them is waited for.
        eventually(lambda: not any(map(_lives, family)), 30, "the end of what it has started")

    def connect(self) -> None:
        """Connect as Dagster's webserver, once the code server listens."""

        def ready() -> bool:
            assert self._process.poll() is None, self.said()
            return self._socket.exists()

        eventually(ready, 120, "the code server")
        target = GrpcServerTarget(
            host="localhost", port=None, socket=str(self._socket), location_name="location"
        )
        self._workspace = WorkspaceProcessContext(self.instance, target)

    def close(self) -> None:
        """End it, and what it has started."""
        if self._workspace is not None:
            self._workspace.__exit__(None, None, None)
        started = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        _, left = psutil.wait_procs(started, 30)
        for process in left:
            process.kill()
        self.instance.dispose()
        assert not left, "it leaves processes behind"

    def said(self) -> str:
        """What it has printed."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def fork_server(self) -> psutil.Process | None:
        """The process that forks, or ``None`` when there is none."""
        for process in psutil.Process(self._process.pid).children():
            if "multiprocessing.forkserver" in " ".join(process.cmdline()):
                return process
        return None

    # -- runs --------------------------------------------------------------------------------------
    def launch(self, how: str = "well") -> str:
        """Launch a run as the webserver does."""
        assert self._workspace is not None
        context = self._workspace.create_request_context()
        repository = next(iter(context.code_locations[0].get_repositories().values()))
        job = repository.get_full_job("job")
        run_id = create_run_for_test(
            self.instance,
            job_name="job",
            run_config={"ops": {"work": {"config": {"how": how}}}},
            remote_job_origin=job.get_remote_origin(),
            job_code_origin=job.get_python_origin(),
        ).run_id
        self.instance.launch_run(run_id, context)
        return run_id

    def run(self, run_id: str) -> dg.DagsterRun:
        """The run as it is now."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run

    def ended(self, run_id: str) -> str:
        """The run's final status."""
        eventually(lambda: self.run(run_id).is_finished, 90, f"the end of run {run_id}")
        return self.run(run_id).status.value

    def told(self, run_id: str) -> dict[str, Any]:
        """What the run has written, once it has."""
        path = self.code / f"{run_id}.json"
        eventually(path.exists, 60, f"the step of run {run_id}")
        return json.loads(path.read_text(encoding="utf-8"))

    def messages(self, run_id: str) -> str:
        """Every message of the run."""
        entries = self.instance.all_logs(run_id)
        return "\n".join(
            str(entry.dagster_event.message if entry.dagster_event else entry.message)
            for entry in entries
        )
