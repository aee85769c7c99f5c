"""A real Dagster with its code server, a code location in a folder, and the warm process as
``warm-runs`` starts it.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import dagster as dg
import pytest
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget

from storm_dagster.host.processes import RunFile
from storm_dagster.launcher import wire
from storm_dagster.launcher.wire import RUN_ROLE
from storm_rigs.dagster.warm_runs import MODULE, Place

DEFINITIONS = """
import json, logging, os, signal, subprocess, sys, time, warnings
from pathlib import Path
import dagster as dg
import numpy.random

FOLDER = Path(__file__).parent
NAMES = json.loads((FOLDER / "names.json").read_text())
if "warm-runs" in sys.argv:
    # As dbt makes its manifest: at each load, in another process.
    subprocess.run(["cp", FOLDER / "names.json", FOLDER / "made.json"], check=True)
    (FOLDER / "made.json").read_text()
logging.captureWarnings(True)
logging.basicConfig(filename=FOLDER / "location.log", level=logging.INFO, format="%(message)s")

class How(dg.Config):
    how: str = "well"

@dg.op
def work(context, config: How):
    print("work says", "HELLO", flush=True)
    if config.how == "tell":
        logging.getLogger("location").info("told by %s", context.run_id)
        warnings.warn(f"warned by {context.run_id}")
        (FOLDER / f"{context.run_id}.json").write_text(json.dumps({"number": numpy.random.random(), "names": NAMES}))
    if config.how == "badly":
        raise ValueError("wrong")
    if config.how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.how == "gone":
        os._exit(0)
    while config.how in ("long", "deaf"):
        if os.path.exists(os.path.join(os.environ["STORM_DAGSTER_HOME"], "finish")):
            break
        try:
            time.sleep(0.05)
        except BaseException:
            if config.how == "long":
                raise

@dg.job(executor_def=dg.in_process_executor)
def job():
    work()

defs = dg.Definitions(jobs=[job])
"""
SETTINGS = """
run_launcher:
  module: storm_dagster.launcher
  class: WarmRunLauncher
run_coordinator:
  module: dagster._core.run_coordinator
  class: DefaultRunCoordinator
telemetry: {enabled: false}
"""


@pytest.fixture(scope="module")
def made_place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("warm")
    for name in ("home", "code", "dagster"):
        (folder / name).mkdir()
    (folder / "code" / f"{MODULE}.py").write_text(DEFINITIONS, encoding="utf-8")
    (folder / "code" / "names.json").write_text('["Ann"]', encoding="utf-8")
    (folder / "dagster" / "dagster.yaml").write_text(SETTINGS, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORM_DAGSTER_HOME", str(folder / "home"))
        patch.setenv("DAGSTER_DISABLE_TELEMETRY", "yes")
        # A second is long enough for users, for whom a run then starts the stock way; these tests
        # ask for the other one.
        patch.setattr(wire, "ANSWER_SECS", 30.0)
        target = ModuleTarget(MODULE, None, str(folder / "code"), None)
        with (
            dg.DagsterInstance.from_config(str(folder / "dagster")) as instance,
            WorkspaceProcessContext(instance, target) as workspace,
        ):
            place = Place(folder, instance, workspace)
            try:
                yield place
            finally:
                place.kill_warm(signal.SIGTERM)


@pytest.fixture
def place(made_place: Place) -> Iterator[Place]:
    """With the location's code as it was written first; no run of one test outlives it."""
    yield made_place
    (made_place.home / "finish").touch()
    for path in (made_place.home / "run").glob(f"{RUN_ROLE}-*.json"):
        record = RunFile.read(path)
        if record is not None and record.alive():
            os.kill(record.pid, signal.SIGKILL)
    (made_place.home / "finish").unlink()
