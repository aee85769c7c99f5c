"""Where nimbus and the declared topology share one Dagster, and its queue has no room for a second
run.
"""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
import yaml

from storm_dagster.cli.health import check_dagster
from storm_dagster.defs.declared import deploy as declared_deploy
from storm_dagster.model.conf import default_conf
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.dagster_webserver import DagsterServer

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "wordcount.py"


@pytest.mark.long
def test_a_deploy_makes_room_for_the_run_that_it_waits_for(
    stock_dagster: tuple[Path, DagsterServer],
    stage: Stage,
    zk_conf: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one slot the submission starts when the deploying run has ended: that one says so, and
    ends well.
    """
    folder, server = stock_dagster
    nimbus = stage.nimbus(dagster__graphql__url=server.url).await_leading()
    conf = {**zk_conf, "nimbus.seeds": [nimbus.url.removeprefix("http://")]}
    (nimbus.home / "storm.yaml").write_text(yaml.safe_dump(conf))
    monkeypatch.setattr(declared_deploy, "_QUEUED_SECS", 1.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    project = tmp_path / "crowded_shop"
    place = project / "defs" / "wc"
    place.mkdir(parents=True)
    (project / "pyproject.toml").write_text(
        '[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "crowded_shop"\n'
    )
    for package in (project, project / "defs"):
        (package / "__init__.py").touch()
    (place / "wordcount.py").write_text(EXAMPLE.read_text())
    declared = {"name": "wc", "target": "wordcount.py", "home": str(nimbus.home)}
    document = {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
    (place / "defs.yaml").write_text(yaml.safe_dump(document))
    monkeypatch.syspath_prepend(str(tmp_path))
    defs = dg.load_from_defs_folder(path_within_project=project)

    with dg.DagsterInstance.from_config(str(folder)) as instance:
        result = defs.resolve_job_def("deploy_wc").execute_in_process(instance=instance)
        assert result.success
        (left,) = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.QUEUED]))
        assert left.job_name == "submit_topology" and left.tags["storm/topology"] == "wc"
        said = " ".join(entry.user_message for entry in instance.all_logs(result.run_id))
        assert (
            f"run {left.run_id} is queued" in said
            and "concurrency.runs.max_concurrent_runs" in said
        )
        # The sensor records what was deployed, once that has happened.
        key = dg.AssetKey(["topologies", "wc"])
        assert instance.get_latest_materialization_event(key) is None


@pytest.mark.long
def test_doctor_advises_on_the_settings_of_a_stock_instance(
    stock_dagster: tuple[Path, DagsterServer],
) -> None:
    """After the state of the Dagster, which has no daemon here: a row for each setting that could
    be better.
    """
    _, server = stock_dagster
    conf = {**default_conf(), "dagster.graphql.url": server.url, "dagster.location": "storm"}
    (state, found, remedy), *advice = check_dagster(conf, timeout=60.0)
    assert (state, found.partition(" (")[0]) == ("warning", "its daemon does not report")
    assert remedy.startswith("start dagster-daemon")
    assert {state for state, _, _ in advice} == {"ok"}, "nothing breaks without it"
    assert [found for _, found, _ in advice] == [
        "could be better: sensors.use_threads is false",
        "could be better: run_queue.dequeue_interval_seconds is 5",
    ]
    assert [remedy.partition(": ")[0] for _, _, remedy in advice] == ["true", "1"]
    assert all("; it costs: " in remedy for _, _, remedy in advice)
