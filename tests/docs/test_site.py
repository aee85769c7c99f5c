"""The site builds strictly, and its reference knows every verb, conf key and public name."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import storm_dagster.client
from storm_dagster.cli.app import VERBS
from storm_dagster.defs.build import build_storm_resources
from storm_dagster.model.conf import CONF_KEYS
from storm_dagster.model.verbs import VERBS as VERBS_OF_TOPOLOGIES

# `make check` and `make docs` build it.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
INTERNAL = {"storm_dagster.blobstore", "storm_dagster.cli"}
"""Packages whose exported names are for the package itself."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sphinx",
            "-W",
            "--keep-going",
            "-q",
            "-b",
            "dirhtml",
            "docs",
            str(folder),
        ],
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


def public_packages() -> dict[str, list[str]]:
    """Package -> the names that it exports."""
    packages = [
        name
        for _, name, is_package in pkgutil.iter_modules(storm_dagster.__path__, "storm_dagster.")
        if is_package
    ]
    modules = [storm_dagster, *map(importlib.import_module, packages)]
    exported = {
        each.__name__: [*getattr(each, "__all__", ())]
        for each in modules
        if each.__name__ not in INTERNAL
    }
    return {name: sorted({*names} - {"__version__"}) for name, names in exported.items() if names}


def test_every_public_name_is_described(site: Path) -> None:
    pages = [
        (site / "reference" / name / "index.html").read_text(encoding="utf-8")
        for name in ("api", "dagster")
    ]
    described = set(re.findall(r"storm_dagster(?:\.\w+)+", "".join(pages)))
    public = public_packages()
    assert {
        f"storm_dagster.{name}" for name in ("api", "client", "connectors", "defs", "testing")
    } <= public.keys()
    names = [
        f"{package}.{name}"
        for package, found in public.items()
        for name in found
        if package != "storm_dagster"
    ]
    assert [name for name in names if name not in described] == []
    # What the package itself has of the API is described there.
    own = [name for name in public["storm_dagster"] if f"storm_dagster.api.{name}" not in described]
    assert [name for name in own if f"storm_dagster.{name}" not in described] == []
    resources = [type(resource).__name__ for resource in build_storm_resources().values()]
    assert [name for name in resources if f".{name}" not in pages[1]] == []
    functions = dict(
        re.findall(
            # Two cells of one row; text elsewhere may name single words, too.
            r"<td><p><code[^>]*><span class=\"pre\">([\w-]+)</span></code></p></td>\s*"
            r"<td><p><code[^>]*><span class=\"pre\">([a-z_]+)</span></code></p></td>",
            pages[0],
        )
    )
    for verb in VERBS_OF_TOPOLOGIES.values():
        function = functions[verb.name]
        assert function in storm_dagster.client.__all__
        assert getattr(storm_dagster.client, function) is getattr(storm_dagster.client, verb.job)


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
