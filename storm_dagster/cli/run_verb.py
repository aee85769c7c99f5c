"""``run``: a topology in this process, without a cluster."""

import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import click

from storm_dagster.cli.code_arguments import code_arguments
from storm_dagster.cli.options import Invocation, topology_options, verb
from storm_dagster.cli.run_display import Display, make_display
from storm_dagster.host.files import make_folder
from storm_dagster.local.code import load_code, make_importable, prepare_topology
from storm_dagster.local.differences import differences
from storm_dagster.local.tail import sinks
from storm_dagster.local.topology_run import RunLimits, TopologyRun
from storm_dagster.model.dagster_events import DagsterEvent
from storm_dagster.security.spark_remote import ClusterSpark

_OBSERVE_SECS = 0.1
_BLOCKED_SECS = 5.0
"""Time after which a task that occupies the loop is named."""
_END_SECS = 10.0
"""Time that the tasks have to end; then the process ends without them."""
_INTERRUPTED = 130


class _DisplayHandler(logging.Handler):
    """Log records as lines of the display, so that they do not break its table."""

    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        try:
            self._display.line(f"{record.levelname}: {record.getMessage()}")
        except Exception:
            self.handleError(record)


class _Observer(threading.Thread):
    """Thread that shows the reports of a run, and ends a run whose loop does not return.

    The loop has the main thread, as in a worker. A component that never returns blocks it, so the
    display, the limit of time and the end after Ctrl-C must not depend on it.
    """

    def __init__(
        self, topology_run: TopologyRun, display: Display, limits: RunLimits, folder: Path
    ) -> None:
        super().__init__(name="observer", daemon=True)
        self._topology_run = topology_run
        self._display = display
        self._limits = limits
        self._folder = folder
        self._ended = threading.Event()
        self._passes = -1
        self._passed_at = time.monotonic()
        """Time at which the loop was seen to advance."""
        self._named = False
        """True if the blocking component was named since then."""

    def end(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        """Observe the run until :meth:`end`."""
        started = time.monotonic()
        ending_since: float | None = None
        # The first report is of the time before the tasks were made.
        last_report = self._topology_run.report
        while not self._ended.wait(_OBSERVE_SECS):
            now = time.monotonic()
            report = self._topology_run.report
            if report is not last_report:
                last_report = report
                self._display.show(report)
            self._name_blocking_component(now)
            if self._limits.secs is not None and now - started > self._limits.secs:
                self._topology_run.stop(f"{self._limits.secs:g} s are over")
            if self._topology_run.is_ending:
                ending_since = ending_since or now
                if now - ending_since > _END_SECS:
                    self._end_process()

    def _name_blocking_component(self, now: float) -> None:
        passes = self._topology_run.passes
        if passes != self._passes:
            self._passes = passes
            self._passed_at = now
            self._named = False
            return
        runner = self._topology_run.blocking_task()
        if self._named or runner is None or now - self._passed_at < _BLOCKED_SECS:
            return
        self._named = True
        self._display.line(
            f"component {runner.component!r} has not returned for {now - self._passed_at:.0f} s, "
            "and all other tasks wait for it: set blocking = True on its class (it then has its "
            "own thread), or make process async"
        )

    def _end_process(self) -> None:
        """End the process although a component does not return."""
        self._display.close(None)
        runner = self._topology_run.blocking_task()
        subject = f"component {runner.component!r}" if runner else "a component"
        click.echo(
            f"{subject} has not returned {_END_SECS:.0f} s after the end: the process ends "
            "without it",
            err=True,
        )
        _exit_at_once(1, self._folder)


def _exit_at_once(code: int, folder: Path) -> NoReturn:
    """End the process without waiting for threads, and delete the run's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@verb("run")
@click.argument("target")
@click.argument("args", nargs=-1)
@click.option("--name", help="Name of the topology. [default: its own]")
@topology_options
@click.option(
    "--show",
    "shown",
    metavar="COMPONENT",
    multiple=True,
    help="Show the last tuples of it. [default: of the bolts that no other one reads]",
)
@click.option("--seconds", type=click.FloatRange(min=0), metavar="N", help="End after N seconds.")
@click.option(
    "--until-idle",
    "idle_secs",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECS",
    help="End when no tuple was emitted, executed or pending for SECS.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the state of components in DIR. [default: a folder deleted at the end]",
)
def run(
    invocation: Invocation,
    target: str,
    args: tuple[str, ...],
    name: str | None,
    shown: tuple[str, ...],
    seconds: float | None,
    idle_secs: float | None,
    state_dir: Path | None,
    **options: Any,
) -> int:
    """Run TARGET in this process, without a cluster.

    It needs neither ZooKeeper nor Java. TARGET and ARGS are those of submit. All tasks run here,
    and a table shows what flows. Ctrl-C ends it. The exit code is 1 if a task reported an error.
    """
    code_options = code_arguments(invocation, options)
    cluster = invocation.conf
    with tempfile.TemporaryDirectory(prefix="storm-dagster-run-") as text:
        folder = Path(text)
        code = load_code(
            target,
            args,
            folder=folder,
            home=code_options["home"],
            requirements=code_options["requirements"],
        )
        topology = prepare_topology(cluster.values, code, code_options["conf"], name)
        kept_state = None
        if state_dir is not None:
            kept_state = make_folder(state_dir.expanduser().absolute(), "--state-dir")
        make_importable(code.root)
        scratch = folder / "scratch"
        scratch.mkdir()
        topology_run = TopologyRun(
            name=topology.spec.name,
            spec=topology.spec,
            conf=topology.conf,
            archive=code.root,
            state_dir=kept_state or folder / "state",
            scratch=scratch,
            shown=shown or sinks(topology.spec),
            cluster_spark=ClusterSpark.of(cluster),
        )
        # Made when all of the input has been checked: errors of the input are one line.
        display = make_display(invocation.json)
        topology_run.on_event = lambda event: display.line(_event_line(event))
        logging.getLogger().handlers[:] = [_DisplayHandler(display)]
        for warning in topology.warnings:
            display.line(f"warning: {warning}")
        display.line(f"{topology.spec.name} runs in this process:")
        for line in differences(topology.spec, topology.conf, topology.submitted, kept_state):
            display.line(f"  {line}")
        limits = RunLimits(secs=seconds, idle_secs=idle_secs)
        return _run_topology(topology_run, display, limits, folder)


def _run_topology(
    topology_run: TopologyRun, display: Display, limits: RunLimits, folder: Path
) -> int:
    """Run to the end, and return the exit code.

    The first SIGINT or SIGTERM ends the run; with the second one the process does not wait for
    tuples in flight.
    """

    def interrupt(number: int, frame: Any) -> None:
        if topology_run.is_ending:
            _exit_at_once(_INTERRUPTED, folder)
        topology_run.stop("Ctrl-C" if number == signal.SIGINT else "SIGTERM")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    # As in a worker: threads of components must not delay the loop, and no pause of the collector
    # is spent on the modules.
    sys.setswitchinterval(0.001)
    gc.freeze()
    observer = _Observer(topology_run, display, limits, folder)
    observer.start()
    try:
        report = topology_run.run(limits)
    except BaseException:
        # An error of the engine itself: the terminal must not stay in its live state.
        observer.end()
        display.close(None)
        raise
    observer.end()
    display.close(report)
    return 1 if report.errors else 0


def _event_line(event: DagsterEvent) -> str:
    """Return a report to Dagster as a line."""
    parts = [f"Dagster: {event.kind} of {event.asset}"]
    if event.partition is not None:
        parts.append(f"partition {event.partition}")
    if event.check is not None:
        parts.append(f"check {event.check} {'passed' if event.passed else 'failed'}")
    if event.description:
        parts.append(event.description)
    if event.metadata:
        parts.append(json.dumps(event.metadata, default=str))
    return ", ".join(parts)


COMMANDS: Mapping[str, click.Command] = {"run": run}
