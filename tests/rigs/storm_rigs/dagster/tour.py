"""The road of `docs/tour.md`: its commands, typed in an empty folder, and its files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from typing_extensions import Self

from storm_dagster.host.processes import RunFile
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.product.console import ConsoleCommand, console_commands, difference
from storm_rigs.stage.stock_dagster import StockDagster

PAGE = Path(__file__).parents[4] / "docs" / "tour.md"
SALES = dg.AssetKey(["lake", "sales"])
REVENUE = dg.AssetKey(["lake", "revenue"])
_FILE = re.compile(r"```python\n# (src/[\w./]+\.py)\n(.*?)```", flags=re.S)
_LAKE = "/tmp/lake/sales"
_PYPROJECT = """
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "shop"
"""
_INSTALLED = ("python3 -m venv", "source ", "pip install")
"""Commands that made the environment of the tests; the project is on PYTHONPATH instead."""


def write_files(project: Path, lake: Path) -> None:
    """Write the files that the page shows into the project; the scaffolded one is replaced.

    They keep their data in ``lake``.
    """
    files = _FILE.findall(PAGE.read_text(encoding="utf-8"))
    assert len(files) == 2, [name for name, _ in files]
    for name, code in files:
        assert _LAKE in code, name
        path = project / name
        assert path.parent.is_dir(), f"the scaffold has made no {path.parent}"
        path.write_text(code.replace(_LAKE, str(lake)), encoding="utf-8")


def write_stock_project(project: Path, lake: Path, **attributes: Any) -> None:
    """Write the project of the page, as its commands make it, without running them.

    ``attributes`` are added to those of the scaffolded ``defs.yaml``.
    """
    place = project / "src" / "shop" / "defs" / "sales"
    place.mkdir(parents=True)
    for folder in (place.parent, place.parent.parent):
        (folder / "__init__.py").touch()
    (project / "pyproject.toml").write_text(_PYPROJECT, encoding="utf-8")
    declared = {"name": "sales", "target": "sales_topology.py:Sales", "workers": 2, **attributes}
    document = {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
    (place / "defs.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    write_files(project, lake)


class Tour:
    """A reader who types the page in an empty folder.

    A context manager: at its begin the project is scaffolded and checked, the cluster and the
    project's Dagster run; at its end they are stopped. The page is changed in three places: free
    ports, the folder of the files, and ``DAGSTER_HOME``, so that tests can read the instance.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lake = folder / "lake"
        self.project = folder / "shop"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        modules = f"{self.project / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        self.env = {
            "PATH": path,
            "PYTHONPATH": modules.rstrip(os.pathsep),
            "VIRTUAL_ENV": sys.prefix,
            "DAGSTER_DISABLE_TELEMETRY": "yes",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }
        self.dagster = StockDagster(
            self.project, "shop", folder / "dagster", env=self.env, command=("dg", "dev")
        )
        self._cwd = folder

    def __enter__(self) -> Self:
        try:
            for typed in console_commands(PAGE):
                if typed.command.startswith("dg dev"):
                    self.dagster.__enter__()
                    return self
                self._type(typed)
        except BaseException:
            self._stop_cluster()
            raise
        raise AssertionError(f"{PAGE} does not start `dg dev`")

    def __exit__(self, *_: object) -> None:
        try:
            self.dagster.__exit__()
        finally:
            self._stop_cluster()

    def _type(self, typed: ConsoleCommand) -> None:
        """Type a command, and hold what it prints against what the page shows."""
        command = typed.command
        if command.startswith(_INSTALLED):
            return
        if typed.program == "cd":
            self._cwd /= command.split()[1]
            return
        if command.startswith("dg check"):
            write_files(self.project, self.lake)
        if command.startswith("storm-dagster dev"):
            command += " --ports auto"
        printed = self.run(command)
        wrong = difference(typed.output, printed.splitlines())
        assert wrong is None, f"{typed} prints something else\n{wrong}"

    def run(self, command: str) -> str:
        """What a command prints, on both channels; it must succeed."""
        environment = {**os.environ, **self.env}
        environment.pop("STORM_DAGSTER_HOME", None)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self._cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=patience(300),
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}"
        return done.stdout

    def _stop_cluster(self) -> None:
        if RunFile.read_all(self.project / ".storm-dagster"):
            self.run("storm-dagster stop")

    # -- what the reader then sees -----------------------------------------------------------------
    def reported_hours(self) -> list[str]:
        """Partitions of `lake/sales` that the project's Dagster has, oldest event first."""
        return self._partitions(SALES)

    def made_hours(self) -> list[str]:
        """Partitions of `lake/revenue` that runs have made."""
        return self._partitions(REVENUE)

    def _partitions(self, key: dg.AssetKey) -> list[str]:
        records = self.dagster.instance.fetch_materializations(key, limit=100).records
        made = [record.asset_materialization for record in reversed(records)]
        return [str(one.partition) for one in made if one is not None]

    def await_batch(self) -> list[str]:
        """Wait until the batch asset has each hour that the bolt reported; these hours."""

        def all_made() -> bool:
            reported = self.reported_hours()
            return len(reported) >= 3 and set(reported) <= set(self.made_hours())

        eventually(all_made, 300, "the batch asset, started by the bolt", interval=1)
        return self.reported_hours()
