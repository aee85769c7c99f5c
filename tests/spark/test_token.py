"""A Spark server that lets in only who knows the cluster's secret: shown, not shown, and what is
said then.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.spark_remote import SPARK_TOKEN, derived_spark_token
from storm_dagster.spark.planner import ConnectPlanner, FixedSessionIds
from storm_dagster.spark.session import ask_version
from storm_dagster.spark.warm_up import WARM_BATCH
from storm_dagster.testing.cluster import run_cli
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer

pytestmark = [pytest.mark.spark, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def conf_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A conf folder with a secret, and the server that it names."""
    folder = tmp_path_factory.mktemp("conf")
    (folder / "secret").write_text("a secret of the cluster\n", encoding="utf-8")
    (folder / "secret").chmod(0o600)
    port = free_port()
    (folder / "storm.yaml").write_text(
        f"storm.secret.file: {folder / 'secret'}\nspark.remote: sc://127.0.0.1:{port}\nnimbus.seeds: ['127.0.0.1:1']\n",
        encoding="utf-8",
    )
    token = derived_spark_token(load_cluster_conf(folder))
    assert token is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SPARK_TOKEN, token)
        server = SparkServer(port, tmp_path_factory.mktemp("spark")).start()
    with server:
        yield folder


def spark_row(*args: str, home: Path) -> dict[str, str]:
    done = run_cli("doctor", "--json", *args, home=home)
    (row,) = [row for row in done.document["findings"] if row["check"] == "Spark"]
    return row


@pytest.mark.long
def test_a_conf_folder_is_enough(
    conf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any HOME folder, as a code location on a host of its own."""
    monkeypatch.setenv("STORM_DAGSTER_HOME", str(tmp_path / "nowhere"))
    conf = load_cluster_conf(conf_dir)
    ids = FixedSessionIds(str(uuid.uuid4()))
    # The first job of a server takes long on a busy machine.
    placed = ConnectPlanner(
        conf["spark.remote"], ids, token=derived_spark_token(conf), deadline_secs=300
    )(WARM_BATCH)
    assert placed.planner == "pyspark" and {each.name for each in placed.placements} == {"a", "b"}
    assert not (tmp_path / "nowhere").exists()
    assert spark_row("--conf-dir", str(conf_dir), home=tmp_path / "nowhere")["state"] == "ok"


@pytest.mark.long
def test_who_has_no_token_is_told_so(conf_dir: Path, tmp_path: Path) -> None:
    remote = load_cluster_conf(conf_dir)["spark.remote"]
    with pytest.raises(Unavailable) as raised:
        ask_version(remote, tmp_path, None, 60)
    said = raised.value.message
    assert "UNAUTHENTICATED: " in said and "storm.secret" in said and remote in said
    assert "RPC that terminated" not in said
    wrong = spark_row(
        "-c", f"spark.remote={remote}", "-c", "nimbus.seeds=[127.0.0.1:1]", home=tmp_path / "h"
    )
    assert wrong["state"] == "broken" and "UNAUTHENTICATED" in wrong["found"]
