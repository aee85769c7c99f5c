"""Runs that start warm: as any other run, whoever dies meanwhile; and stock ones wherever warm is
not possible.
"""

from __future__ import annotations

import json
import logging
import os
import signal

import dagster as dg
import pytest

from storm_dagster.host.processes import run_dir
from storm_dagster.launcher import run_launcher, wire
from storm_dagster.launcher.compatibility import dagster_internals
from storm_dagster.launcher.wire import SOCKET, WARM_TAG, LineConnection, here, listen, run_records
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.warm_runs import Place


def test_a_run_starts_warm_and_its_output_is_captured(place: Place) -> None:
    warm = place.warm
    run_id = place.launch()
    assert place.ended(run_id) == "SUCCESS"
    assert place.started_warm(run_id)
    captured = dg.DagsterEventType.LOGS_CAPTURED
    event = place.instance.all_logs(run_id, of_type=captured)[0].dagster_event
    assert event is not None
    key = [run_id, "compute_logs", event.logs_captured_data.file_key]
    output = place.instance.compute_log_manager.get_log_data(key).stdout
    assert output is not None and b"work says HELLO" in output
    eventually(lambda: not run_records(place.home), 20, "the end of the run's process")
    assert warm.poll() is None


def test_a_run_draws_writes_and_logs_as_in_an_interpreter_of_its_own(place: Place) -> None:
    numbers = set()
    assert place.warm
    for _ in range(2):
        run_id = place.launch("tell")
        assert place.ended(run_id) == "SUCCESS" and place.started_warm(run_id)
        told = place.told(run_id)
        numbers.add(json.loads(told.read_text(encoding="utf-8"))["number"])
        assert told.stat().st_mode & 0o777 == 0o644
        log = (place.code / "location.log").read_text(encoding="utf-8")
        assert f"told by {run_id}" in log and f"warned by {run_id}" in log
    assert len(numbers) == 2
    assert "told by" not in place.log()


def test_a_run_that_fails_is_a_failed_run(place: Place) -> None:
    assert place.warm
    run_id = place.launch("badly")
    assert place.ended(run_id) == "FAILURE"
    assert "Steps failed" in place.messages(run_id)


@pytest.mark.parametrize(
    ("how", "message"), [("killed", "was killed by SIGKILL"), ("gone", "ended with exit status 0")]
)
def test_a_run_whose_process_dies_is_failed_with_the_reason(
    place: Place, how: str, message: str
) -> None:
    assert place.warm
    run_id = place.launch(how)
    assert place.ended(run_id) == "FAILURE"
    assert message in place.messages(run_id)
    eventually(lambda: not run_records(place.home), 20, "the file of the dead process to go")


def test_a_run_is_terminated_in_order(place: Place) -> None:
    assert place.warm
    run_id = place.launch("long")
    record = place.works(run_id)
    assert place.launcher.check_run_worker_health(place.run(run_id)).status.value == "RUNNING"
    assert place.launcher.terminate(run_id)
    assert place.ended(run_id) == "CANCELED"
    eventually(lambda: not record.alive(), 20, "the end of its process")
    assert not place.launcher.terminate(run_id)


def test_a_run_that_does_not_heed_its_termination_is_killed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert place.warm
    monkeypatch.setattr(run_launcher, "GRACE_SECS", 0.5)
    run_id = place.launch("deaf")
    record = place.works(run_id)
    assert place.launcher.terminate(run_id)
    assert place.ended(run_id) == "CANCELED"
    eventually(lambda: not record.alive(), 20, "the end of its process")


def test_only_what_can_be_known_of_a_runs_process_is_judged(place: Place) -> None:
    def health(tag: str | None) -> str:
        tags = {} if tag is None else {WARM_TAG: tag}
        return place.launcher.check_run_worker_health(dg.DagsterRun("job", tags=tags)).status.value

    machine, boot, namespace = here().rsplit(" ", 2)
    # No process of that run is here, which means something only where it was started.
    assert health(here()) == "FAILED"
    assert health(f"{machine} another-boot {namespace}") == "FAILED"
    assert health(f"{machine} {boot} another-container") == "RUNNING"
    assert health(f"another-machine - {boot} {namespace}") == "RUNNING"
    assert health(None) == "RUNNING"


def test_a_launcher_that_gives_up_leaves_a_run_that_was_not_started(place: Place) -> None:
    assert place.warm
    run_id = place.create()
    peer = LineConnection.connect(place.home)
    peer.send(place.request(run_id))
    answer = peer.receive(30)
    assert answer is not None and "ready" in answer
    assert run_records(place.home)
    peer.close()
    eventually(lambda: not run_records(place.home), 20, "the end of the fork")
    assert place.run(run_id).status == dg.DagsterRunStatus.NOT_STARTED
    place.launch(run_id=run_id)
    assert place.ended(run_id) == "SUCCESS"


def test_the_socket_is_this_users_alone_and_refuses_what_it_has_not_loaded(place: Place) -> None:
    assert place.warm
    assert (run_dir(place.home) / SOCKET).stat().st_mode & 0o077 == 0
    for request in (
        {"module": "somebody.elses"},
        {"module": place.module, "image": "registry/image"},
    ):
        peer = LineConnection.connect(place.home)
        peer.send(request)
        answer = peer.receive(30)
        assert answer is not None and "refused" in answer
        peer.close()


@pytest.mark.long
def test_runs_go_on_without_the_warm_process_and_its_successor_reports_them(place: Place) -> None:
    assert place.warm
    survivor, victim = place.launch("long"), place.launch("long")
    place.works(survivor)
    record = place.works(victim)
    place.kill_warm()
    os.kill(record.pid, signal.SIGKILL)
    eventually(lambda: not record.alive(), 20, "its death")
    # Nobody is there who could report it: run monitoring is told so.
    assert place.launcher.check_run_worker_health(place.run(victim)).status.value == "FAILED"
    assert place.launcher.check_run_worker_health(place.run(survivor)).status.value == "RUNNING"
    stock = place.launch()
    assert place.warm
    assert place.ended(victim) == "FAILURE"
    (place.home / "finish").touch()
    assert place.ended(survivor) == "SUCCESS"
    assert place.ended(stock) == "SUCCESS" and not place.started_warm(stock)


def test_a_run_has_what_the_location_reads_at_import_now(place: Place) -> None:
    def told() -> tuple[object, bool]:
        run_id = place.launch("tell")
        assert place.ended(run_id) == "SUCCESS"
        # The reload has kept the umask.
        assert place.told(run_id).stat().st_mode & 0o777 == 0o644
        return json.loads(place.told(run_id).read_text(encoding="utf-8"))[
            "names"
        ], place.started_warm(run_id)

    assert place.warm
    assert told() == (["Ann"], True)
    (place.code / "names.json").write_text('["Ann", "Bea"]', encoding="utf-8")
    assert told() == (["Ann", "Bea"], False)
    assert place.warm
    assert told() == (["Ann", "Bea"], True)


def test_a_run_has_the_code_of_now(place: Place) -> None:
    assert place.warm
    file = place.code / f"{place.module}.py"
    before = file.read_text(encoding="utf-8")
    pid = place.warm.pid
    try:
        file.write_text(before.replace('if config.how == "badly"', "if True"), encoding="utf-8")
        # At once: the stock way, for what is loaded is old.
        assert place.ended(place.launch()) == "FAILURE"
        run_id = place.launch() if place.warm.pid == pid else ""
        assert place.ended(run_id) == "FAILURE"
        assert place.started_warm(run_id)
    finally:
        file.write_text(before, encoding="utf-8")


@pytest.mark.long
def test_code_that_does_not_load_is_waited_for(place: Place) -> None:
    place.kill_warm()
    file = place.code / f"{place.module}.py"
    before = file.read_text(encoding="utf-8")
    try:
        file.write_text("no python", encoding="utf-8")
        process = place.start()
        eventually(lambda: "cannot be loaded" in place.log(), 120, "its word")
        assert process.poll() is None
    finally:
        file.write_text(before, encoding="utf-8")
    assert place.warm is process
    run_id = place.launch()
    assert place.ended(run_id) == "SUCCESS"
    assert place.started_warm(run_id)


def test_a_process_that_does_not_answer_holds_no_run_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "ANSWER_SECS", 1.0)
    place.kill_warm()
    deaf = listen(place.home)
    try:
        run_id = place.launch()
    finally:
        deaf.close()
        (run_dir(place.home) / SOCKET).unlink()
    assert place.ended(run_id) == "SUCCESS"
    assert not place.started_warm(run_id)


def test_another_dagster_starts_runs_the_stock_way_and_says_so_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place.kill_warm()
    monkeypatch.setattr(dg, "__version__", "2.0.0")
    dagster_internals.cache_clear()
    with caplog.at_level(logging.WARNING), listen(place.home) as listener:
        listener.settimeout(0.1)
        try:
            run_id = place.launch()
            assert not place.launcher.supports_check_run_worker_health
            with pytest.raises(TimeoutError):
                listener.accept()
            assert place.ended(run_id) == "SUCCESS"
        finally:
            dagster_internals.cache_clear()
            (run_dir(place.home) / SOCKET).unlink()
    assert len([record for record in caplog.records if "2.0.0" in record.getMessage()]) == 1


@pytest.mark.long
def test_a_location_that_starts_threads_is_not_forked(place: Place) -> None:
    place.kill_warm()
    file = place.code / f"{place.module}.py"
    before = file.read_text(encoding="utf-8")
    try:
        file.write_text(
            before
            + "\nimport threading\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
            encoding="utf-8",
        )
        place.start()
        eventually(lambda: "started threads" in place.log(), 120, "its word")
        run_id = place.launch()
        assert place.ended(run_id) == "SUCCESS"
        assert not place.started_warm(run_id)
    finally:
        file.write_text(before, encoding="utf-8")
        place.kill_warm()
