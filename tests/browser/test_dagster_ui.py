"""A topology's life in the Dagster UI, as a person lives it: forms filled, runs watched, the
picture looked at.

One cluster, one topology; the tests come in the order of its life, and each finds what the one
before left.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_pages import DagsterPages

pytestmark = [
    pytest.mark.browser,
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]
NAME = "wordcount"
SUBMISSION = f"""\
ops:
  storm__topology_conf:
    config:
      target: {ROOT}/examples/wordcount.py
      conf:
        topology.workers: 4
        wordcount.lines.per.second: 200
"""
REBALANCE = """\
ops:
  storm__assignment:
    config:
      workers: 2
      wait_secs: 0
"""
KILL = f"""\
ops:
  kill_topology_op:
    config:
      name: {NAME}
      wait_secs: 0
"""


@pytest.fixture(scope="module")
def cluster(browser: object, shared_cluster: LocalCluster) -> LocalCluster:
    # A target is seen from the code location, which works in the cluster's home.
    folder = shared_cluster.home.parent / "topologies"
    folder.mkdir(exist_ok=True)
    shutil.copy(ROOT / "examples" / "wordcount.py", folder)
    return shared_cluster


@pytest.fixture
def ui(open_pages: Callable[[str], DagsterPages], cluster: LocalCluster) -> DagsterPages:
    return open_pages(cluster.endpoints.dagster.url)


def _timeline(ui: DagsterPages, cluster: LocalCluster) -> Locator:
    """What happened to the topology, on the page of the leader."""
    with cluster.nimbus() as nimbus:
        leader = nimbus.get("/healthz")["leader_http"]
    ui.page.goto(f"{leader}/topologies/{NAME}")
    return ui.page.get_by_role("region", name="What happened")


def test_a_topology_is_submitted_from_the_launchpad(
    ui: DagsterPages, cluster: LocalCluster
) -> None:
    ui.open_asset_launchpad("submit_topology")
    ui.add_partition(NAME)
    ui.write_config("storm__topology_conf", SUBMISSION)
    ui.picture("launchpad")
    ui.launch()
    ui.wait_success(steps=6)
    # Drawn again: the bars of a run that was watched may stop short of their end.
    ui.page.reload()
    ui.wait_success(steps=6)
    ui.picture("submission-run")
    document = cluster.wait_running(NAME)
    assert document["status"] == "ACTIVE"
    assert len(document["workers"]) == 4


def test_the_graph_of_the_submission_is_green(ui: DagsterPages) -> None:
    ui.page.set_viewport_size({"width": 1440, "height": 640})
    ui.open("/locations/storm/asset-groups/submission/lineage")
    for asset in ("topology_conf", "topology_code", "task_info", "active_topology"):
        expect(ui.page.get_by_text(asset, exact=True)).to_be_visible()
    ui.picture("submission-graph")


def test_the_placement_is_a_picture_in_the_metadata(
    ui: DagsterPages, cluster: LocalCluster
) -> None:
    ui.open(f"/assets/storm/assignment?view=partitions&partition={NAME}")
    row = ui.page.get_by_text("tasks_on_slots", exact=True).first
    row.scroll_into_view_if_needed()
    row.locator("xpath=following::*[contains(text(), 'Show Markdown')][1]").click()
    picture = ui.page.locator(".dagster-portal img").last
    expect(picture).to_be_visible()
    # A picture that the browser could not draw has no size.
    eventually(lambda: picture.evaluate("image => image.naturalWidth"), 30, "the picture drawn")
    source = picture.get_attribute("src")
    assert source is not None and source.startswith("data:image/svg+xml")
    ui.picture("tasks-on-slots")


def test_a_rebalance_is_launched_from_its_form(ui: DagsterPages, cluster: LocalCluster) -> None:
    ui.open_job_launchpad("rebalance_topology")
    ui.choose_partition(NAME)
    ui.write_config("storm__assignment", REBALANCE)
    ui.launch()
    ui.wait_success(steps=2)
    eventually(
        lambda: len(cluster.wait_running(NAME)["workers"]) == 2,
        60,
        "two workers",
        ignore=(StormDagsterError, AssertionError),
        interval=0.5,
    )


def test_a_lost_host_is_a_healing_run_on_the_runs_page(
    ui: DagsterPages, cluster: LocalCluster
) -> None:
    lost = cluster.show(NAME)["workers"][0]["node"]
    workers = [worker["pid"] for worker in cluster.show(NAME)["workers"] if worker["node"] == lost]
    # A host that is gone takes along whoever would start its daemons again.
    cluster.kill("dev")
    cluster.kill("supervisor", lost)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    ui.open("/runs")
    row = ui.run_row("reassign_topologies")
    expect(row).to_be_visible(timeout=90_000)
    expect(row).to_contain_text("Success", timeout=90_000)
    ui.picture("healing-run")
    document = cluster.wait_running(NAME, 90)
    assert {task["node"] for task in document["tasks"]} == {w["node"] for w in document["workers"]}
    assert lost not in {task["node"] for task in document["tasks"]}
    run = row.get_by_role("link").first.get_attribute("href")
    assert run is not None and "/runs/" in run
    # The page of nimbus says the same: why, for how long nobody had heard of the host, and by which
    # run.
    healed = _timeline(ui, cluster).get_by_role("row").filter(has_text="healed")
    expect(healed).to_have_count(1)
    expect(healed).to_contain_text(f"is lost with supervisor {lost}")
    expect(healed).to_contain_text("tasks moved")
    expect(healed).to_contain_text(re.compile(r"silent for \d+ s before"))
    expect(healed.get_by_role("link")).to_have_attribute(
        "href", re.compile(f"/runs/{run.rsplit('/', 1)[1]}")
    )


def test_a_kill_is_launched_from_its_form(ui: DagsterPages, cluster: LocalCluster) -> None:
    ui.open_job_launchpad("kill_topology")
    # Nothing has a default: its form begins empty.
    ui.write_config("{}", KILL)
    ui.launch()
    ui.wait_success(steps=1)
    eventually(lambda: cluster.topologies() == [], 60, "the topology gone", interval=0.5)
