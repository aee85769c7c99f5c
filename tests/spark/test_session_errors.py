"""What a person reads when Spark breaks off."""

from __future__ import annotations

import grpc
import pytest

from storm_dagster.model.errors import Unavailable
from storm_dagster.spark.session import as_unavailable
from storm_rigs.worker_rig import free_port


def test_an_error_of_grpc_is_told_by_what_happened() -> None:
    with grpc.insecure_channel(f"127.0.0.1:{free_port()}") as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/spark/Nothing")(b"", timeout=10)
    error = as_unavailable(raised.value, "Spark at sc://127.0.0.1:1")
    assert isinstance(error, Unavailable)
    assert "failed to connect" in str(error) and "RPC that terminated" not in str(error)


def test_another_error_is_told_by_its_first_line() -> None:
    error = as_unavailable(ValueError("no such column\nat line 3"), "the placement")
    assert str(error) == "the placement failed (no such column): see the Spark server's log, try again"
