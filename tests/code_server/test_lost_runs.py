"""The runs that a code server reports as lost: those alone whose process is certainly gone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.test_utils import create_run_for_test

from storm_dagster.code_server.lost_runs import report_lost_runs
from storm_dagster.code_server.run_process import PROCESS_TAG, RunProcessRecord

LOCATION = "location"


class Runs:
    """Runs of one code server."""

    def __init__(self, folder: Path) -> None:
        self.socket: Path = folder / "code.sock"
        self.instance: dg.DagsterInstance = dg.DagsterInstance.local_temp(str(folder))

    def add(self, status: str = "STARTED", **changes: Any) -> str:
        """Add a run; without ``changes`` to its record, this process is that of the run."""
        code_location = GrpcServerCodeLocationOrigin(
            host="localhost", socket=str(self.socket), location_name=LOCATION
        )
        repository = RemoteRepositoryOrigin(code_location, "repository")
        run_id = create_run_for_test(
            self.instance,
            job_name="job",
            status=dg.DagsterRunStatus(status),
            remote_job_origin=RemoteJobOrigin(repository, "job"),
            tags={".dagster/grpc_info": json.dumps({"socket": str(self.socket)})},
        ).run_id
        record = RunProcessRecord.of_this_process(run_id).model_copy(update=changes)
        self.instance.add_run_tags(run_id, {PROCESS_TAG: record.model_dump_json()})
        return run_id

    def status(self, run_id: str) -> str:
        """Status of the run."""
        run = self.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status.value

    def report(self, socket: Path | None = None) -> list[str]:
        """Report the lost runs as a code server at that socket."""
        return report_lost_runs(self.instance, str(socket or self.socket), LOCATION)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path)
    yield made
    made.instance.dispose()


@pytest.mark.parametrize(
    ("status", "end"),
    [("STARTING", "FAILURE"), ("STARTED", "FAILURE"), ("CANCELING", "CANCELED")],
)
def test_a_run_whose_pid_belongs_to_a_later_process_is_lost(
    runs: Runs, status: str, end: str
) -> None:
    run_id = runs.add(status, start_ticks=1)
    assert runs.report() == [run_id] and runs.status(run_id) == end


@pytest.mark.parametrize("former", [{"boot_id": "former"}, {"pid_namespace": "former"}])
def test_a_run_before_a_restart_of_the_machine_or_container_is_lost(
    runs: Runs, former: dict[str, str]
) -> None:
    run_id = runs.add(**former)
    assert runs.report() == [run_id]


def test_a_live_run_is_not_lost_when_the_clock_is_set(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = runs.add()
    run = runs.instance.get_run_by_id(run_id)
    day_before = time.time() - 86400
    with monkeypatch.context() as former_clock:
        former_clock.setattr(time, "time", lambda: day_before)
        message = f"Started process for run (pid: {os.getpid()})."
        runs.instance.report_engine_event(message, run)
    assert runs.report() == [] and runs.status(run_id) == "STARTED"


def test_a_run_of_another_machine_is_left_to_it(runs: Runs) -> None:
    run_id = runs.add(machine="another", pid=2**22 + 1)
    assert runs.report() == [] and runs.status(run_id) == "STARTED"


def test_the_record_of_the_run_before_a_retry_is_no_evidence(runs: Runs) -> None:
    run_id = runs.add("STARTING", run_id="the run before", start_ticks=1)
    assert runs.report() == [] and runs.status(run_id) == "STARTING"


def test_a_run_that_succeeds_while_the_list_is_read_stays_successful(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = runs.add(start_ticks=1)
    read = runs.instance.get_runs

    def read_before_the_end(**settings: Any) -> Any:
        unfinished = read(**settings)
        event = dg.DagsterEvent(
            event_type_value=dg.DagsterEventType.RUN_SUCCESS.value, job_name="job"
        )
        runs.instance.report_dagster_event(event, run_id)
        return unfinished

    monkeypatch.setattr(runs.instance, "get_runs", read_before_the_end)
    assert runs.report() == [] and runs.status(run_id) == "SUCCESS"


def test_the_socket_may_be_spelled_in_another_way(runs: Runs, tmp_path: Path) -> None:
    run_id = runs.add(start_ticks=1)
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    assert runs.report(tmp_path / "other.sock") == []
    assert runs.report(link / "code.sock") == [run_id]
