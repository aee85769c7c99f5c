"""The link to a Spark Connect server: its address, and an end that no lost server holds up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.api.spark.session import is_session_loss
from storm_dagster.model.errors import Unavailable
from storm_dagster.security.spark_remote import host_and_port, spark_token, with_spark_token
from storm_dagster.spark.link import (
    SESSION_GONE,
    check_reachable,
    is_session_gone,
    probe,
    release_session,
)
from storm_dagster.spark.session import open_connect

ADDRESSES = {
    "sc://h": ("h", 15002),
    "sc://h/": ("h", 15002),
    "sc://h:15/;session_id=a:b": ("h", 15),
    "sc://[::1]": ("[::1]", 15002),
    "sc://[::1]:7": ("[::1]", 7),
    "sc://Spark.example:65535": ("Spark.example", 65535),
}
NO_ADDRESSES = (
    *("local[*]", "spark://h:7077", "sc://", "sc:///;a=b", "sc://:15002", "sc://h:", "sc://h:x"),
    *("sc://h:65536", "sc://h:\u00b2", "sc://h:15002;@other:1", "sc://h;a=b", "sc://user@h:15002"),
)


@pytest.fixture
def silent_server() -> Iterator[str]:
    """URL of a server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"sc://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(("url", "address"), ADDRESSES.items())
def test_a_url_has_one_address(url: str, address: tuple[str, int]) -> None:
    assert host_and_port(url) == address


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_a_url_without_an_address_is_refused(url: str, tmp_path: Path) -> None:
    for function in (host_and_port, probe, check_reachable):
        with pytest.raises(Unavailable, match="write sc://host:port"):
            function(url)
    # It gets no token, not even if the cluster's conf names it.
    spark_token({}, tmp_path)
    assert with_spark_token(url, [url], tmp_path) == url


def test_a_server_is_the_same_with_and_without_default_port(tmp_path: Path) -> None:
    token = spark_token({}, tmp_path)
    url = with_spark_token("sc://[::1]", ["sc://[::1]:15002"], tmp_path)
    assert url == f"sc://[::1]/;authorization=Bearer%20{token}"
    other = with_spark_token("sc://[::1]:15003", ["sc://[::1]"], tmp_path)
    assert other == "sc://[::1]:15003"


def test_a_server_that_listens_is_reachable(silent_server: str) -> None:
    probe(silent_server)
    check_reachable(silent_server)


def test_a_server_that_is_gone_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"sc://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(OSError, match="refused"):
        probe(url)
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1.* is out of reach .*: start it"):
        check_reachable(url)


def test_a_session_is_released_without_waiting_for_a_silent_server(silent_server: str) -> None:
    session = open_connect(silent_server)
    release_session(session, silent_server, timeout_secs=0.2)
    assert session.client.is_closed  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("sign", SESSION_GONE)
def test_placements_and_components_know_a_dropped_session_by_the_same_signs(sign: str) -> None:
    error = RuntimeError(f"the server says: {sign}")
    assert is_session_gone(error)
    assert is_session_loss(error, None)
