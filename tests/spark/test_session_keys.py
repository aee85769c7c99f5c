"""Keys of ``topology.spark.conf`` that a real Spark refuses or does not know."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storm_dagster.api import SparkBolt, TopologyBuilder, Tuple
from storm_dagster.api.spark.session import drop_worker_session
from storm_dagster.model.conf import HIDDEN
from storm_dagster.model.errors import InvalidTopology, Unavailable
from storm_dagster.model.topology import TopologySpec
from storm_dagster.spark.session import ask_keys, open_connect
from storm_dagster.spark.session_keys import set_keys, string_keys
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import patience
from storm_rigs.servers.ports import free_port
from storm_rigs.worker.spark_component import start

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

SECRET = "x-4711-y"
REFUSED = {
    "spark.executor.memory": ("4g", "CANNOT_MODIFY_CONFIG", "set it in storm.yaml"),
    "spark.sql.warehouse.dir": ("/x", "CANNOT_MODIFY_STATIC_CONFIG", "use spark.master"),
    "spark.sql.shuffle.partitions": ("x", "INVALID_CONF_VALUE", "correct or remove it"),
    "spark.sql.session.timeZone": ("Nowhere/X", "INVALID_CONF_VALUE", "correct or remove it"),
    "spark.authenticate.secret": (SECRET, "CANNOT_MODIFY_CONFIG", "set it in storm.yaml"),
}
THIRD_PARTY = {
    "spark.sql.catalog.lake": "org.example.Catalog",
    "spark.sql.catalog.lake.uri": "thrift://h",
    "spark.hadoop.fs.s3a.endpoint": "http://h",
    "spark.databricks.delta.optimizeWrite.enabled": "true",
    "team.color": "red",
}

TARGET = """
from storm_dagster.api import SparkBolt, Spout, TopologyBuilder


class Numbers(Spout):
    outputs = ["n"]


def negated(frame):
    return frame.selectExpr("-n AS n")


def topology():
    builder = TopologyBuilder("negate")
    builder.set_spout("numbers", Numbers)
    arguments = {"function": "negate:negated"}
    builder.set_bolt("totals", SparkBolt, inputs="numbers", args=arguments, outputs=["n"])
    return builder
"""


@pytest.fixture
def session(spark_remote: str) -> Iterator[Any]:
    session = open_connect(spark_remote)
    yield session
    session.client.close()  # pyright: ignore[reportAttributeAccessIssue]


def topology() -> TopologySpec:
    builder = TopologyBuilder("keywords")
    builder.set_spout("keywords", "words:Words", outputs=["n"])
    arguments = {"function": f"{__name__}:negated", "schema": "n long"}
    builder.set_bolt("totals", SparkBolt, inputs="keywords", args=arguments, outputs=["n"])
    return builder.build()


def negated(frame: Any) -> Any:
    return frame.selectExpr("-n AS n")


def test_each_refused_key_is_named_with_reason_and_remedy(session: Any) -> None:
    result = set_keys(session, {key: value for key, (value, _, _) in REFUSED.items()})
    assert len(result.refused) == len(REFUSED) and not result.misspelled
    for sentence, (key, (value, reason, remedy)) in zip(
        result.refused, REFUSED.items(), strict=True
    ):
        shown = HIDDEN if value == SECRET else value
        assert sentence.startswith(f"{key}: {shown} is refused by Spark (")
        assert reason in sentence and remedy in sentence and SECRET not in sentence


def test_a_misspelled_key_gets_a_suggestion_and_a_third_party_key_a_log_line(
    session: Any, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"spark.sql.shufle.partitions": "8", "spark.sql.adaptive.enabled": "false"}
    with caplog.at_level(logging.WARNING, "storm_dagster.spark.session_keys"):
        result = set_keys(session, {**keys, **THIRD_PARTY})
    assert not result.refused
    assert result.misspelled == (
        "spark.sql.shufle.partitions is not a key of Spark, and has no effect there: did you mean "
        "spark.sql.shuffle.partitions?",
    )
    assert [record.args for record in caplog.records] == [(key,) for key in THIRD_PARTY]
    assert session.conf.get("spark.sql.catalog.lake") == "org.example.Catalog"
    assert session.conf.get("spark.sql.adaptive.enabled") == "false"


def test_values_are_written_as_spark_reads_them() -> None:
    assert string_keys({"a": True, "b": 8, "c": None, "d": "x"}) == {
        "a": "true",
        "b": "8",
        "d": "x",
    }
    assert string_keys(None) == {}


def test_a_server_that_does_not_answer_refuses_nothing(spark_remote: str) -> None:
    mode = os.environ.get("SPARK_CONNECT_MODE_ENABLED")
    with pytest.raises(Unavailable):
        ask_keys(f"sc://127.0.0.1:{free_port()}", {"spark.executor.memory": "4g"}, 2.0)
    (sentence,) = ask_keys(spark_remote, {"spark.executor.memory": "4g"}, patience(60)).refused
    assert "spark.executor.memory" in sentence
    assert os.environ.get("SPARK_CONNECT_MODE_ENABLED") == mode


def test_a_component_reports_its_keys_once_and_goes_on(spark_remote: str) -> None:
    keys = {"spark.executor.memory": "4g", "spark.sql.shufle.partitions": 8}
    conf = {"spark.remote": spark_remote, "topology.spark.conf": keys}
    arguments = {"function": f"{__name__}:negated", "schema": "n long", "batch_tuples": 1}
    bolt = start(SparkBolt, "totals", arguments, topology(), conf)
    done = bolt._collector
    try:
        for number in (1, 2):
            bolt.process(Tuple(number, "keywords", "default", 1, [number]))
    finally:
        drop_worker_session(conf)
    assert [values for _, values in done.emitted] == [[-1], [-2]]
    (error,) = done.errors
    assert isinstance(error, InvalidTopology)
    assert "component 'totals', task 2: topology.spark.conf: " in error.message
    assert "spark.executor.memory: 4g is refused" in error.message
    assert "did you mean spark.sql.shuffle.partitions?" in error.message


@pytest.mark.long
@pytest.mark.parametrize("verb", [("submit", "--dry-run"), ("run", "--seconds", "1")])
def test_a_dry_run_and_a_local_run_refuse_keys_without_effect(
    verb: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "negate.py").write_text(TARGET)
    cases = {
        ("topology.spark.remote=yarn",): "which is not a Spark Connect URL",
        ("spark.master=yarn", "topology.spark.remote=sc://h"): "has no effect beside",
    }
    for pairs, reason in cases.items():
        options = [option for pair in pairs for option in ("--conf", pair)]
        result = run_cli(
            *verb, "--json", "negate.py:topology", *options, home=tmp_path / "home", cwd=tmp_path
        )
        assert result.code == InvalidTopology.exit_code and reason in str(result.document)


CLASSIC = """
import sys
from storm_dagster.api.spark.session import report_keys, worker_session


class Component:
    def raise_exception(self, error):
        print(error.message)


for number, pair in enumerate(sys.argv[1:], 1):
    key, _, value = pair.partition("=")
    conf = {"spark.master": f"local[{number}]", "topology.spark.conf": {key: value}}
    try:
        report_keys(Component(), "component 'totals'", worker_session(conf))
    except Exception as error:
        print(error.message)
"""


@pytest.mark.long
def test_a_classic_driver_that_runs_keeps_its_values() -> None:
    pairs = ["spark.executor.memory=600m", "spark.executor.memory=700m"]
    pairs.append("spark.sql.shuffle.partitions=x")
    done = subprocess.run(
        [sys.executable, "-c", CLASSIC, *pairs],
        capture_output=True,
        text=True,
        timeout=patience(200),
    )
    # The first driver starts with its key, and so reports nothing.
    second, wrong = done.stdout.splitlines()
    assert second.startswith("component 'totals': topology.spark.conf: spark.executor.memory is")
    assert "is '600m' in the Spark driver that runs already" in second
    assert "spark.sql.shuffle.partitions" in wrong
    assert wrong.endswith("correct the values of topology.spark.conf")
