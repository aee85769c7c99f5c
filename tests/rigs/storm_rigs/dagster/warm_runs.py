"""A real Dagster whose runs start from a warm process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.test_utils import create_run_for_test

from storm_dagster.host.processes import RunFile
from storm_dagster.launcher.run_launcher import STOCK_TAG, WarmRunLauncher, dagster_internals
from storm_dagster.launcher.wire import RUN_ROLE, WARM_TAG, LineConnection
from storm_dagster.testing.waiting import eventually

MODULE = "warm_location"


class Place:
    """A Dagster with warm runs, and the actions of a test."""

    module: str = MODULE

    def __init__(self, folder: Path, instance: dg.DagsterInstance, workspace: Any) -> None:
        self.home: Path = folder / "home"
        self.code: Path = folder / "code"
        self.dagster_home: Path = folder / "dagster"
        self.instance: dg.DagsterInstance = instance
        self._workspace = workspace
        self._warm: subprocess.Popen[bytes] | None = None

    # -- the warm process --------------------------------------------------------------------------
    def start(self) -> subprocess.Popen[bytes]:
        """The warm process, started when it does not run; it may not listen yet."""
        if self._warm is None or self._warm.poll() is not None:
            env = {
                **os.environ,
                "DAGSTER_HOME": str(self.dagster_home),
                "STORM_DAGSTER_HOME": str(self.home),
                "STORM_DAGSTER_LOG_FILES_ONLY": "1",
            }
            self._warm = subprocess.Popen(
                [sys.executable, "-m", "storm_dagster", "daemon", "warm-runs", "--home", str(self.home), "--module", MODULE],
                cwd=self.code,
                env=env,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                umask=0o022,
            )  # fmt: skip
        return self._warm

    @property
    def warm(self) -> subprocess.Popen[bytes]:
        """The warm process, listening."""
        process = self.start()

        def ready() -> bool:
            assert process.poll() is None, self.log()
            LineConnection.connect(self.home).close()
            return True

        eventually(ready, 120, "the warm process", ignore=(OSError,))
        return process

    def kill_warm(self, number: int = signal.SIGKILL) -> None:
        """Kill the warm process only."""
        if self._warm is not None:
            self._warm.send_signal(number)
            self._warm.wait(60)

    def log(self) -> str:
        """Log of the warm process."""
        path = self.home / "logs" / "warm-runs-0.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    # -- runs --------------------------------------------------------------------------------------
    @property
    def launcher(self) -> WarmRunLauncher:
        """The launcher of Dagster's webserver."""
        found = self.instance.run_launcher
        assert isinstance(found, WarmRunLauncher)
        return found

    def create(self, how: str = "well") -> str:
        """Create a run without launching it."""
        context = self._workspace.create_request_context()
        repository = next(iter(context.code_locations[0].get_repositories().values()))
        job = repository.get_full_job("job")
        return create_run_for_test(
            self.instance,
            job_name="job",
            run_config={"ops": {"work": {"config": {"how": how}}}},
            remote_job_origin=job.get_remote_origin(),
            job_code_origin=job.get_python_origin(),
        ).run_id

    def launch(self, how: str = "well", run_id: str | None = None) -> str:
        """Launch a run as the webserver does."""
        run_id = run_id or self.create(how)
        self.instance.launch_run(run_id, self._workspace.create_request_context())
        return run_id

    def request(self, run_id: str) -> dict[str, Any]:
        """A launcher's request to the warm process."""
        internals, origin = dagster_internals(), self.run(run_id).job_code_origin
        assert internals is not None and origin is not None
        pointer: Any = origin.repository_origin.code_pointer
        arguments = internals.ExecuteRunArgs(
            job_origin=origin, run_id=run_id, instance_ref=self.instance.get_ref()
        ).get_command_args()
        return {
            "run_id": run_id,
            "arguments": list(arguments[-3:]),
            "module": pointer.module,
            "working_directory": pointer.working_directory,
            "image": None,
            "python": origin.repository_origin.executable_path,
            "dagster_home": self.instance.root_directory,
        }

    def run(self, run_id: str) -> dg.DagsterRun:
        found = self.instance.get_run_by_id(run_id)
        assert found is not None
        return found

    def ended(self, run_id: str) -> str:
        """The run's final status."""
        eventually(lambda: self.run(run_id).is_finished, 90, f"the end of run {run_id}")
        return self.run(run_id).status.value

    def told(self, run_id: str) -> Path:
        """What a run that was launched to "tell" has written."""
        return self.code / f"{run_id}.json"

    def works(self, run_id: str) -> RunFile:
        """Process of a run, once it executes its step."""
        eventually(lambda: self._stepping(run_id), 60, "the run's step")
        found = RunFile.read(RunFile.path_of(self.home, RUN_ROLE, run_id))
        assert found is not None
        return found

    def _stepping(self, run_id: str) -> bool:
        return bool(self.instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_START))

    def started_warm(self, run_id: str) -> bool:
        tags = self.run(run_id).tags
        return WARM_TAG in tags and STOCK_TAG not in tags

    def messages(self, run_id: str) -> str:
        """Every message of the run."""
        entries = self.instance.all_logs(run_id)
        return "\n".join(
            str(entry.dagster_event.message if entry.dagster_event else entry.message)
            for entry in entries
        )
