"""The quickstart, typed as it stands: the commands of docs/index.md in their order, on a whole cluster.

``QUICKSTART_BIN`` names the folder of another ``storm-dagster`` (``make dist-check``: one installed from the wheel).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from storm_dagster.model.run_file import RunFile
from storm_dagster.testing.waiting import eventually

pytestmark = [
    pytest.mark.long,
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(900),
]

PAGE = (Path(__file__).parents[2] / "docs" / "index.md").read_text(encoding="utf-8")
BIN = Path(os.environ.get("QUICKSTART_BIN") or Path(sys.executable).parent)


def commands() -> list[list[str]]:
    """Commands behind ``$`` in the console blocks, in order."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE, flags=re.S)
    return [shlex.split(line[2:]) for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def test_the_quickstart_as_it_stands(tmp_path: Path) -> None:
    home = tmp_path / ".storm-dagster"
    env = {**os.environ, "STORM_DAGSTER_HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    (code,) = re.findall(r"```python\n(# hello\.py\n.*?)```", PAGE, flags=re.S)
    (tmp_path / "hello.py").write_text(code, encoding="utf-8")

    def run(*args: str, logs: bool = True) -> str:
        done = subprocess.run(
            [str(BIN / args[0]), *args[1:]], cwd=tmp_path, env=env, capture_output=True, text=True,
            timeout=400, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(args)}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout + (done.stderr if logs else "")

    def show() -> dict[str, Any]:
        return json.loads(run("storm-dagster", "show", "hello", "--json", logs=False))

    said: dict[str, str] = {}
    try:
        for command in commands():
            program, *rest = command
            if program == "pip":
                assert rest == ["install", "storm-dagster"]
                continue
            assert program == "storm-dagster", command
            if rest[0] == "dev":
                # Of all that is typed only this is added: another cluster may hold the usual ports.
                command += ["--ports", "auto"]
            if rest[0] == "kill":
                _break_a_worker(show)
            said[rest[0]] = run(*command)
    finally:
        if RunFile.read_all(home):
            run("storm-dagster", "stop")
    assert list(said) == ["doctor", "dev", "submit", "show", "explain", "kill", "stop"]
    assert "http://127.0.0.1:" in said["dev"], "dev prints the address of the Dagster UI"
    assert "words" in said["show"] and "count" in said["show"]
    assert not [process for process in psutil.process_iter(["cmdline"]) if _mentions(process, str(home))]


def _break_a_worker(show: Any) -> None:
    """``Kill one of the worker processes that show lists: its supervisor starts it again at once``."""
    killed = show()["workers"][0]
    os.kill(killed["pid"], signal.SIGKILL)

    def again() -> bool:
        document = show()
        slot = [w for w in document["workers"] if (w["node"], w["port"]) == (killed["node"], killed["port"])]
        return (
            bool(slot)
            and slot[0]["pid"] not in (None, killed["pid"])
            and all(task["status"] == "running" for task in document["tasks"])
        )

    eventually(again, 120, "the worker running again in its place", interval=0.5)


def _mentions(process: psutil.Process, text: str) -> bool:
    return any(text in part for part in process.info["cmdline"] or [])
