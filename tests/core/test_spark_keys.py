"""The keys that choose the Spark of a topology: those without effect are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from storm_dagster.api import SparkBolt, TopologyBuilder
from storm_dagster.core.submission.validation import normalize_submission
from storm_dagster.model.conf import default_conf, validate_conf
from storm_dagster.model.errors import InvalidTopology
from storm_dagster.model.fusion import is_spark_component
from storm_dagster.model.topology import TopologySpec

CONNECT = "sc://spark1:15002"


class Totals(SparkBolt):
    """A user's own class of Spark components."""

    @classmethod
    def component_config(cls, args: Mapping[str, Any]) -> dict[str, Any]:
        return {}


def topology(
    *, spark: bool = True, conf: dict[str, Any] | None = None, bolt: type[SparkBolt] = SparkBolt
) -> TopologySpec:
    builder = TopologyBuilder("prices")
    builder.set_spout("lines", "prices:Lines", outputs=["text"])
    if spark:
        arguments = {"function": "prices:totals"}
        builder.set_bolt("totals", bolt, inputs="lines", args=arguments, config=conf)
    return builder.build()


def submit(cluster: dict[str, Any], own: dict[str, Any], spec: TopologySpec) -> dict[str, Any]:
    submitted, _ = validate_conf(own, source="the conf", submitted=True)
    stored, _ = normalize_submission({**default_conf(), **cluster}, submitted, spec)
    return stored


def refusal(cluster: dict[str, Any], own: dict[str, Any], spec: TopologySpec) -> str:
    with pytest.raises(InvalidTopology) as raised:
        submit(cluster, own, spec)
    return raised.value.message


def test_a_master_beside_the_connect_server_of_the_cluster_is_refused() -> None:
    message = refusal({"spark.remote": CONNECT}, {"spark.master": "yarn"}, topology())
    assert "bolt 'totals': spark.master 'yarn' of the topology's conf has no effect" in message
    assert f"beside spark.remote '{CONNECT}' of the cluster's conf" in message
    assert "set spark.remote: null in the topology's conf" in message


def test_a_users_class_of_a_spark_component_is_one() -> None:
    spec = topology(bolt=Totals)
    assert is_spark_component(spec.bolts["totals"])
    assert not is_spark_component(spec.spouts["lines"])
    message = refusal({"spark.remote": CONNECT}, {"spark.master": "yarn"}, spec)
    assert "bolt 'totals': spark.master 'yarn' of the topology's conf has no effect" in message
    assert topology().bolts["totals"].conf.keys() == {"topology.tick.tuple.freq.secs"}


def test_a_connect_url_is_no_master() -> None:
    message = refusal({}, {"spark.master": CONNECT}, topology())
    assert "is a Spark Connect URL: write it under topology.spark.remote" in message


def test_a_master_beside_a_connect_server_of_its_own_is_refused() -> None:
    own = {"spark.master": "yarn", "topology.spark.remote": CONNECT, "spark.remote": None}
    message = refusal({}, own, topology())
    assert f"topology.spark.remote '{CONNECT}' of the topology's conf" in message


def test_the_remedy_of_the_error_works() -> None:
    own = {"spark.master": "yarn", "spark.remote": None}
    stored = submit({"spark.remote": CONNECT}, own, topology())
    assert stored["spark.master"] == "yarn" and stored["spark.remote"] is None
    hidden = {"spark.remote": CONNECT, "topology.spark.remote": CONNECT}
    submit(hidden, {**own, "topology.spark.remote": None}, topology())


def test_a_master_of_the_cluster_alone_is_used() -> None:
    submit({"spark.master": "spark://m:7077"}, {}, topology())
    submit({"spark.master": "yarn", "spark.remote": CONNECT}, {}, topology())
    submit({"spark.master": "yarn"}, {"spark.master": "local[2]"}, topology())


def test_the_conf_of_a_component_counts() -> None:
    spec = topology(conf={"spark.master": "yarn"})
    assert "has no effect beside spark.remote" in refusal({"spark.remote": CONNECT}, {}, spec)
    submit({"spark.remote": CONNECT}, {}, topology(conf={"topology.spark.remote": "sc://h"}))


@pytest.mark.parametrize("url", ["yarn", "spark://h:7077", "local[2]", "http://h:15002"])
@pytest.mark.parametrize("spark", [True, False])
def test_a_remote_of_another_scheme_is_refused(url: str, spark: bool) -> None:
    message = refusal({}, {"topology.spark.remote": url}, topology(spark=spark))
    assert f"topology.spark.remote is '{url}', which is not a Spark Connect URL" in message
    assert "write sc://host:port, or use spark.master" in message


def test_a_password_in_a_wrong_remote_is_not_shown() -> None:
    message = refusal({}, {"topology.spark.remote": "http://ann:pw-4711@h"}, topology())
    assert "pw-4711" not in message


def test_a_reference_is_left_to_the_host_of_the_task() -> None:
    submit({}, {"topology.spark.remote": "${env:SPARK}"}, topology())


def test_without_a_spark_component_the_code_may_read_a_master() -> None:
    submit({"spark.remote": CONNECT}, {"spark.master": "yarn"}, topology(spark=False))
