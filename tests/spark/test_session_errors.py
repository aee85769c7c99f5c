"""What a person reads when Spark breaks off."""

from __future__ import annotations

import socket
import uuid
from pathlib import Path
from typing import Any

import grpc
import pytest

from storm_dagster.api.spark import session as spark_session
from storm_dagster.model.errors import Unavailable
from storm_dagster.spark.planner import ConnectPlanner, FixedSessionIds
from storm_dagster.spark.session import as_unavailable
from storm_dagster.spark.warm_up import WARM_BATCH
from storm_rigs.servers.ports import free_port
from storm_rigs.servers.spark_server import SparkServer


def test_an_error_of_grpc_is_told_by_what_happened() -> None:
    with (
        grpc.insecure_channel(f"127.0.0.1:{free_port()}") as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        channel.unary_unary("/spark/Nothing")(b"", timeout=10)
    error = as_unavailable(raised.value, "Spark at sc://127.0.0.1:1")
    assert isinstance(error, Unavailable)
    assert "failed to connect" in str(error) and "RPC that terminated" not in str(error)


def test_another_error_is_told_by_its_first_line() -> None:
    error = as_unavailable(ValueError("no such column\nat line 3"), "the placement")
    assert (
        str(error) == "the placement failed (no such column): see the Spark server's log, try again"
    )


@pytest.mark.spark
@pytest.mark.timeout(300)
def test_a_server_of_another_release_is_named_with_the_remedy(tmp_path: Path) -> None:
    """Spark ships functions by name, so its Python workers must have them."""
    server = SparkServer(free_port(), tmp_path)
    server.python_path.mkdir(parents=True)
    (server.python_path / "sitecustomize.py").write_text(
        "from storm_dagster.spark.assignment import groups\ndel groups.allocate_in_cluster\n"
    )
    with server:
        planner = ConnectPlanner(server.remote, FixedSessionIds(str(uuid.uuid4())), home=tmp_path)
        with pytest.raises(
            Unavailable,
            match=r"another release of storm_dagster\.spark\.assignment\.groups.*restart Spark",
        ):
            planner(WARM_BATCH)
        planner.close()


@pytest.mark.parametrize("code", ["", "a-1-1"])
def test_a_closed_session_that_the_url_names_is_tried_once_and_named(
    monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    tries: list[Any] = []

    def closed(url: str, session_id: str, extra: Any, own: bool) -> None:
        tries.append(own)
        raise Exception(
            "[INVALID_HANDLE.SESSION_CLOSED] The handle is invalid"
            if len(tries) < 4
            else "four tries"
        )

    monkeypatch.setattr(spark_session, "_attach", closed)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"sc://127.0.0.1:{server.getsockname()[1]}/;session_id=2f9c8a0e-4c7b-4a7e-9d3e-0123456789ab"
        with pytest.raises(
            Unavailable, match=r"SESSION_CLOSED.*name another session_id in the URL"
        ):
            spark_session.worker_session({"spark.remote": url}, code=code)
    assert tries == [False], "it does not end with this process either"
