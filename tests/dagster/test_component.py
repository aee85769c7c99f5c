"""``StormTopologyComponent``: a declared topology becomes an asset, a job and a check."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster.components.testing import create_defs_folder_sandbox

from storm_dagster import StormTopologyComponent
from storm_dagster.model.errors import InvalidRequest, InvalidTopology, StormDagsterError
from storm_rigs.dagster.dagster_results import step_failure

pytestmark = pytest.mark.dagster


def load(attributes: dict[str, Any]) -> tuple[dg.Component, dg.Definitions]:
    with create_defs_folder_sandbox() as sandbox:
        path = sandbox.scaffold_component(
            component_cls=StormTopologyComponent,
            defs_yaml_contents={
                "type": "storm_dagster.StormTopologyComponent",
                "attributes": attributes,
            },
        )
        with sandbox.load_component_and_build_defs(defs_path=path) as (component, defs):
            return component, defs


def test_a_declared_topology_is_an_asset_a_job_and_a_check() -> None:
    component, defs = load(
        {"name": "word-count", "target": "wc.py:WordCount", "conf": {"topology.workers": 2}}
    )
    assert isinstance(component, StormTopologyComponent)
    # The target does not exist: the topology is declared all the same, and says what is missing.
    (spec,) = defs.resolve_all_asset_specs()
    assert "wc.py does not exist" in (spec.description or "")
    assert spec.key == dg.AssetKey(["topologies", "word-count"])
    assert spec.kinds == {"storm", "python"}
    jobs = [job.name for job in defs.resolve_all_job_defs() if not job.name.startswith("__")]
    assert sorted(name.split("_word")[0] for name in jobs if "declared" not in name) == [
        "deploy",
        "kill",
        "submit",
    ]
    assert {key.name for check in defs.asset_checks or [] for key in check.check_keys} == {
        "all_tasks_run",
        "as_declared",
        "fresh",
        "reports",
    }
    dg.Definitions.validate_loadable(defs)


@pytest.mark.parametrize(
    ("attributes", "kind", "word"),
    [
        ({"name": "no spaces", "target": "wc.py"}, InvalidTopology, "no spaces"),
        (
            {"name": "wc", "target": "wc.py", "conf": {"topology.worker": 2}},
            InvalidRequest,
            "topology.workers",
        ),
    ],
)
def test_mistakes_are_errors_at_load(
    attributes: dict[str, Any], kind: type[StormDagsterError], word: str
) -> None:
    with pytest.raises(Exception) as caught:
        load(attributes)
    error: BaseException | None = caught.value
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    assert word in str(error)


def test_without_a_cluster_the_run_fails_with_the_typed_error(tmp_path: Path) -> None:
    _, defs = load({"name": "wc", "target": "wc.py", "home": str(tmp_path)})
    # No nimbus listens anywhere near.
    (tmp_path / "storm.yaml").write_text("nimbus.seeds: ['127.0.0.1:9']\n", encoding="utf-8")
    with dg.DagsterInstance.ephemeral() as instance:
        result = defs.resolve_job_def("submit_wc").execute_in_process(
            instance=instance, raise_on_error=False
        )
    assert step_failure(result)[0] == "Unavailable"


def test_the_scaffolded_example_burns_no_core(tmp_path: Path) -> None:
    """Its spout has a rate of its own: a worker that asks it all the time gets a tuple only now and
    then.
    """
    with create_defs_folder_sandbox() as sandbox:
        folder = sandbox.scaffold_component(
            component_cls=StormTopologyComponent, defs_path="clicks"
        )
        (file,) = folder.glob("*_topology.py")
        scaffolded = runpy.run_path(str(file))
    emitted: list[Any] = []

    class Asked(scaffolded["LineSpout"]):
        """The spout without a worker around it."""

        def emit(self, values: Any, **_: Any) -> None:
            emitted.append(values)

    spout: Any = Asked()
    spout.initialize({}, None)
    calls = 20_000
    for _ in range(calls):
        spout.next_tuple()
    assert 1 <= len(emitted) < calls / 10
