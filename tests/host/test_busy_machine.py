"""The factor of a busy machine: where it comes from, and which limits it scales."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from busy_machine import MAX_FACTOR, factor_of
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.conf import CONF_KEYS
from storm_dagster.model.errors import Misconfigured
from storm_dagster.testing.cluster import multiplied_conf
from storm_dagster.testing.waiting import PATIENCE, eventually, patience

PLUGINS = Path(__file__).parents[1] / "plugins"
LOADS = st.floats(0, 1000)
CORES = st.integers(1, 256)

CASES = """
import os
from pathlib import Path
import pytest

def record(request, name):
    limit = request.node.get_closest_marker("timeout").args[0]
    Path(name).write_text(f"{os.environ['STORM_TEST_PATIENCE']} {limit:g}")

def test_of_the_configuration(request):
    record(request, "configured")

@pytest.mark.timeout(40)
def test_of_a_mark(request):
    record(request, "marked")
"""


@given(load=LOADS, cores=CORES, more=LOADS)
def test_the_factor_grows_with_the_load_within_its_bounds(
    load: float, cores: int, more: float
) -> None:
    factor = factor_of(load, cores)
    assert 1 <= factor <= factor_of(load + more, cores) <= MAX_FACTOR
    assert factor_of(load, cores + 1) <= factor


@given(cores=CORES)
def test_an_idle_machine_changes_no_limit_and_a_full_one_does(cores: int) -> None:
    assert factor_of(0.5 * cores, cores) == 1
    assert factor_of(2 * cores, cores) > 2


def test_a_limit_keeps_its_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATIENCE, "2.5")
    whole, part = patience(3), patience(0.5)
    assert (whole, type(whole)) == (8, int)
    assert (part, type(part)) == (1.25, float)


@pytest.mark.parametrize("text", ["0.5", "-3", "nan", "inf", "three"])
def test_a_factor_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PATIENCE, text)
    with pytest.raises(Misconfigured, match=f"{PATIENCE}='{text}'.*at least 1"):
        eventually(lambda: True)


@pytest.mark.parametrize("conf", [{}, {"supervisor.worker.timeout.secs": 8}])
def test_the_limits_of_a_local_cluster_are_multiplied(
    monkeypatch: pytest.MonkeyPatch, conf: dict[str, Any]
) -> None:
    monkeypatch.setenv(PATIENCE, "1")
    assert multiplied_conf(conf) == conf
    monkeypatch.setenv(PATIENCE, "8")
    scaled = multiplied_conf({**conf, "topology.workers": 2})
    assert scaled["topology.workers"] == 2
    assert scaled["storm.zookeeper.session.timeout"] == 32_000
    key = "supervisor.worker.timeout.secs"
    assert scaled[key] == 8 * conf.get(key, CONF_KEYS[key].default)
    # A daemon accepts each value, also those that reach the maximum of their key.
    assert load_cluster_conf(None, scaled)["dagster.graphql.timeout.secs"] == 20


@pytest.mark.parametrize("factor", [None, "3"])
def test_all_workers_of_a_run_have_one_factor(tmp_path: Path, factor: str | None) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 100\n")
    (tmp_path / "test_marked.py").write_text(CASES)
    environment = {name: value for name, value in os.environ.items() if name != PATIENCE}
    if factor is not None:
        environment[PATIENCE] = factor
    environment["PYTHONPATH"] = f"{PLUGINS}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "busy_machine", "-n", "2"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    configured_factor, configured = (tmp_path / "configured").read_text().split()
    marked_factor, marked = (tmp_path / "marked").read_text().split()
    assert configured_factor == marked_factor
    assert factor in (None, configured_factor)
    assert float(configured) == pytest.approx(100 * float(configured_factor))
    # An int is rounded up.
    assert 40 * float(marked_factor) <= float(marked) < 40 * float(marked_factor) + 1
