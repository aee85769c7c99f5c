"""Run launcher for ``dagster.yaml``; it runs in Dagster's webserver and daemon."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dagster as dg

from storm_dagster.host.processes import RunFile
from storm_dagster.host.waiting import poll
from storm_dagster.launcher import wire
from storm_dagster.launcher.compatibility import dagster_internals

log: logging.Logger = logging.getLogger(__name__)

STOCK_TAG = ".dagster/grpc_info"
"""Run tag by which the stock launcher finds the code server that runs the run."""
GRACE_SECS = 20.0
"""Time that a terminated run has to end gracefully."""


class WarmRunLauncher(dg.DefaultRunLauncher):
    """Run launcher that uses forks of the warm process of ``home``, or else the stock launcher.

    ``home`` is the state folder in which ``storm-dagster daemon warm-runs`` listens (default:
    ``STORM_DAGSTER_HOME``). A run is launched the stock way if nothing listens there or responds
    within a second, if the warm process has not loaded its definitions, or if their files have
    changed since. A run is never started twice and never lost: if its process dies, the warm
    process marks it as failed, with the reason, or run monitoring does if the warm process is dead
    too.
    """

    def __init__(self, inst_data: Any = None, home: str | None = None) -> None:
        super().__init__(inst_data=inst_data)
        self._home = home

    @classmethod
    def config_type(cls) -> Any:
        """Config schema: ``home``, which may be ``{env: NAME}``."""
        return {"home": dg.Field(dg.StringSource, is_required=False)}

    @classmethod
    def from_config_value(
        cls, inst_data: Any, config_value: Mapping[str, Any]
    ) -> "WarmRunLauncher":
        """Create the launcher from ``dagster.yaml`` (called by Dagster)."""
        return cls(inst_data=inst_data, home=config_value.get("home"))

    @property
    def home(self) -> Path | None:
        """Home of the warm process; ``None`` if it is not configured."""
        named = self._home or os.environ.get("STORM_DAGSTER_HOME")
        return Path(named).expanduser().absolute() if named else None

    # -- launching ---------------------------------------------------------------------------------
    def launch_run(self, context: Any) -> None:
        """Launch the run, warm if possible."""
        if not self._launch_warm(context):
            super().launch_run(context)

    def _launch_warm(self, context: Any) -> bool:
        """Try to launch the run in a fork of the warm process. Whether it was."""
        home, internals, run = self.home, dagster_internals(), context.dagster_run
        origin = run.job_code_origin
        if home is None or internals is None or origin is None:
            return False
        try:
            connection = wire.LineConnection.connect(home)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.info("run %s starts the stock way: no warm process (%s)", run.run_id, error)
            return False
        try:
            repository = origin.repository_origin
            pointer = repository.code_pointer
            arguments = internals.ExecuteRunArgs(
                job_origin=origin, run_id=run.run_id, instance_ref=self._instance.get_ref()
            ).get_command_args()
            connection.send(
                {
                    "run_id": run.run_id,
                    "arguments": list(arguments[-3:]),
                    "module": getattr(pointer, "module", None),
                    "working_directory": getattr(pointer, "working_directory", None),
                    "image": repository.container_image,
                    "python": repository.executable_path or sys.executable,
                    "dagster_home": self._instance.root_directory,
                }
            )
            answer = connection.receive(wire.ANSWER_SECS)
            if answer is None or "ready" not in answer:
                reason = (answer or {}).get("refused", "it closed the connection")
                log.info("run %s starts the stock way: %s", run.run_id, reason)
                return False
            self._instance.add_run_tags(run.run_id, {wire.WARM_TAG: wire.here()})
            state = wire.next_launcher("asking", "ready")
            connection.send(wire.GO)
            state = wire.next_launcher(state, "sent")
            return (
                wire.next_launcher(state, connection.await_message("started", wire.ANSWER_SECS))
                == "launched"
            )
        except (OSError, ValueError) as error:
            log.info("run %s starts the stock way: %s", run.run_id, error or type(error).__name__)
            return False
        finally:
            connection.close()

    # -- ending ------------------------------------------------------------------------------------
    def terminate(self, run_id: str) -> bool:
        """Interrupt the run's process; KILL it if it has not exited after 20 seconds.

        ``False`` if the run has finished.
        """
        run = self._instance.get_run_by_id(run_id) if self.has_instance else None
        if run is None or run.is_finished:
            return False
        if wire.WARM_TAG not in run.tags or STOCK_TAG in run.tags:
            return super().terminate(run_id)
        self._instance.report_run_canceling(run)
        place = wire.same_place(run.tags[wire.WARM_TAG])
        record = (
            wire.run_record(self.home, run_id)
            if self.home is not None and place == "here"
            else None
        )
        if place == "elsewhere" or self.home is None:
            self._instance.report_engine_event(
                "The run's process is on another machine, or in another container: terminate it from there.",
                run,
            )
            return False
        if record is None or not record.signal(signal.SIGINT):
            _report_canceled(self._instance, run_id, "The run's process was gone already.")
            return True
        threading.Thread(
            target=self._force,
            args=(self._instance, run_id, record),
            name="terminate-run",
            daemon=True,
        ).start()
        return True

    def _force(self, instance: dg.DagsterInstance, run_id: str, record: RunFile) -> None:
        has_ended = poll(lambda: not record.alive(), timeout=GRACE_SECS)
        if not has_ended and record.signal(signal.SIGKILL):
            _report_canceled(
                instance, run_id, f"The run's process was killed after {GRACE_SECS:g} s."
            )

    # -- health ------------------------------------------------------------------------------------
    @property
    def supports_check_run_worker_health(self) -> bool:
        """Whether Dagster's run monitoring can check a run's process."""
        return dagster_internals() is not None

    def check_run_worker_health(self, run: Any) -> Any:
        """Check whether the run's process lives.

        Only for a run that was started warm on this machine; the code server watches a stock one.
        """
        internals = dagster_internals()
        assert internals is not None
        status = internals.WorkerStatus
        home, place = self.home, wire.same_place(run.tags.get(wire.WARM_TAG, ""))
        if place == "before" and STOCK_TAG not in run.tags:
            return internals.CheckRunHealthResult(status.FAILED, "the machine was rebooted since")
        if home is None or STOCK_TAG in run.tags or place == "elsewhere":
            return internals.CheckRunHealthResult(status.RUNNING, "not checked from here")
        record = wire.run_record(home, run.run_id)
        if record is not None and record.alive():
            return internals.CheckRunHealthResult(status.RUNNING, run_worker_id=str(record.pid))
        named = f" (pid {record.pid})" if record is not None else ""
        return internals.CheckRunHealthResult(status.FAILED, f"the run's process{named} is gone")


def _report_canceled(instance: dg.DagsterInstance, run_id: str, reason: str) -> None:
    run = instance.get_run_by_id(run_id)
    if run is not None and not run.is_finished:
        instance.report_run_canceled(run, reason)
