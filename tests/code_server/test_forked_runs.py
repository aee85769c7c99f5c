"""Runs of ``storm-dagster daemon code``: forked from a loaded process, and as any other run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import dagster as dg
import numpy.random
import psutil
import pytest

from storm_dagster.client.command import run_cli
from storm_dagster.code_server.server import is_dagsters_own
from storm_dagster.launcher import WarmRunLauncher
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.dagster.code_server import MODULE, CodeServer

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="elsewhere runs start the stock way"
)
STOCK = """
import sys
from storm_dagster.code_server import server

server._CONTEXT = "_moved_in_a_later_release"
arguments = sys.argv[1:]
server.serve([*arguments[:2], "--module-name", "code_of_users"], None, "location")
"""


def test_a_run_is_forked_and_its_output_is_captured(server: CodeServer) -> None:
    run_id = server.launch()
    assert server.ended(run_id) == "SUCCESS"
    forks = server.fork_server()
    assert forks is not None and server.told(run_id)["parent"] == forks.pid
    captured = dg.DagsterEventType.LOGS_CAPTURED
    event = server.instance.all_logs(run_id, of_type=captured)[0].dagster_event
    assert event is not None
    key = [run_id, "compute_logs", event.logs_captured_data.file_key]
    output = server.instance.compute_log_manager.get_log_data(key).stdout
    assert output is not None and b"work says HELLO" in output


def test_a_forked_run_behaves_as_in_an_interpreter_of_its_own(server: CodeServer) -> None:
    numbers = set()
    for _ in range(2):
        run_id = server.launch()
        assert server.ended(run_id) == "SUCCESS"
        told = server.told(run_id)
        numbers.add(told["number"])
        # A process that users' code forks continues its sequence of numbers.
        assert told["forked"] == numpy.random.RandomState(7).random_sample()
        # What the libraries were loaded with is not for users' computations.
        assert (told["threads"], told["home"]) == (None, str(server.home))
        assert (server.code / f"{run_id}.json").stat().st_mode & 0o777 == 0o644
        log = (server.code / "location.log").read_text(encoding="utf-8")
        assert f"told by {run_id}" in log
    assert len(numbers) == 2


def test_a_run_that_fails_is_a_failed_run(server: CodeServer) -> None:
    run_id = server.launch("badly")
    assert server.ended(run_id) == "FAILURE"
    assert "Steps failed" in server.messages(run_id)


def test_a_run_whose_process_dies_is_failed_with_the_reason(server: CodeServer) -> None:
    run_id = server.launch("killed")
    assert server.ended(run_id) == "FAILURE"
    assert "SIGKILL" in server.messages(run_id)


def test_a_run_is_terminated(server: CodeServer) -> None:
    run_id = server.launch("long")
    process = psutil.Process(server.told(run_id)["pid"])
    assert server.instance.run_launcher.terminate(run_id)
    assert server.ended(run_id) == "CANCELED"
    process.wait(patience(30))


def test_a_run_has_the_code_and_the_files_of_now(server: CodeServer) -> None:
    file, names = server.code / f"{MODULE}.py", server.code / "names.json"
    before = file.read_text(encoding="utf-8")
    assert server.ended(server.launch()) == "SUCCESS"
    try:
        file.write_text(before.replace('if config.how == "badly"', "if True"), encoding="utf-8")
        names.write_text('["Ann", "Bea"]', encoding="utf-8")
        run_id = server.launch()
        assert server.ended(run_id) == "FAILURE"
        assert server.told(run_id)["names"] == ["Ann", "Bea"]
    finally:
        file.write_text(before, encoding="utf-8")
        names.write_text('["Ann"]', encoding="utf-8")


def test_runs_go_on_when_the_process_that_forks_is_killed(server: CodeServer) -> None:
    victim = server.fork_server()
    assert victim is not None
    victim.send_signal(signal.SIGKILL)
    # Its parent collects it with the next run.
    eventually(lambda: victim.status() == psutil.STATUS_ZOMBIE, 30, "its end")
    run_id = server.launch()
    assert server.ended(run_id) == "SUCCESS"
    successor = server.fork_server()
    assert successor is not None and server.told(run_id)["parent"] == successor.pid != victim.pid


def test_a_run_ends_with_the_process_that_forked_it(server: CodeServer) -> None:
    run_id = server.launch("long")
    process = psutil.Process(server.told(run_id)["pid"])
    forks = server.fork_server()
    assert forks is not None and process.ppid() == forks.pid
    forks.kill()
    # Dagster cannot know its end, and so reports it at once: it must be true.
    process.wait(patience(30))
    assert server.ended(run_id) == "FAILURE"


def test_runs_that_end_with_their_code_server_are_reported_by_its_successor(
    tmp_path: Path,
) -> None:
    server = CodeServer(tmp_path)
    try:
        server.connect()
        lost, lives = server.launch("long"), server.launch("long")
        survivor = psutil.Process(server.told(lives)["pid"])
        server.told(lost)
        sockets = tmp_path / "code.sock.forks"
        former = [path.name for path in sockets.iterdir()]
        server.kill(spare=survivor)
        server.start()
        assert server.ended(lost) == "FAILURE"
        assert "was gone when its code server restarted" in server.messages(lost)
        assert server.run(lives).status == dg.DagsterRunStatus.STARTED
        eventually(lambda: server.fork_server() is not None, 60, "the process that forks")
        assert len(former) == 1
        assert len([*sockets.iterdir()]) == 1 and not (sockets / former[0]).exists()
        survivor.kill()
    finally:
        server.close()


def test_a_dagster_yaml_of_an_earlier_release_launches(server: CodeServer) -> None:
    assert isinstance(server.instance.run_launcher, WarmRunLauncher)


def test_a_dagster_without_the_attribute_starts_runs_the_stock_way(
    tmp_path: Path, server: CodeServer
) -> None:
    forked, forked_id = server, server.launch()
    server = CodeServer(tmp_path, ["-c", STOCK])
    try:
        server.connect()
        run_id = server.launch()
        assert server.ended(run_id) == "SUCCESS"
        assert server.fork_server() is None
        method = server.told(run_id)["start_method"]
        assert forked.told(forked_id)["start_method"] == method
        # The code location has configured the root logger.
        log = (server.code / "location.log").read_text(encoding="utf-8")
        assert f"runs cannot be forked with Dagster {dg.__version__}" in log
    finally:
        server.close()


def test_the_libraries_start_no_thread_and_are_none_of_users() -> None:
    program = """
import sys
from storm_dagster.host.forks import thread_count
import storm_dagster.code_server.libraries as libraries
missing = [name for name in libraries.LIBRARIES if name not in sys.modules]
print(thread_count(), missing)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split(maxsplit=1) == ["1", "[]\n"], done.stderr


def test_a_library_that_cannot_be_loaded_is_left_to_the_runs(tmp_path: Path) -> None:
    (tmp_path / "pandas.py").write_text("raise ValueError('numpy.dtype size changed')")
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import httpx
def broken(**settings):
    raise OSError("no certificates")
httpx.create_ssl_context = broken
import storm_dagster.code_server.libraries
print("pyarrow.compute" in sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split()[-1] == "True", done.stderr
    assert "runs load pandas themselves: ValueError: numpy.dtype" in done.stderr
    assert "no certificates" in done.stderr


@pytest.mark.parametrize(
    ("prelude", "folder", "reason"),
    [
        ("", "x" * 100, "set TMPDIR to a shorter one"),
        (
            "multiprocessing.connection.arbitrary_address = lambda family: '\\0listener-1-0'",
            "",
            "update Python",
        ),
    ],
)
def test_without_a_safe_socket_runs_start_the_stock_way(
    prelude: str, folder: str, reason: str, tmp_path: Path
) -> None:
    temporary = tmp_path / folder
    temporary.mkdir(exist_ok=True)
    program = f"""
import multiprocessing.connection
{prelude}
from storm_dagster.code_server import server
print(server._prepare_fork_server(None))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert done.stdout.strip() == "None", done.stderr
    assert reason in done.stderr and "they start the stock way" in done.stderr


def test_the_modules_of_users_are_not_preloaded() -> None:
    assert is_dagsters_own("dagster._core.storage.runs")
    assert is_dagsters_own("dagster_postgres.run_storage")
    assert not is_dagsters_own("dagster_acme.launcher")
    assert not is_dagsters_own("dagster_postgres_acme")


@pytest.mark.parametrize("options", [["--conf-dir", "."], ["-c", "a.b=1"]])
def test_a_code_server_refuses_options_that_it_cannot_pass_on(
    options: list[str], tmp_path: Path
) -> None:
    command = ["daemon", "code", "--home", str(tmp_path), "--socket", str(tmp_path / "s")]
    done = run_cli(*command, *options)
    assert done.code == 2
    assert "--home" in done.err and "build_storm_defs(conf_dir=...)" in done.err


def test_a_code_server_that_nobody_could_reach_is_refused(tmp_path: Path) -> None:
    done = run_cli("daemon", "code", "--home", str(tmp_path))
    assert done.code == 2 and "name --socket FILE or --port" in done.err


@pytest.mark.parametrize("verb", [["daemon", "warm-runs"], ["warm-runs"]])
def test_the_former_daemon_names_its_successor(verb: list[str], tmp_path: Path) -> None:
    done = run_cli(*verb, "--home", str(tmp_path), "--module", "definitions")
    assert done.code == 0 and "`storm-dagster daemon code`" in done.err
    assert "warm-runs" not in run_cli("daemon", "--help").out
