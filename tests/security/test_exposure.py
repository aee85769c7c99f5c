"""Addresses that other hosts can reach: a service that binds one must authenticate its clients."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.model.errors import InvalidRequest
from storm_dagster.security.exposure import address_beyond_loopback


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "127.1"]
)
def test_only_this_host_reaches_its_loopback_addresses(host: str) -> None:
    assert address_beyond_loopback(host) is None


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.0.2.1", "10.1", "::ffff:192.0.2.1", "2001:db8::1", "fe80::1", "0"],
)
def test_other_hosts_reach_every_other_address(host: str) -> None:
    assert address_beyond_loopback(host) is not None


@given(st.ip_addresses())
def test_an_address_is_loopback_by_the_network_that_it_is_of(
    address: ipaddress.IPv4Address | ipaddress.IPv6Address,
) -> None:
    networks = [ipaddress.ip_network(text) for text in ("127.0.0.0/8", "::1", "::ffff:7f00:0/104")]
    is_loopback = any(address in network for network in networks)
    assert (address_beyond_loopback(str(address)) is None) == is_loopback


@pytest.mark.parametrize("host", ["no-such-host.invalid", "", "a..b", "a" * 64, "a\0b", "ü" * 64])
def test_a_name_that_cannot_be_resolved_is_refused_with_the_key(host: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"storm\.local\.hostname .* cannot be resolved .*: set"
    ):
        address_beyond_loopback(host)
