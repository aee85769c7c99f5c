"""Dagster project of a user (``tests/dagster/newcomer_project``), to which three lines and a
declared topology are added.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any

import dagster as dg
import yaml

_ROOT = Path(__file__).parents[4]
PACKAGE = "newcomer_shop"
CODE = (_ROOT / "examples" / "wordcount.py").read_text(encoding="utf-8")
_THREE_LINES = """
from pathlib import Path
from storm_dagster import build_storm_defs
defs = dg.Definitions.merge(
    defs, dg.load_from_defs_folder(path_within_project=Path(__file__).parent), build_storm_defs(home={home!r})
)
"""


class NewcomerProject:
    """Copy of the project in ``root``."""

    def __init__(self, root: Path) -> None:
        shutil.copytree(_ROOT / "tests" / "dagster" / "newcomer_project", root)
        self.root = root
        self._module = root / PACKAGE / "definitions.py"
        self._stock = self._module.read_text(encoding="utf-8")
        self._place = root / PACKAGE / "defs" / "clicks"

    def add_storm(self, home: Path, code: str = "", **attributes: Any) -> None:
        """The three lines, and a declared topology whose code ends with ``code``."""
        self._place.mkdir(exist_ok=True)
        (self._place / "clicks.py").write_text(CODE + code, encoding="utf-8")
        declared = {"name": "clicks", "target": "clicks.py", "home": str(home), **attributes}
        document = {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
        (self._place / "defs.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        self._module.write_text(self._stock + _THREE_LINES.format(home=str(home)), encoding="utf-8")

    def remove_storm(self) -> None:
        """Restore the files as they were."""
        shutil.rmtree(self._place)
        self._module.write_text(self._stock, encoding="utf-8")

    def load(self) -> dg.Definitions:
        """Load its current definitions; ``root`` must be on ``sys.path``."""
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
        importlib.invalidate_caches()
        # A second version within the same second is another file to Python only without its cache.
        shutil.rmtree(self.root / PACKAGE / "__pycache__", ignore_errors=True)
        return importlib.import_module(f"{PACKAGE}.definitions").defs


def inventory(defs: dg.Definitions) -> dict[str, dict[str, Any]]:
    """Kind -> name -> details that users rely on: executors of jobs, clocks of schedules, classes
    of resources.
    """
    repository = defs.get_repository_def()
    return {
        "jobs": {job.name: job.executor_def.name for job in repository.get_all_jobs()},
        "schedules": {
            each.name: (each.cron_schedule, each.job_name, each.default_status.value)
            for each in repository.schedule_defs
        },
        "sensors": {
            each.name: (each.default_status.value, each.minimum_interval_seconds)
            for each in repository.sensor_defs
        },
        "resources": {key: type(value).__name__ for key, value in (defs.resources or {}).items()},
        "assets": {
            spec.key.to_user_string(): (
                spec.group_name,
                sorted(dep.asset_key.to_user_string() for dep in spec.deps),
                str(spec.partitions_def),
            )
            for spec in defs.resolve_all_asset_specs()
            # Dagster's own stand-in for an asset that something depends on and nobody defines.
            if not spec.metadata.get("dagster/auto_created_stub_asset")
        },
    }
