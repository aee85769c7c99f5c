"""Exit codes, the one JSON document, conf, and verbs that need no cluster."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import click
import pytest

from storm_dagster.cli import cluster_verbs
from storm_dagster.cli.options import Invocation
from storm_dagster.cli.output import Steps, plain, print_json, print_line
from storm_dagster.host.endpoints import ClusterFile, NimbusEndpoint, cluster_conf
from storm_dagster.host.processes import RunFile, start_ticks
from storm_dagster.model.errors import Unavailable
from storm_dagster.testing.cluster import CommandResult, run_cli
from storm_dagster.testing.waiting import eventually
from storm_rigs.servers.embedded_zookeeper import EmbeddedZooKeeper

NOWHERE = ["-c", "nimbus.seeds=[127.0.0.1:1]"]
HELLO = """from storm_dagster.api import Spout, Topology


class Words(Spout):
    outputs = ["word"]

    def next_tuple(self):
        pass


class Hello(Topology):
    words = Words.spec()
"""


def failed(done: CommandResult, code: int, kind: str) -> str:
    """The message of a verb that must have failed so, with exactly one JSON document."""
    assert done.code == code, (done.code, done.out, done.err)
    error = done.document["error"]
    assert set(error) == {"type", "message"} and error["type"] == kind
    return error["message"]


def test_every_verb_has_help_and_the_common_options() -> None:
    from storm_dagster.cli.app import VERBS, cli

    context = cli.make_context("storm-dagster", ["--help"], resilient_parsing=True)
    for name in VERBS:
        command = cli.get_command(context, name)
        assert command is not None and command.name == name
        for each in command.commands.values() if isinstance(command, click.Group) else [command]:
            options = {option for parameter in each.params for option in parameter.opts}
            assert {"--json", "--home", "--conf-dir", "-c"} <= options, (name, each.name)
            assert each.help
    changing = ("dev", "stop", "submit", "activate", "deactivate", "kill", "restart", "rebalance")
    for name in changing:
        command = cli.get_command(context, name)
        assert command is not None
        assert {"--dry-run", "--wait"} <= {
            option for parameter in command.params for option in parameter.opts
        }


def test_no_text_of_others_drives_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"error": "".join(map(chr, range(0x100))) + "\u4e2d"}
    for write in (lambda: print_json(told), lambda: print_line(False, {}, plain(told["error"]))):
        write()
        printed = capsys.readouterr().out
        assert not [
            each
            for each in printed
            if (ord(each) < 0x20 and each not in "\t\n") or 0x7F <= ord(each) < 0xA0
        ]
        assert "é" in printed and "\u4e2d" in printed
    print_json(told)
    assert json.loads(capsys.readouterr().out) == told


def test_progress_begins_with_what_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    steps = Steps("rebalance words")
    steps._started -= 20
    steps.begin("assignment")
    said: list[str] = []
    with steps:
        eventually(
            lambda: said.append(capsys.readouterr().err) or len("".join(said).splitlines()) >= 2,
            60,
            "two lines",
        )
    first, second, *_ = "".join(said).splitlines()
    assert first == "rebalance words"
    assert re.fullmatch(r"  \.\.\. assignment \d+ s \(usually \d+ s\)", second)


def test_steps_of_more_than_a_second_are_shown_as_they_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = Steps("rebalance words")
    steps._started += 20
    steps.done("lock")
    assert capsys.readouterr().err == "", "what is short shows nothing"
    steps._started -= 22
    steps.done("assignment")
    title, lock, assignment = capsys.readouterr().err.splitlines()
    assert title == "rebalance words"
    assert lock.split()[0] == "lock" and assignment.split()[0] == "assignment"


def test_every_command_that_a_module_has_is_a_verb() -> None:
    from storm_dagster.cli.app import FORMER_VERBS, VERBS

    listed = {(name, verb.module) for name, verb in VERBS.items()}
    former = {(name, verb.module) for name, verb in FORMER_VERBS.items()}
    commands: set[tuple[str, str]] = set()
    for name in {module for _, module in listed | former}:
        module = importlib.import_module(f"storm_dagster.cli.{name}")
        for verb, command in module.COMMANDS.items():
            assert command.name == verb
            commands.add((verb, name))
        assert set(_top_commands(module)) <= set(module.COMMANDS.values())
    assert commands == listed | former


def _top_commands(module: ModuleType) -> list[click.Command]:
    """The commands of a module that do not stand in one of its groups."""
    commands = [value for value in vars(module).values() if isinstance(value, click.Command)]
    inner: list[click.Command] = []
    for command in commands:
        if isinstance(command, click.Group):
            inner += command.commands.values()
    return [command for command in commands if command not in inner]


@pytest.mark.parametrize(
    "args",
    [
        ["no-such-verb"],
        ["list", "--no-such-option"],
        ["submit"],
        ["show", "a", "b"],
        ["kill", "x", "-w", "-3"],
        ["rebalance", "x", "-n", "0"],
        ["rebalance", "x", "-e", "split=²"],
        ["list", "-c", "no-equals-sign"],
        ["list", "-c", "topology.wrokers=3"],
        ["conf", "no.such.key"],
        ["submit", "missing.py"],
        ["plan", "missing.yaml"],
        ["jar", "missing.jar", "module"],
        ["dev", "--supervisors", "0"],
        ["supervisor", "-c", "storm.cluster.mode=local"],
        ["logs", "nothing", "-c", "nimbus.seeds=[127.0.0.1:1]"],
    ],
)
def test_bad_requests_exit_2_with_one_document(args: list[str], tmp_path: Path) -> None:
    failed(run_cli(*args, "--json", home=tmp_path, cwd=tmp_path), 2, "InvalidRequest")


def test_an_unknown_conf_key_names_the_nearest(tmp_path: Path) -> None:
    done = run_cli("list", "--json", "-c", "topology.wrokers=3", home=tmp_path)
    assert "topology.workers" in failed(done, 2, "InvalidRequest")


def test_a_bad_topology_exits_2(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("x = 1\n", encoding="utf-8")
    done = run_cli(
        "submit", "empty.py", "--dry-run", "--json", home=tmp_path / "home", cwd=tmp_path
    )
    assert "holds no topology" in failed(done, 2, "InvalidTopology")


@pytest.mark.parametrize("args", [["list"], ["kill", "x"], ["submit", "hello.py"], ["errors", "x"]])
def test_without_a_cluster_a_verb_says_where_it_looked(args: list[str], tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO, encoding="utf-8")
    done = run_cli(*args, "--json", *NOWHERE, home=tmp_path / "home", cwd=tmp_path)
    said = failed(done, 4, "Unavailable")
    assert f"{tmp_path / 'home'} (HOME)" in said and "http://127.0.0.1:1 (nimbus.seeds, -c)" in said
    for remedy in (
        "storm-dagster dev",
        "--home",
        "STORM_DAGSTER_HOME",
        "--conf-dir",
        "-c nimbus.seeds=",
    ):
        assert remedy in said
    # It did not wait: nothing says that there is something to wait for.
    assert "waiting" not in done.err


def test_without_a_cluster_the_conf_that_named_it_is_said(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("nimbus.seeds: ['127.0.0.1:1']\n", encoding="utf-8")
    done = run_cli("list", "--json", "--conf-dir", str(tmp_path), home=tmp_path / "home")
    said = failed(done, 4, "Unavailable")
    assert (
        f"the storm.yaml of {tmp_path}" in said
        and f"(nimbus.seeds, {tmp_path / 'storm.yaml'})" in said
    )
    assert "waiting" not in done.err


def test_a_cluster_that_is_there_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process of HOME, a nimbus that answers, or the cluster's ZooKeeper: its leader comes."""
    home = tmp_path / "home"
    nowhere = {"nimbus.seeds": ["127.0.0.1:1"], "storm.zookeeper.servers": ["127.0.0.1:1"]}

    def reason(invocation: Invocation) -> str:
        with invocation.nimbus(patience=0.1) as nimbus, pytest.raises(Unavailable) as raised:
            nimbus.leader()
        return raised.value.message

    assert "no cluster is there" in reason(Invocation(home, overrides=nowhere))
    # Of a server that has just started, on a busy machine.
    monkeypatch.setattr("storm_dagster.cli.options._PROBE_SECS", 30.0)
    with EmbeddedZooKeeper(tmp_path / "zookeeper") as server:
        named = {**nowhere, "storm.zookeeper.servers": [server.address]}
        assert "has no leading nimbus in reach" in reason(Invocation(home, overrides=named))
    record = RunFile.write(home, "nimbus", "n1")
    assert "has no leading nimbus in reach" in reason(Invocation(home, overrides=nowhere))
    # A cluster that another folder names is not the one of HOME.
    assert "no cluster is there" in reason(Invocation(home, conf_dir=tmp_path, overrides=nowhere))
    record.remove(home)


def test_status_says_what_is_wrong_with_dagster(tmp_path: Path, monkeypatch, capsys) -> None:
    class Leader(contextlib.nullcontext):
        leader = staticmethod(lambda: "http://127.0.0.1:1")
        get = staticmethod(lambda path: {"supervisors": [], "healer": {}, "topologies": []})

    monkeypatch.setattr(Invocation, "nimbus", lambda self, patience: Leader(Leader()))
    found = ("warning", "its daemon does not report (sensor)", "start dagster-daemon")
    monkeypatch.setattr(cluster_verbs, "check_dagster", lambda conf, timeout: iter([found]))
    cluster_verbs.status.main(["--home", str(tmp_path)], standalone_mode=False)
    assert (
        "Dagster: its daemon does not report (sensor): start dagster-daemon"
        in capsys.readouterr().out
    )


def finding(done: CommandResult, check: str) -> dict[str, str]:
    (row,) = [row for row in done.document["findings"] if row["check"] == check]
    return row


def test_doctor_without_a_cluster(tmp_path: Path) -> None:
    done = run_cli("doctor", "--json", "--conf-dir", str(tmp_path), *NOWHERE, home=tmp_path)
    assert done.code == 4 and done.document["ok"] is False
    broken = [row for row in done.document["findings"] if row["state"] == "broken"]
    assert broken and all(row["mend"] for row in broken)
    # It is not this command's to start again.
    cluster, unread = [row for row in done.document["findings"] if row["check"] == "cluster"]
    assert unread["found"].startswith("not checked")
    fix = cluster["mend"]
    assert (
        f"storm-dagster daemon nimbus --conf-dir {tmp_path}" in fix
        and "storm-dagster stop" not in fix
    )


def test_doctor_has_one_finding_for_one_bad_file(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("nimbus.seeds: [\n", encoding="utf-8")
    done = run_cli("doctor", "--json", "--conf-dir", str(tmp_path), home=tmp_path)
    rows = [
        row for row in done.document["findings"] if str(tmp_path / "storm.yaml") in row["found"]
    ]
    assert [(row["check"], row["state"]) for row in rows] == [("conf", "broken")]
    assert {row["check"] for row in done.document["findings"]} >= {
        "Java",
        "packages",
        "clock",
        "disk",
    }


def test_doctor_knows_ports_that_the_cluster_itself_holds(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        args = (
            "doctor",
            "--json",
            "--conf-dir",
            str(tmp_path),
            *NOWHERE,
            "-c",
            f"nimbus.thrift.port={port}",
        )
        assert str(port) in finding(run_cli(*args, home=tmp_path), "ports")["found"]
        record = RunFile.write(tmp_path, "nimbus", "n1", {"thrift": port})
        assert str(port) not in finding(run_cli(*args, home=tmp_path), "ports")["found"]
        record.remove(tmp_path)


def test_doctor_says_how_to_get_java(tmp_path: Path) -> None:
    done = run_cli("doctor", "--json", home=tmp_path, env={"JAVA_HOME": str(tmp_path)})
    assert done.code == 4
    java = next(finding for finding in done.document["findings"] if finding["check"] == "Java")
    assert java["state"] == "broken" and "apt-get install openjdk-17-jre-headless" in java["mend"]
    # The cluster of that conf has its Spark elsewhere, and a host without Java is fit for its
    # clients.
    (tmp_path / "storm.yaml").write_text("spark.remote: sc://127.0.0.1:1\n", encoding="utf-8")
    services = ("doctor", "--json", "--conf-dir", str(tmp_path), *NOWHERE)
    assert (
        finding(run_cli(*services, home=tmp_path, env={"JAVA_HOME": str(tmp_path)}), "Java")[
            "state"
        ]
        == "warning"
    )


@pytest.mark.parametrize(
    ("verb", "option"),
    [
        (["dev"], "--home"),
        (["nimbus"], "--home"),
        (["run", "hello.py", "--seconds", "1"], "--state-dir"),
    ],
)
def test_a_folder_that_cannot_be_made_is_named_with_its_option(
    verb: list[str], option: str, tmp_path: Path
) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    done = run_cli(*verb, option, str(folder), "--json", cwd=tmp_path)
    message = failed(done, 2, "InvalidRequest")
    assert str(folder) in message and option in message, message


def test_dev_asks_for_java_before_anything_else(tmp_path: Path) -> None:
    done = run_cli("dev", "--json", "--home", str(tmp_path / "h"), env={"JAVA_HOME": str(tmp_path)})
    assert "openjdk-17-jre-headless" in failed(done, 4, "Unavailable")
    assert not (tmp_path / "h").exists()


def test_dev_names_a_taken_port(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        done = run_cli(
            "dev", "--json", "--home", str(tmp_path), "-c", f"storm.zookeeper.port={port}"
        )
    message = failed(done, 4, "Unavailable")
    assert str(port) in message and "--ports auto" in message


def test_conf_shows_origins(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("topology.workers: 3\nmy.own: x\n", encoding="utf-8")
    done = run_cli("conf", "--json", "-c", "topology.acker.executors=2", home=tmp_path).check()
    conf = done.document["conf"]
    assert conf["topology.workers"]["value"] == 3
    assert conf["topology.workers"]["origin"].endswith("storm.yaml")
    assert conf["topology.acker.executors"] == {
        **conf["topology.acker.executors"],
        "value": 2,
        "origin": "-c",
    }
    assert conf["nimbus.task.timeout.secs"]["origin"] == "default"
    assert conf["my.own"]["value"] == "x"


def test_the_cluster_file_decides_where_clients_look(tmp_path: Path) -> None:
    nimbus = NimbusEndpoint(thrift="127.0.0.1:1", http="http://127.0.0.1:2", pid=1)
    ClusterFile(zookeeper="127.0.0.1:3", zookeeper_root="/x", nimbuses=(nimbus,)).write(tmp_path)
    conf = cluster_conf(tmp_path)
    assert conf["storm.zookeeper.servers"] == ["127.0.0.1:3"] and conf["nimbus.seeds"] == [
        "127.0.0.1:2"
    ]
    assert conf.origins["nimbus.seeds"].endswith("cluster.json")
    (tmp_path / "cluster.json").write_text("{", encoding="utf-8")
    failed(run_cli("list", "--json", home=tmp_path), 6, "Corrupt")


def test_status_and_stop_of_nothing(tmp_path: Path) -> None:
    done = run_cli("status", "--json", *NOWHERE, home=tmp_path)
    assert done.code == 4 and done.document["running"] is False
    assert run_cli("stop", "--json", home=tmp_path).check().document["ended"] == 0


def test_status_of_a_conf_folder_says_whom_it_asked(tmp_path: Path) -> None:
    done = run_cli("status", "--conf-dir", str(tmp_path), *NOWHERE, home=tmp_path / "home")
    assert done.code == 4  # No nimbus leads there.
    assert "no cluster runs in" not in done.out and "processes of" not in done.out
    assert "127.0.0.1:1" in done.err


def test_submit_dry_run_touches_nothing(tmp_path: Path) -> None:
    text = "from storm_dagster.api import *\nclass S(Spout):\n    outputs=['x']\nclass T(Topology):\n    s = S.spec(par=3)\n"
    (tmp_path / "flow.py").write_text(text, encoding="utf-8")
    done = run_cli(
        "submit",
        "flow.py",
        "--name",
        "own",
        "--dry-run",
        "--json",
        home=tmp_path / "h",
        cwd=tmp_path,
    )
    document = done.check().document
    assert document["name"] == "own" and document["dry_run"] is True
    assert document["components"] == [{"id": "s", "type": "spout", "parallelism": 3}]
    assert not (tmp_path / "h").exists()


def test_jar_runs_a_program_with_its_archive(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "app.jar", "w") as bundle:
        bundle.writestr(
            "tool/main.py",
            "import json, os, sys\nfrom tool import part\n"
            "print(json.dumps([__name__, sys.argv[1:], os.environ['STORM_JAR'], part.X]))\n",
        )
        bundle.writestr("tool/__init__.py", "")
        bundle.writestr("tool/part.py", "X = 5\n")
    done = run_cli("jar", str(tmp_path / "app.jar"), "tool.main", "a", "--b", home=tmp_path).check()
    assert json.loads(done.out) == ["__main__", ["a", "--b"], str(tmp_path / "app.jar"), 5]
    assert "no module" in failed(
        run_cli("jar", "--json", str(tmp_path / "app.jar"), "tool.gone", home=tmp_path),
        2,
        "InvalidRequest",
    )


def test_run_files_match_pid_and_start(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        record = RunFile.write(tmp_path, "nimbus", "n1", {"http": 7}, pid=child.pid)
        assert record.alive() and RunFile.read_all(tmp_path) == [record]
        other = record.model_copy(update={"start_ticks": record.start_ticks + 1})
        assert not other.alive()
        other.remove(tmp_path)
        assert RunFile.read_all(tmp_path) == [record]
    finally:
        child.kill()
        # A zombie is not alive.
        while start_ticks(child.pid) is not None:
            pass
        assert not record.alive()
        child.wait()
    record.remove(tmp_path)
    assert RunFile.read_all(tmp_path) == []


def test_logs_of_the_newest_deployment(tmp_path: Path) -> None:
    for topology_id, port, text in (
        ("wc-1-100", 6900, "old"),
        ("wc-2-200", 6901, "new"),
        ("wcx-1-1", 6902, "x"),
    ):
        folder = tmp_path / "logs" / "workers" / topology_id / str(port)
        folder.mkdir(parents=True)
        (folder / "worker.log").write_text(
            f"first\n{text}\n\x1b[31mr\u202ee\u200bd\n", encoding="utf-8"
        )
    os.utime(tmp_path / "logs" / "workers" / "wc-1-100", (1, 1))
    done = run_cli("logs", "wc", "-n", "2", "--json", *NOWHERE, home=tmp_path).check()
    assert [(row["port"], row["lines"][0]) for row in done.document["logs"]] == [(6901, "new")]
    done = run_cli("logs", "wc", "--worker", "127.0.0.1:6901", *NOWHERE, home=tmp_path).check()
    # Nothing that a program logs drives the terminal.
    assert done.out.splitlines() == ["first", "new", "?[31mr?e?d"]
    failed(
        run_cli("logs", "wc", "--worker", "h:1", "--json", *NOWHERE, home=tmp_path),
        2,
        "InvalidRequest",
    )


def test_logs_read_on_into_the_rotated_file(tmp_path: Path) -> None:
    """The program's last words may have been moved just now."""
    folder = tmp_path / "logs" / "workers" / "wc-1-100" / "6900"
    folder.mkdir(parents=True)
    (folder / "worker.log.1").write_text("first\nsecond\nbegin of ")
    (folder / "worker.log").write_text("a line\nlast\n")
    for count, lines in ((1, ["last"]), (4, ["first", "second", "begin of a line", "last"])):
        options = ("-n", str(count), "--json", *NOWHERE)
        done = run_cli("logs", "wc", *options, home=tmp_path).check()
        assert [row["lines"] for row in done.document["logs"]] == [lines]
    (folder / "worker.log").write_text("")
    done = run_cli("logs", "wc", "-n", "2", "--json", *NOWHERE, home=tmp_path).check()
    assert [row["lines"] for row in done.document["logs"]] == [["second", "begin of "]]


@pytest.mark.parametrize(
    "args", [["blob", "--json", "cat", "../x"], ["blob", "cat", "../x", "--json"]]
)
def test_common_options_stand_before_or_after_a_verb_of_a_thing(args: list[str]) -> None:
    assert "'../x'" in failed(run_cli(*args), 2, "InvalidRequest")


@pytest.mark.parametrize(
    "args",
    [
        ["blob", "--json"],
        ["blacklist", "add", "--json"],
        ["blob", "nosuch", "--json"],
        ["blacklist", "add", "h1", "-w", "1", "--json"],
    ],
)
def test_a_verb_of_a_thing_that_is_wrong_says_so(args: list[str]) -> None:
    failed(run_cli(*args), 2, "InvalidRequest")


def test_status_says_which_process_is_frozen_and_that_nobody_restarts_anything(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    with (
        subprocess.Popen(["sleep", "600"]) as keeper,
        subprocess.Popen(["sleep", "600"]) as supervisor,
    ):
        try:
            RunFile.write(home, "dev", "a", pid=keeper.pid)
            RunFile.write(home, "supervisor", "s1", pid=supervisor.pid)

            def status() -> tuple[dict[str, str], str]:
                document = run_cli("status", "--json", *NOWHERE, home=home).document
                return {row["role"]: row["state"] for row in document["processes"]}, "\n".join(
                    document["advice"]
                )

            assert status() == ({"dev": "runs", "supervisor": "runs"}, "")
            os.kill(supervisor.pid, signal.SIGSTOP)
            eventually(lambda: status()[0]["supervisor"] == "frozen", 30, "a frozen process")
            states, advice = status()
            assert states["dev"] == "runs" and f"kill -CONT {supervisor.pid}" in advice
            os.kill(supervisor.pid, signal.SIGCONT)
            keeper.kill()
            keeper.wait()
            states, advice = status()
            assert states == {"dev": "dead", "supervisor": "runs"}
            assert (
                "a process that dies is not restarted" in advice and "storm-dagster stop" in advice
            )
        finally:
            for each in (keeper, supervisor):
                each.kill()
