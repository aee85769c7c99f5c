"""Verbs of the release before: accepted for one release, and each names the verb to use instead."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import click
import pytest

from storm_dagster.cli.app import FORMER_VERBS, VERBS, cli
from storm_dagster.testing.cluster import CommandResult, run_cli
from storm_dagster.testing.waiting import eventually, patience
from storm_dagster.zk.embedded import server_answers
from storm_rigs.servers.ports import free_port

ROLES = [name for name, verb in FORMER_VERBS.items() if verb.instead == f"daemon {name}"]
GONE = "warm-runs"
"""A daemon whose work the code server does: its verbs name that, and end."""
NOT_DISTRIBUTED = ("-c", "storm.cluster.mode=local")


def command_of(*words: str) -> click.Command:
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        inner = command.get_command(click.Context(command), word)
        assert inner is not None, words
        command = inner
    return command


def test_each_daemon_and_both_tables_have_a_former_verb() -> None:
    daemons = command_of("daemon")
    assert isinstance(daemons, click.Group)
    assert {*ROLES, "code", GONE} == set(daemons.commands)
    assert set(FORMER_VERBS) - set(ROLES) == {"supervisors", "nimbuses", GONE}
    for verb in FORMER_VERBS.values():
        assert command_of(*verb.instead.split()).help


@pytest.mark.parametrize("name", FORMER_VERBS)
def test_a_former_verb_is_hidden_and_takes_the_same_options(name: str) -> None:
    former = command_of(name)
    assert former.hidden and name not in VERBS
    assert name not in cli.list_commands(click.Context(cli))
    if name in (*ROLES, GONE):
        assert former.params == command_of("daemon", name).params
    else:
        common = {"as_json", "home", "conf_dir", "cluster_pairs", "verbose"}
        assert {parameter.name for parameter in former.params} == common


def test_help_lists_the_new_verbs_alone() -> None:
    listed = cli.get_help(click.Context(cli)).partition("Verbs:")[2]
    first_words = {line.split()[0] for line in listed.splitlines() if line.strip()}
    assert "daemon" in first_words
    assert not first_words & set(FORMER_VERBS)


def failing_arguments(role: str, tmp_path: Path) -> list[str]:
    """Arguments with which that daemon ends at once."""
    if role == "web":
        workspace = tmp_path / "workspace.yaml"
        workspace.write_text("load_from: []\n")
        return ["--workspace", str(workspace), *NOT_DISTRIBUTED]
    if role == "worker":
        spec = tmp_path / "SPEC.json"
        spec.write_text("{")
        return [str(spec)]
    return list(NOT_DISTRIBUTED)


def outcome(done: CommandResult) -> tuple[int, str]:
    return done.code, done.out


@pytest.mark.parametrize("role", ROLES)
def test_a_daemon_ends_in_the_same_way_by_both_verbs(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    arguments = [*failing_arguments(role, tmp_path), "--json"]
    today = run_cli("daemon", role, *arguments, home=tmp_path / "home")
    former = run_cli(role, *arguments, home=tmp_path / "home")
    assert today.code and outcome(former) == outcome(today)
    assert f"use `storm-dagster daemon {role}`" in former.err
    assert "deprecated" not in today.err
    if role != "worker":
        assert former.document["error"]["type"] == "InvalidRequest"


@pytest.mark.parametrize("table", ["supervisors", "nimbuses"])
def test_a_table_of_no_cluster_is_the_same_error(table: str, tmp_path: Path) -> None:
    done = run_cli(table, "--json", "-c", "nimbus.seeds=[127.0.0.1:1]", home=tmp_path)
    assert done.code == 4 and done.document["error"]["type"] == "Unavailable"
    assert "use `storm-dagster status`" in done.err


@pytest.mark.zookeeper
@pytest.mark.parametrize("verb", [["zookeeper"], ["daemon", "zookeeper"]])
def test_status_and_stop_find_a_daemon_of_either_verb(verb: list[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    port = free_port()
    where = ["--home", str(home), "--host", "127.0.0.1", "--port", str(port)]
    with ExitStack() as stack:
        process = subprocess.Popen(
            [sys.executable, "-m", "storm_dagster", *verb, *where],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait, 30)
        stack.callback(process.kill)
        eventually(lambda: server_answers("127.0.0.1", port), 60, "the server")
        shown = run_cli("status", "--json", *("-c", "nimbus.seeds=[127.0.0.1:1]"), home=home)
        rows = [(row["role"], row["pid"], row["state"]) for row in shown.document["processes"]]
        assert rows == [("zookeeper", process.pid, "runs")]
        stopped = run_cli("stop", "--json", home=home).check().document
        assert stopped["ended"] == 1
        assert process.wait(patience(30)) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
