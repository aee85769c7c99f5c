"""The site builds strictly, and its reference knows every verb, conf key and public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from storm_dagster.cli.app import VERBS
from storm_dagster.defs.build import build_storm_resources
from storm_dagster.model.conf import CONF_KEYS

# `make check` and `make docs` build it.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dirhtml", "docs", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_verb_is_described(site: Path) -> None:
    page = (site / "reference" / "cli" / "index.html").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"storm-dagster {verb}" not in page] == []


def test_every_conf_key_is_described(site: Path) -> None:
    page = (site / "reference" / "configuration" / "index.html").read_text(encoding="utf-8")
    # One line for each table cell's words, whatever a theme wraps them in.
    words = {line.strip() for line in re.sub(r"</p>|</td>", "\n", page).splitlines()}
    words = {re.sub(r"<[^>]+>", "", line) for line in words}
    assert [key for key in CONF_KEYS if key not in words] == []


def test_every_public_name_is_described(site: Path) -> None:
    import storm_dagster.api

    page = (site / "reference" / "api" / "index.html").read_text(encoding="utf-8")
    assert [name for name in storm_dagster.api.__all__ if f".{name}" not in page] == []
    page += (site / "reference" / "dagster" / "index.html").read_text(encoding="utf-8")
    names = [*(set(storm_dagster.__all__) - {"__version__"}), "WarmRunLauncher"]
    names += [type(resource).__name__ for resource in build_storm_resources().values()]
    assert [name for name in names if f".{name}" not in page] == []


def test_every_job_and_sensor_is_described(site: Path) -> None:
    from storm_dagster.defs import build_storm_defs

    page = (site / "reference" / "dagster" / "index.html").read_text(encoding="utf-8")
    repository = build_storm_defs().get_repository_def()
    names = [
        *(job.name for job in repository.get_all_jobs() if not job.name.startswith("__")),
        *(sensor.name for sensor in repository.sensor_defs),
        *(schedule.name for schedule in repository.schedule_defs),
    ]
    assert [name for name in names if name not in page] == []
