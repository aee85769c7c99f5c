"""Settings of ``StormTopologyComponent`` that stock components have: op, job tags, translation,
freshness policies, and the addresses of tables.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml
from pydantic import ValidationError

from storm_dagster.defs.declared.asset_metadata import fill_templates
from storm_dagster.model.errors import InvalidRequest
from storm_rigs.dagster.dagster_results import text_of_cause

pytestmark = pytest.mark.dagster

CODE = """
from storm_dagster.api import Spout, Topology
from storm_dagster.connectors import FileSink, KafkaSink, PostgresSink, SinkBolt


class Orders(Spout):
    outputs = ["order"]


class Table(SinkBolt):
    sink = PostgresSink("orders")


class Sales(SinkBolt):
    sink = PostgresSink("mart.sales", prefix="mart.")


class Archive(SinkBolt):
    sink = FileSink("s3://shop-archive/orders", "parquet")


class Topic(SinkBolt):
    sink = KafkaSink("orders")


class Shop(Topology):
    config = {"postgres.host": "db", "postgres.dbname": "shop", "kafka.bootstrap.servers": "k1:9092"}
    orders = Orders.spec()
    table = Table.spec(inputs=[orders])
    sales = Sales.spec(inputs=[orders], config={"mart.host": "mart-db", "mart.port": 5433})
    archive = Archive.spec(inputs=[orders])
    topic = Topic.spec(inputs=[orders])
"""
TABLE = "topologies/shop/table/postgres/orders"


class Folder:
    """A project's folder of definitions with the topology `shop`."""

    def __init__(self, root: Path, package: str) -> None:
        self.root, self.place = root, root / package / "defs" / "shop"
        self.place.mkdir(parents=True)
        (root / "pyproject.toml").write_text(
            f'[tool.dg]\ndirectory_type = "project"\n[tool.dg.project]\nroot_module = "{package}"\n',
            encoding="utf-8",
        )
        for folder in (self.place.parents[1], self.place.parent):
            (folder / "__init__.py").touch()
        (self.place / "shop_code.py").write_text(CODE, encoding="utf-8")

    def load(self, **attributes: Any) -> dg.Definitions:
        declared = {"name": "shop", "target": "shop_code.py:Shop", **attributes}
        document = {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
        (self.place / "defs.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        return dg.load_from_defs_folder(path_within_project=self.root)

    def specs(self, **attributes: Any) -> dict[str, dg.AssetSpec]:
        specs = self.load(**attributes).resolve_all_asset_specs()
        return {spec.key.to_user_string(): spec for spec in specs}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return Folder(tmp_path, f"settings_{tmp_path.name}".replace("-", "_"))


def test_tables_have_their_name_and_address(folder: Folder) -> None:
    specs = folder.specs(conf={"postgres.dbname": "shop_test"})

    def stored(key: str) -> dict[str, Any]:
        names = ("dagster/table_name", "dagster/uri")
        metadata = specs[f"topologies/shop/{key}"].metadata
        return {name: metadata[name] for name in names if name in metadata}

    assert stored("table/postgres/orders") == {
        "dagster/table_name": "shop_test.public.orders",
        "dagster/uri": "postgres://db:5432/shop_test.public.orders",
    }
    # Its database is not in the conf that is declared: a part of the name would be another table.
    assert stored("sales/postgres/mart.sales") == {}
    assert stored("archive/files/s3/shop-archive/orders") == {
        "dagster/uri": "s3://shop-archive/orders"
    }
    assert stored("topic/kafka/orders") == {"dagster/uri": "kafka://k1:9092/orders"}


def test_templates_have_defaults_and_are_filled_whole_or_left_out() -> None:
    templates = {"a": "{x.y}:{port=5432}", "b": "{gone}", "c": "plain", "d": "{none=}"}
    filled = fill_templates(templates, {"x.y": "db", "port": 1})
    assert filled == {"a": "db:1", "c": "plain", "d": ""}


def test_tables_have_a_freshness_policy_if_limits_are_set(folder: Folder) -> None:
    assert folder.specs()[TABLE].freshness_policy is None
    specs = folder.specs(freshness={"tables_warn_minutes": 20, "tables_fail_minutes": 45})
    policy = dg.FreshnessPolicy.time_window(timedelta(minutes=45), timedelta(minutes=20))
    assert specs[TABLE].freshness_policy == policy
    # The topology is materialized at deploys only, and would fail soon after each.
    assert specs["topologies/shop"].freshness_policy is None
    for limits, words in (
        ({"tables_warn_minutes": 20}, "set both"),
        ({"tables_warn_minutes": 20, "tables_fail_minutes": 20}, "must be smaller"),
    ):
        with pytest.raises(Exception) as caught:
            folder.load(freshness=limits)
        assert words in text_of_cause(caught.value, InvalidRequest)


def test_a_translation_in_yaml_renames_and_annotates(folder: Folder) -> None:
    key = "{{ 'mart/' ~ component ~ '_rows' if target else spec.key.to_user_string() }}"
    specs = folder.specs(
        tags={"tier": "gold"},
        translation={
            "key": key,
            "group_name": "{{ topology }}_{{ kind }}",
            "tags": {"part": "{{ component or topology }}"},
            "owners": ["team:{{ kind }}"],
        },
    )
    writers = ("table", "sales", "archive", "topic")
    assert specs.keys() == {
        "topologies/shop",
        "topologies/shop/orders",
        *[f"topologies/shop/{writer}" for writer in writers],
        *[f"mart/{writer}_rows" for writer in writers],
    }
    (dep,) = specs["mart/table_rows"].deps
    assert dep.asset_key == dg.AssetKey(["topologies", "shop", "table"])
    assert specs["topologies/shop"].group_name == "shop_topology"
    assert specs["topologies/shop/table"].owners == ["team:bolt"]
    tags = specs["topologies/shop/table"].tags
    assert (tags["tier"], tags["part"]) == ("gold", "table")


def test_the_op_has_a_pool_a_retry_policy_and_tags(folder: Folder) -> None:
    defs = folder.load(
        op={
            "pool": "deploys",
            "tags": {"storm": "deploy"},
            "retry_policy": {"max_retries": 2, "delay": 5, "backoff": "exponential"},
        }
    )
    node = defs.resolve_job_def("deploy_shop").get_node_named("deploy_shop_op").definition
    assert isinstance(node, dg.OpDefinition)
    assert node.pool == "deploys" and node.tags["storm"] == "deploy"
    assert node.retry_policy == dg.RetryPolicy(2, delay=5, backoff=dg.Backoff.EXPONENTIAL)


@pytest.mark.parametrize(
    "attributes",
    [{"op": {"backfill_policy": {"type": "single_run"}}}, {"op": {"retry_policy": {"tries": 1}}}],
)
def test_settings_without_an_effect_are_errors(folder: Folder, attributes: dict[str, Any]) -> None:
    with pytest.raises(Exception) as caught:
        folder.load(**attributes)
    said = text_of_cause(caught.value, ValidationError)
    assert "backfill_policy" in said or "tries" in said


def test_jobs_have_the_tags_that_run_launchers_read(folder: Folder) -> None:
    config = {"container_config": {"resources": {"requests": {"memory": "1Gi"}}}}
    defs = folder.load(job_tags={"dagster-k8s/config": config, "ecs/cpu": 512})
    for name in ("submit_shop", "deploy_shop", "kill_shop"):
        tags = defs.resolve_job_def(name).tags
        assert yaml.safe_load(tags["dagster-k8s/config"]) == config
        assert tags["ecs/cpu"] == "512" and tags["storm/topology"] == "shop"
    # The shared jobs are those of all topologies: the runs of one have its tags.
    assert "ecs/cpu" not in defs.resolve_job_def("deploy_declared").tags
