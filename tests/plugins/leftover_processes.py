"""A test run leaves no process behind: what still runs when it ends fails it, by command line, and
is ended.

Processes are known by a mark in their environment, or by a path of the run's temporary folder in
their command line where the environment was replaced.
"""

from __future__ import annotations

import os
import time
import uuid

import psutil
import pytest

from storm_dagster.testing.waiting import patience

MARK = "STORM_DAGSTER_TEST_RUN"
GRACE = 20.0
"""Seconds that a process may take to end after its signal."""


class LeftoverProcesses:
    """The guard of the process that began the run; workers of pytest-xdist only report
    themselves.
    """

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.ours = {os.getpid()}
        self.folder: str | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Learn which processes are pytest's own."""
        output = getattr(node, "workeroutput", None) or {}
        self.ours |= {output["pid"]} if "pid" in output else set()

    def left(self) -> dict[psutil.Process, str]:
        """Live processes of this run -> their command lines."""
        found = {}
        for process in psutil.process_iter():
            try:
                if process.pid in self.ours or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = " ".join(process.cmdline())
                if "from multiprocessing" in command and process.ppid() in self.ours:
                    continue  # The servers of multiprocessing end with the process that uses them.
                marked = process.environ().get(MARK) == self.mark
            except psutil.Error:
                continue
            if marked or (self.folder is not None and self.folder in command):
                found[process] = command
        return found

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail the run for what is left."""
        factory = getattr(session.config, "_tmp_path_factory", None)
        self.folder = f"{factory.getbasetemp()}/" if factory is not None else None
        deadline = time.monotonic() + patience(GRACE)
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if not left:
            return
        told = "\n".join(f"{process.pid}: {command}" for process, command in left.items())
        for process in left:
            try:
                for each in (*process.children(recursive=True), process):
                    each.kill()
            except psutil.Error:
                continue
        report = pytest.TestReport(
            nodeid="processes left behind", location=("", None, "processes left behind"), keywords={},
            outcome="failed", longrepr=f"Still running when all tests had ended:\n{told}", when="teardown",
        )  # fmt: skip
        session.config.hook.pytest_runtest_logreport(report=report)
        session.testsfailed += 1
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_configure(config: pytest.Config) -> None:
    """Mark the run; a run within a test of another one is part of that."""
    if hasattr(config, "workerinput") or MARK in os.environ:
        return
    os.environ[MARK] = uuid.uuid4().hex
    config.pluginmanager.register(LeftoverProcesses(os.environ[MARK]))
    config.add_cleanup(lambda: os.environ.pop(MARK, None))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Report this worker to the process that began the run."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["pid"] = os.getpid()
